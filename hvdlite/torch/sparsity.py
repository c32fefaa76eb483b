"""Which gradients are dense, which are sparse, and which exist at all: the same on all ranks.

A rank on which a parameter was not used has to put in zeros of the layout that the others send.
Ranks agree on that in the first step; on a parameter that no rank has used they ask again in each
step, and it gets no gradient meanwhile, as it would get none from one process alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.torch import mpi_ops

_UNKNOWN, _DENSE = 0, 1  # 1 + n: sparse with n sparse dimensions
_MIRROR = 255  # of a code, so that one maximum over ranks finds the least code too


class Layouts:
    """What the ranks of a process set know of the gradients of one optimizer."""

    def __init__(self, process_set: ProcessSet, label: str) -> None:
        self._process_set = process_set
        self._label = label  # the same on all ranks, whichever parameters they train
        self._codes: dict[str, int] = {}
        self._agreed = True  # on what is in `_codes`

    def agree(self, gradients: Mapping[str, torch.Tensor | None]) -> list[str]:
        """The names of gradients that some rank has; blocks while there are unknown ones.

        Raises `HorovodInternalError` on all ranks for one that is dense here and sparse there.
        """
        unknown = [name for name in gradients if not self._agreed or name not in self._codes]
        if unknown:
            self._ask(unknown, [self._codes.get(each, _code(gradients[each])) for each in unknown])
        self._agreed = True
        return [name for name in gradients if name in self._codes]

    def ask_again(self) -> None:
        """Some ranks may have learned what others have not."""
        self._agreed = False

    def _ask(self, names: list[str], local: list[int]) -> None:
        codes = np.array(local, np.uint8)
        mirrored = np.where(codes == _UNKNOWN, 0, _MIRROR - codes).astype(np.uint8)
        most, mirrored_least = mpi_ops.allreduce(
            torch.from_numpy(np.stack([codes, mirrored])),
            name=f"trainable_parameters.{self._label}",
            op=ReduceOp.MAX,
            process_set=self._process_set,
        ).tolist()
        for name, code, mirror in zip(names, most, mirrored_least, strict=True):
            if code == _UNKNOWN:
                continue
            if code != _MIRROR - mirror:
                raise HorovodInternalError(
                    f"the gradient of {name} is dense on some ranks and sparse on others"
                )
            self._codes[name] = code

    def is_dense(self, name: str) -> bool:
        """Whether ranks have agreed that this gradient is dense."""
        return self._codes.get(name) == _DENSE

    def zeros(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """What stands in for a gradient that this rank does not have."""
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
