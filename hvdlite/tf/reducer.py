"""How one optimizer or tape treats its gradients: which are reduced, together with which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite.common.gradients import Terms, check_groups, split_evenly
from hvdlite.tf.exchange import Gradient, reduce_gradients
from hvdlite.tf.sources import LocalSources, is_variable, key_of, names_of


class Reducer:
    """Gradients of this rank in, gradients of all ranks out."""

    def __init__(
        self,
        prefix: str,
        terms: Terms,
        groups: object = None,
        scale_local_gradients: bool = True,
    ) -> None:
        """`prefix` begins all names, and is the same on all ranks.

        `groups` is None, how many groups, or lists of variables whose gradients travel together.
        Raises `ValueError` for anything else.
        """
        check_groups(groups, is_variable, "tf.Variable")
        self.terms = terms
        self.local = LocalSources()
        self._prefix = prefix
        self._groups = groups
        self._scale_local_gradients = scale_local_gradients

    def reduce(
        self,
        gradients: Sequence[Gradient],
        sources: Sequence[Any],
        names: Sequence[str] | None = None,
    ) -> list[Gradient]:
        """The gradients of `sources`, reduced over all ranks; None stays None.

        Those of local sources are not reduced. They are divided by the number of ranks, as they
        would be in an average to which no other rank adds anything, unless that was not wanted.

        Every rank gives gradients of the same sources in the same order; `names` are used in
        place of those that are made from the sources. Raises `tf.errors.OpError` when a
        reduction fails.
        """
        if not self.terms.active:
            return list(gradients)
        names = names or names_of(self._prefix, sources)
        is_local = self.local.pick(sources)
        sent = [
            None if local else gradient for gradient, local in zip(gradients, is_local, strict=True)
        ]
        reduced = reduce_gradients(sent, names, self.terms, self._name_groups(names, sent, sources))
        return [
            self._scaled(gradient) if local else result
            for gradient, result, local in zip(gradients, reduced, is_local, strict=True)
        ]

    def _name_groups(
        self, names: Sequence[str], gradients: Sequence[Gradient], sources: Sequence[Any]
    ) -> list[list[str]]:
        groups = self._groups
        if isinstance(groups, int):
            sent = [name for name, each in zip(names, gradients, strict=True) if each is not None]
            return split_evenly(sent, groups)
        if not isinstance(groups, list):
            return []
        name_of = {key_of(source): name for source, name in zip(sources, names, strict=True)}
        keys = [[key_of(each) for each in group] for group in groups]
        return [[name_of[key] for key in group if key in name_of] for group in keys]

    def _scaled(self, gradient: Gradient) -> Gradient:
        if gradient is None or not self._scale_local_gradients:
            return gradient
        size = self.terms.process_set.size()
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / size, gradient.indices, gradient.dense_shape)
        return gradient / size
