"""The layouts of gradients: dense, sparse, or absent, the same on all ranks.

A rank on which a parameter was not used contributes zeros, in the layout that the other ranks send.
Ranks agree on the layouts in the first step. A parameter that no rank has used yet has no gradient,
as it would get none in a single process; ranks ask for its layout again in each step. Once one has
used it, all ranks contribute to every step, zeros where none of them does.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from hvdlite.common.api.options import CallOptions
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.gradients.buckets import ReductionConfig
from hvdlite.torch import mpi_ops

# The codes of layouts: 1 + n is a sparse one with n sparse dimensions.
_UNKNOWN, _DENSE = 0, 1
# The maximum of `_MIRROR` - code over the ranks gives the least code, so that one allreduce finds
# both the least and the greatest code.
_MIRROR = 255


class Layouts:
    """The layouts of one optimizer's gradients, on which the ranks of a process set agree."""

    def __init__(self, reduction: ReductionConfig, label: str) -> None:
        """Know no layout yet; `label` is the same on all ranks, whichever parameters they train."""
        # With the question comes what else ranks must have alike, and would wait for in vain.
        self._options = CallOptions(
            reduction.process_set, ReduceOp.MAX, settings=reduction.compression_label
        )
        self._label = label
        self._codes: dict[str, int] = {}
        # False when other ranks may have other codes; `agree` asks for all of them then.
        self._agreed = True

    def agree(self, gradients: Mapping[str, torch.Tensor | None]) -> list[str]:
        """Return the names of gradients that some rank has; block while some are unknown.

        Raises `HorovodInternalError` on all ranks for one that is dense here and sparse there, and
        where ranks compress in different ways.
        """
        if self._agreed and gradients.keys() <= self._codes.keys():  # as in every steady step
            return list(gradients)
        unknown = [name for name in gradients if not self._agreed or name not in self._codes]
        if unknown:
            local_codes = [self._codes.get(name, _code(gradients[name])) for name in unknown]
            codes = np.array(local_codes, np.uint8)
            mirrored = np.where(codes == _UNKNOWN, 0, _MIRROR - codes).astype(np.uint8)
            both = torch.from_numpy(np.stack([codes, mirrored]))
            label = f"trainable_parameters.{self._label}"
            (reduced,) = mpi_ops.runner.run("allreduce", [both], label, self._options).tensors
            greatest, mirrored_least = reduced.tolist()
            for name, code, mirror in zip(unknown, greatest, mirrored_least, strict=True):
                if code == _UNKNOWN:
                    continue
                if code != _MIRROR - mirror:
                    raise HorovodInternalError(
                        f"the gradient of {name} is dense on some ranks and sparse on others"
                    )
                self._codes[name] = code
        self._agreed = True
        return [name for name in gradients if name in self._codes]

    def ask_again(self) -> None:
        """Ask for all layouts in the next `agree`, as some ranks may know more than others."""
        self._agreed = False

    def is_dense(self, name: str) -> bool:
        """Return whether ranks have agreed that this gradient is dense."""
        return self._codes.get(name) == _DENSE

    def zeros(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """Return zeros in the agreed layout, for a gradient that this rank does not have."""
        code = self._codes.get(name, _DENSE)
        if code == _DENSE:
            return torch.zeros_like(parameter)
        dimensions = code - 1
        return torch.sparse_coo_tensor(
            torch.empty(dimensions, 0, dtype=torch.int64, device=parameter.device),
            parameter.new_empty(0, *parameter.shape[dimensions:]),
            parameter.shape,
            check_invariants=False,
        )


def _code(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return _UNKNOWN
    return 1 + gradient.sparse_dim() if gradient.is_sparse else _DENSE
