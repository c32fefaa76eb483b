"""What the driver of an elastic job decides: no I/O, no clock, no threads.

In reading order:

    commands          what the driver wants done
    plan              what the user asked for
    driver            the events, and which part answers each of them
    host_order        which host comes first
    discovery_output  what a discovery script prints
"""
