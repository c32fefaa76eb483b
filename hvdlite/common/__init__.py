"""The part of hvdlite that knows no framework; no public API.

A package imports from itself and from packages below it, never upwards:

    iterations      what ranks do in each training iteration: a trace, metrics, who is slow
    gradients       buckets of gradients: names, delays, groups, segments, reduction
    elastic         states, and the loop that trains on when ranks come and go
    api             the collectives as adapters call them, written once for all frameworks
    runtime         init and shutdown, rank and size, process sets
    engine          the engine thread: drain, negotiate, run, complete
    decisions       coordinator, aggregator, response cache, fusion: pure functions of messages
    devices         collectives in the memory of accelerators, by their vendors' libraries
    collectives     the table of collectives, and the backends that run them
    transport       control messages, shared memory and arrays between ranks
    driver_link     the connection between a worker of an elastic job and its driver
    meeting         how ranks find each other: the exchange, and its sources
    connections     proven, framed and watched connections, and the loop that drives them
    requests        what ranks ask for: entries, handles, the messages about them, process sets
    settings        every setting, declared once, and the log
    tensors         tensors of any framework: what an adapter tells of them, compression
    segmentation    strategies that cut a list of gradients into segments: pure
    layouts         how tensors are cut among ranks, and which strategies cut operators so: pure
    timeline        what the engine did when, as a file in the Chrome trace format
    base            errors, warnings, reduce ops, bit masks, the topology, small helpers

docs/architecture.md follows one gradient, a killed rank and one push through these packages.

The names that users of Horovod import from `horovod.common` (basics, exceptions, process_sets,
util) are aliases, which `hvdlite.module_aliases` lists.
"""
