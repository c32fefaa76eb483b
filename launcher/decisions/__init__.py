"""What jobs decide: no I/O, no clock, no threads.

A job that keeps its ranks is ended by the first that fails:

    endings           which rank that was, how it failed, and how any job is ended
    merged_meeting    what the ranks of a meeting have given, and who is missing; of worlds, too

The driver of an elastic job, in reading order:

    commands          what the user asked for, and what the driver wants done
    driver            the events, and what follows from each
    world_changes     one world after another: resets, who is in the next, what ranks are told
    requirements      what the next world waits for
    losses            workers and hosts that are lost, and how a job ends that has no rank left
    failures          when a failed slot is tried again, and how long a failed host stays away
    placement         where agents and workers are started and ended
    workers           the workers, their worlds, and who gives the state to whom
    hosts             the hosts and their agents, and which comes first
    lines             what the terminal shows
"""
