"""What the driver of an elastic job decides: no I/O, no clock, no threads.

In reading order:

    plan              what the user asked for
    commands          what the driver wants done
    driver            the events, and what follows from each
    succession        one world after another: resets, and who is in the next world
    worlds            a world, who gives the state to whom, and the way from one to the next
    requirements      what the next world waits for
    losses            workers and hosts that are lost
    failures          when a failed slot is tried again, and how long a failed host stays away
    staffing          where agents and workers are started and ended
    roster            the workers
    host_changes      what ranks are told when hosts come and go
    job_end           how a job ends that has no rank any more
    hosts             the hosts and their agents
    host_order        which host comes first
    lines             what the terminal shows
"""
