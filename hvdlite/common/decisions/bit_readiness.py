"""Count which ranks are ready for cached tensors, by bit, many bits at a time.

Coordinator and leaders use the same class. A report says that some ranks are ready for some bits.
Most reports come from the same few sources (a child in the control tree, which stands for all ranks
below it), so that a bit is complete when the ranks of the sources that reported it sum up to all.
The sums of all bits of a page are stored as binary digits across integers (`Tally`): adding a
report takes a few operations on integers of 4096 bits, whatever the number of bits and ranks in it.

The sum is right only while no rank is counted twice. So sources that overlap are compared first,
and only the ranks that are new for a bit are added.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hvdlite.common.base.bitsets import PAGE, NumberSet, Tally, numbers_of

PAGES_KEPT = 4  # Pages kept while nothing waits, since a step has the same sources as the last.


class Arrival(NamedTuple):
    """Bits for which exactly `ranks` are ready."""

    ranks: int  # A mask.
    bits: NumberSet


@dataclass(slots=True)
class _Source:
    """Ranks that were reported together, mostly those below one child in the control tree."""

    ranks: int
    count: int  # The number of the ranks, without the absent ones.
    bits: int = 0  # The bits for which the ranks are ready.


class _Page:
    """The bits of one page of a `NumberSet`."""

    def __init__(self) -> None:
        self.waiting = 0  # The bits that some ranks have reported.
        self._sources: dict[int, _Source] = {}  # By the mask of their ranks.
        self._known = 0  # The mask of the ranks of all sources.
        # Set when some rank is in two sources. From then on counts need a comparison.
        self.overlap = False
        self._tally = Tally()  # The number of ready ranks of each bit, without the absent ones.

    def add(self, bits: int, ranks: int, absent: int) -> None:
        self.waiting |= bits
        source = self._sources.get(ranks)
        if source is None and not ranks & self._known:
            self._count(self._new_source(ranks, absent), bits)
        elif source is not None and not self.overlap:
            self._count(source, bits & ~source.bits)
        else:
            parts = {ranks: bits}  # Which of the ranks are new for which of the bits.
            for known in self._sources.values():
                if known.ranks & ranks:
                    parts = _without(parts, known)
            for part, part_bits in parts.items():
                source = self._sources.get(part) or self._new_source(part, absent)
                self._count(source, part_bits)

    def _new_source(self, ranks: int, absent: int) -> _Source:
        self.overlap |= bool(ranks & self._known)
        self._known |= ranks
        source = self._sources[ranks] = _Source(ranks, (ranks & ~absent).bit_count())
        return source

    def _count(self, source: _Source, bits: int) -> None:
        """Count that the ranks of `source` are ready for `bits`, and were not before."""
        source.bits |= bits
        self._tally.add(bits, source.count)

    def complete(self, bits: int, target: int) -> int:
        """Return those of `bits` for which `target` ranks are ready: all that are needed."""
        return self._tally.which(bits, target)

    def ready(self, bits: int) -> dict[int, int]:
        """Return which ranks are ready for which of `bits`: ranks -> bits."""
        parts = {0: bits}
        for source in self._sources.values():
            split: dict[int, int] = {}
            for ranks, part in parts.items():
                both, rest = part & source.bits, part & ~source.bits
                for ready, ready_bits in ((ranks | source.ranks, both), (ranks, rest)):
                    if ready_bits:
                        split[ready] = split.get(ready, 0) | ready_bits
            parts = split
        return parts

    def discard(self, bits: int) -> None:
        """Forget bits."""
        self.waiting &= ~bits
        for source in self._sources.values():
            source.bits &= ~bits
        self._tally.clear(bits)

    def recount(self, absent: int) -> None:
        """Count again after the absent ranks have changed."""
        self._tally = Tally()
        for source in self._sources.values():
            source.count = (source.ranks & ~absent).bit_count()
            self._tally.add(source.bits, source.count)


def _without(parts: dict[int, int], source: _Source) -> dict[int, int]:
    """Return `parts` (ranks -> bits) without the ranks of `source` for the bits that they have."""
    split: dict[int, int] = {}
    for ranks, bits in parts.items():
        both, rest = bits & source.bits, bits & ~source.bits
        for new_ranks, part in ((ranks & ~source.ranks, both), (ranks, rest)):
            if new_ranks and part:
                split[new_ranks] = split.get(new_ranks, 0) | part
    return split


class BitReadiness:
    """Which of the needed ranks have reported each bit."""

    def __init__(self, needed: int) -> None:
        # All ranks that report here, as a mask, and those among them that count as ready for
        # everything, because they have joined.
        self._needed = needed
        self.absent = 0
        self._target = needed.bit_count()  # The number of ranks that are needed and not absent.
        self._pages: dict[int, _Page] = {}
        self._since: dict[int, float] = {}  # By bit, in the order of arrival.

    @property
    def all_absent(self) -> bool:
        return self.absent == self._needed

    @property
    def bits(self) -> NumberSet:
        """The bits that some ranks have reported and others have not."""
        pages = ((page_index, page.waiting) for page_index, page in self._pages.items())
        return NumberSet({page_index: bits for page_index, bits in pages if bits})

    def add(self, bits: NumberSet, ranks: int, now: float) -> list[Arrival]:
        """Count that `ranks` are ready for `bits`; forget and return the bits that it completes."""
        complete_pages: dict[int, int] = {}
        for page_index, some in bits.pages.items():
            page = self._pages.get(page_index)
            if page is None:
                page = self._pages[page_index] = _Page()
            for bit in numbers_of(some & ~page.waiting):
                self._since[page_index * PAGE + bit] = now
            page.add(some, ranks, self.absent)
            complete = page.complete(some, self._target)
            if complete:
                complete_pages[page_index] = complete
        if not complete_pages:
            return []
        if self.absent:  # An absent rank may have reported a bit before it joined, or not.
            return self.pop(NumberSet(complete_pages))
        for page_index, some in complete_pages.items():
            self._forget(page_index, some)
        return [Arrival(self._needed, NumberSet(complete_pages))]

    def pop(self, bits: NumberSet) -> list[Arrival]:
        """Forget bits; return which ranks were ready for those that some ranks had reported."""
        pages_of: dict[int, dict[int, int]] = {}
        for page_index, some in bits.pages.items():
            page = self._pages.get(page_index)
            if page is None or not (some := some & page.waiting):
                continue
            for ranks, ready_bits in page.ready(some).items():
                pages_of.setdefault(ranks, {})[page_index] = ready_bits
            self._forget(page_index, some)
        return [Arrival(ranks, NumberSet(pages)) for ranks, pages in pages_of.items()]

    def _forget(self, page_index: int, bits: int) -> None:
        for bit in numbers_of(bits):
            del self._since[page_index * PAGE + bit]
        page = self._pages[page_index]
        # A page that is empty is dropped with its sources if these have made counting slow.
        if bits == page.waiting and (page.overlap or len(self._pages) > PAGES_KEPT):
            del self._pages[page_index]
        else:
            page.discard(bits)

    def discard(self, bit: int) -> None:
        """Forget a bit, if some ranks have reported it."""
        if bit in self._since:
            self._forget(bit // PAGE, 1 << bit % PAGE)

    def excuse(self, ranks: int) -> list[Arrival]:
        """Count `ranks` as ready from now on; forget and return the bits that it completes."""
        self.absent |= ranks & self._needed
        self._recount()
        complete = (
            (page_index, page.complete(page.waiting, self._target))
            for page_index, page in self._pages.items()
        )
        return self.pop(NumberSet({page_index: bits for page_index, bits in complete if bits}))

    def expect(self, ranks: int) -> None:
        if ranks & self.absent:
            self.absent &= ~ranks
            self._recount()

    def _recount(self) -> None:
        self._target = (self._needed & ~self.absent).bit_count()
        for page in self._pages.values():
            page.recount(self.absent)

    def pop_overdue(self, before: float) -> list[Arrival]:
        """Forget and return the bits that wait since before `before`."""
        return self.pop(NumberSet.of(bit for bit, since in self._since.items() if since < before))

    @property
    def oldest(self) -> float | None:
        """Since when the oldest bit waits; None without any."""
        return next(iter(self._since.values()), None)  # Dicts keep the order of arrival.

    def waiting(self) -> Iterator[tuple[int, int, float]]:
        """Yield each incomplete bit, the mask of the missing ranks, and since when it waits."""
        missing: dict[int, int] = {}
        for page_index, page in self._pages.items():
            for ranks, bits in page.ready(page.waiting).items():
                lacking = self._needed & ~(ranks | self.absent)
                missing |= {page_index * PAGE + bit: lacking for bit in numbers_of(bits)}
        for bit, since in self._since.items():
            yield bit, missing[bit], since
