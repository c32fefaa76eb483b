"""Batches for the ranks of a job: loaders that load ahead, and slices of batches.

class Images(BaseDataLoader):
    def __len__(self): ...
    def _iterate(self): ...  # yields batches

class ImagesAhead(AsyncDataLoaderMixin, Images):
    pass

for images, labels in Sliced(ImagesAhead(8), ((1, 1, 1, 4), (1,))):
    ...  # images are a quarter of their width, labels are whole

Nothing here needs a framework. What cuts batches is loaded when it is asked for, as it needs the
ranks of the job, and the loaders need nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvdlite.data.loaders import AsyncDataLoaderMixin, BaseDataLoader
from hvdlite.missing_names import attribute_error

if TYPE_CHECKING:
    from hvdlite.data.samplers import SliceSampler, sampler_for
    from hvdlite.data.slicing import Sliced, slice_batch

_ON_DEMAND = {
    "SliceSampler": "samplers",
    "Sliced": "slicing",
    "sampler_for": "samplers",
    "slice_batch": "slicing",
}


def __getattr__(name: str) -> Any:
    """Load what cuts batches."""
    if name in _ON_DEMAND:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_ON_DEMAND[name]}"), name)
    raise attribute_error(__name__, name)


__all__ = [
    "AsyncDataLoaderMixin",
    "BaseDataLoader",
    "SliceSampler",
    "Sliced",
    "sampler_for",
    "slice_batch",
]
