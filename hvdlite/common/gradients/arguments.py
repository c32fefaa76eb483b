"""The arguments that all distributed optimizers and tapes share, told once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
PLACE = "(what hvdlite.common.gradients.arguments tells of all others)"
# Names of the arguments -> what they mean. An optimizer tells those that it has.
ARGUMENTS = {
    "compression": """`Compression.fp16` or `Compression.bf16` makes what is sent smaller;
for slow links, `int8()`, `powersgd(rank)`, `topk(ratio)` and `onebit()` of it send much less.""",
    "gradient_predivide_factor": """gradients are divided by this factor f before the sum, and by
size / f after it.""",
    "groups": """how many groups, or lists of parameters: gradients that are reduced together.
`num_groups` is its deprecated name.""",
    "process_set": "the ranks that share gradients; on all others nothing is exchanged.",
    "scale_local_gradients": """gradients that stay on this rank, of variables that
``register_local_var()`` or ``register_local_source()`` names, are divided by the number of ranks,
as an average would divide them.""",
    "segmentation": """which gradients are reduced together, as ``--segmentation`` takes it:
``"size:80,20"``, ``"index:60,160"``, ``"mb:16"``, ``"count:50"``, ``"threshold:64"`` or
``"auto"``. Without it, what was set for the process set or the job.""",
    "fusion": """segmentation in Fleet's words: `fuse_grad_size_in_MB`, `fuse_grad_count`,
`fuse_all_reduce_ops`.""",
}


def explain_arguments(function: F) -> F:
    """Put what is said of the shared arguments into the docstring, in the place of `PLACE`."""
    if function.__doc__ is not None:  # as it is under python -OO
        known = inspect.signature(function).parameters
        told = [
            f"- `{name}`: {text}".replace("\n", "\n      ")
            for name, text in ARGUMENTS.items()
            if name in known
        ]
        function.__doc__ = function.__doc__.replace(PLACE, "\n    ".join(told).lstrip())
    return function
