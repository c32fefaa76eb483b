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

from typing import TYPE_CHECKING

from hvdlite.data.loaders import AsyncDataLoaderMixin, BaseDataLoader
from hvdlite.missing_names import module_getattr

if TYPE_CHECKING:  # which would take every name for one that is there
    from hvdlite.data.samplers import SliceSampler, sampler_for
    from hvdlite.data.slicing import Sliced, slice_batch
else:
    __getattr__ = module_getattr(
        __name__,
        SliceSampler="hvdlite.data.samplers:SliceSampler",
        Sliced="hvdlite.data.slicing:Sliced",
        sampler_for="hvdlite.data.samplers:sampler_for",
        slice_batch="hvdlite.data.slicing:slice_batch",
    )

__all__ = [
    "AsyncDataLoaderMixin",
    "BaseDataLoader",
    "SliceSampler",
    "Sliced",
    "sampler_for",
    "slice_batch",
]
