"""What the driver of an elastic job decides: no I/O, no clock, no threads.

In reading order:

    plan              what the user asked for
    commands          what the driver wants done
    driver            the events, and what follows from each
    succession        one world after another: resets, and who is in the next world
    worlds            a world, and who gives the state to whom
    reset             the way from one world to the next
    check_agreement   in which check all ranks hear of a change of hosts
    exchange_rounds   the rounds in which the ranks of a world meet
    requirements      what the next world waits for
    losses            workers and hosts that are lost
    failures          when a failed slot is tried again
    staffing          where agents and workers are started and ended
    roster            the workers
    host_changes      what ranks are told when hosts come and go
    job_end           how a job ends that has no rank any more
    hosts             the hosts and their agents
    cooldowns         how long a failed host stays away
    host_order        which host comes first
    discovery_output  what a discovery script prints
    lines             what the terminal shows
"""
