"""The part of hvdlite that knows no framework; no public API.

A package imports from itself and from packages below it, never upwards:

    iterations      what every rank did in every training iteration, as a trace
    gradients       buckets of gradients: names, delays, groups, segments, reduction
    api             the public forms of the collectives, written once for all frameworks
    runtime         init and shutdown, rank and size, process sets: the module-level state
    engine          the engine thread: drain, negotiate, run, complete
    decisions       coordinator, aggregator, response cache, fusion: pure functions of messages
    collectives     the table of collectives, and the backends that run them
    transport       control messages, shared memory and arrays between ranks
    plain           messages, settings, entries, handles: data without behaviour
    segmentation    strategies that cut a list of gradients into segments: pure
    timeline        what the engine did when, as a file in the Chrome trace format
    base            errors, warnings, reduce ops, bit masks, the topology

The way of one gradient from a hook to `p.grad`, with N ranks:

    training thread     a hook of the optimizer finds layer3.weight.grad complete
                          -> api.submit            checks the call, makes a Request and an Entry
                          -> engine.pending, inbox hold the Entry; wake the engine thread
    engine thread         -> engine.control_plane  reports the Request (or its cache bit) upwards
    engine thread of      -> decisions.aggregator  (leader of a host) waits for the ranks below it
    other ranks           -> decisions.coordinator (rank 0) all ranks have it: a Response
                          -> decisions.fusion      Responses of one kind become a Segment
    engine thread         <- engine.engine         obeys the Segment, in the one total order
                          -> engine.executor       chooses a backend by collectives.backend_choice
                          -> collectives.shm, ring, hierarchical   pack, reduce, unpack
                          -> plain.handles         completes the Handle of the Entry
    training thread     optimizer.step() waits only for Handles that are not complete yet

The names that users of Horovod import from `horovod.common` (basics, exceptions, process_sets,
util) are aliases, which `hvdlite.module_aliases` lists.
"""
