"""torch.distributed over hvdlite: the process group "hvdlite".

import hvdlite.torch as hvd

hvd.init_process_group()

Everything of PyTorch that shards or replicates runs over it: DDP, FSDP2, DTensor, pipelining,
distributed checkpoints. Its collectives are those of the engine, in the one total order of the job,
beside the calls of `hvdlite.torch`.

    registration   makes the names "hvdlite" and "hvdlite://" known to torch; imports nothing else
    rendezvous     hvdlite:// : the ranks of the job meet, and share a store
    group          the methods that torch calls
    calls          from tensors and options to entries of the engine
    work, futures  what torch waits for
    peers          send and recv
    checks         what can be seen to be wrong at the call
    reduce_ops     torch's reductions as those of the engine
"""
