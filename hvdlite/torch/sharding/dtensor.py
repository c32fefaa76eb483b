"""DTensor and its placements, where each version of torch has them."""

from __future__ import annotations

try:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.experimental import implicit_replication
except ImportError:  # Their place before torch 2.5.
    from torch.distributed._tensor import (  # type: ignore[no-redef]
        DTensor,
        Partial,
        Replicate,
        Shard,
        distribute_tensor,
    )
    from torch.distributed._tensor.experimental import (  # type: ignore[no-redef]
        implicit_replication,
    )

__all__ = ["DTensor", "Partial", "Replicate", "Shard", "distribute_tensor", "implicit_replication"]
