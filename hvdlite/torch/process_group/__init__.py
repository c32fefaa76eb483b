"""torch.distributed over hvdlite: the process group "hvdlite".

import hvdlite.torch as hvd

hvd.init_process_group()

Everything of PyTorch that shards or replicates runs over it: DDP, FSDP2, DTensor, pipelining,
distributed checkpoints. Its collectives are those of the engine, in the one total order of the job,
beside the calls of `hvdlite.torch`.

    registration   makes the names "hvdlite" and "hvdlite://" known to torch
    rendezvous     hvdlite:// : the ranks of the job meet, and share a store
    group          the process group, as torch calls it
    reductions     its methods that reduce
    copies         its methods that copy tensors from rank to rank
    base           what all methods share
    calls          from tensors and options to entries of the engine
    tensors        the entries of tensors
    work           what torch waits for
    waiting        futures, deadlines and aborts, which end such a wait
    peers          send and recv
    checks         what can be seen to be wrong at the call
    weights        whether replicas have the same weights
    arguments      the two spellings of every method, and torch's reductions as the engine's
"""
