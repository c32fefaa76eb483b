"""Counting who is ready for what was answered before: by bit, many bits at a time.

The same on every level of the tree. This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hvdlite.common.base.bitsets import PAGE, NumberSet, Tally, numbers_of

PAGES_KEPT = 4  # while nothing waits: a step has the same sources as the last


class Arrival(NamedTuple):
    """Exactly these ranks are ready for these bits."""

    ranks: int  # a mask
    bits: NumberSet


@dataclass(slots=True)
class _Source:
    """Ranks that were reported together: mostly those below one child in the tree, so there are
    few sources."""

    ranks: int
    count: int  # of the ranks, without the absent ones
    bits: int = 0  # for which they are ready


class _Page:
    """The bits of one page of a `NumberSet`."""

    def __init__(self) -> None:
        self.waiting = 0  # the bits that some ranks have reported
        self._sources: dict[int, _Source] = {}  # by their ranks
        self._known = 0  # the ranks of all sources
        self.overlap = False  # some rank is in two sources
        self._tally = Tally()  # of ranks that are ready, without the absent ones

    def add(self, bits: int, ranks: int, absent: int) -> None:
        """`ranks` are ready for `bits`."""
        self.waiting |= bits
        source = self._sources.get(ranks)
        if source is None and not ranks & self._known:
            self._count(self._new_source(ranks, absent), bits)
        elif source is not None and not self.overlap:
            self._count(source, bits & ~source.bits)
        else:
            for part, own in self._without_known(ranks, bits).items():
                source = self._sources.get(part) or self._new_source(part, absent)
                self._count(source, own)

    def _new_source(self, ranks: int, absent: int) -> _Source:
        self.overlap |= bool(ranks & self._known)
        self._known |= ranks
        source = self._sources[ranks] = _Source(ranks, (ranks & ~absent).bit_count())
        return source

    def _count(self, source: _Source, bits: int) -> None:
        """The ranks of `source` are ready for `bits`, and were not before."""
        source.bits |= bits
        self._tally.add(bits, source.count)

    def _without_known(self, ranks: int, bits: int) -> dict[int, int]:
        """Which of `ranks` were not known to be ready, for which of `bits`."""
        parts = {ranks: bits}
        for source in self._sources.values():
            if source.ranks & ranks:
                parts = _without(parts, source)
        return parts

    def complete(self, bits: int, target: int) -> int:
        """Those of `bits` for which as many ranks are ready as are needed."""
        return self._tally.which(bits, target)

    def ready(self, bits: int) -> dict[int, int]:
        """Ranks -> those of `bits` for which exactly these are ready."""
        groups = {0: bits}
        for source in self._sources.values():
            split: dict[int, int] = {}
            for ranks, own in groups.items():
                both, rest = own & source.bits, own & ~source.bits
                for whose, part in ((ranks | source.ranks, both), (ranks, rest)):
                    if part:
                        split[whose] = split.get(whose, 0) | part
            groups = split
        return groups

    def discard(self, bits: int) -> None:
        """Forget bits."""
        self.waiting &= ~bits
        for source in self._sources.values():
            source.bits &= ~bits
        self._tally.clear(bits)

    def recount(self, absent: int) -> None:
        """Count again: other ranks are absent now."""
        self._tally = Tally()
        for source in self._sources.values():
            source.count = (source.ranks & ~absent).bit_count()
            self._tally.add(source.bits, source.count)


def _without(parts: dict[int, int], source: _Source) -> dict[int, int]:
    """Ranks -> bits, where the ranks of `source` are taken out for the bits that they have."""
    split: dict[int, int] = {}
    for ranks, bits in parts.items():
        both, rest = bits & source.bits, bits & ~source.bits
        for whose, part in ((ranks & ~source.ranks, both), (ranks, rest)):
            if whose and part:
                split[whose] = split.get(whose, 0) | part
    return split


class BitReadiness:
    """Which ranks have reported each bit, of those that are needed."""

    def __init__(self, needed: int) -> None:
        self._needed = needed  # all that report here, as bits
        self._absent = 0  # of those, the ranks that count as ready for everything: joined ones
        self._target = needed.bit_count()  # how many are needed and not absent
        self._pages: dict[int, _Page] = {}
        self._since: dict[int, float] = {}

    @property
    def absent(self) -> int:
        """The excused ranks, as bits."""
        return self._absent

    @property
    def all_absent(self) -> bool:
        """Every rank is excused."""
        return self._absent == self._needed

    @property
    def bits(self) -> NumberSet:
        """Those that some ranks have and others have not."""
        pages = ((number, page.waiting) for number, page in self._pages.items())
        return NumberSet({number: bits for number, bits in pages if bits})

    def add(self, bits: NumberSet, ranks: int, now: float) -> list[Arrival]:
        """`ranks` are ready for `bits`; what that completes (and forgets), with who is ready."""
        done: dict[int, int] = {}
        for number, some in bits.pages.items():
            page = self._pages.get(number)
            if page is None:
                page = self._pages[number] = _Page()
            for bit in numbers_of(some & ~page.waiting):
                self._since[number * PAGE + bit] = now
            page.add(some, ranks, self._absent)
            complete = page.complete(some, self._target)
            if complete:
                done[number] = complete
        if not done:
            return []
        if self._absent:  # of these, some may have been ready
            return self.take(NumberSet(done))
        for number, some in done.items():
            self._forget(number, some)
        return [Arrival(self._needed, NumberSet(done))]

    def take(self, bits: NumberSet) -> list[Arrival]:
        """Forget bits; who was ready for those that waited."""
        taken: dict[int, dict[int, int]] = {}
        for number, some in bits.pages.items():
            page = self._pages.get(number)
            if page is None or not (some := some & page.waiting):
                continue
            for ranks, own in page.ready(some).items():
                taken.setdefault(ranks, {})[number] = own
            self._forget(number, some)
        return [Arrival(ranks, NumberSet(pages)) for ranks, pages in taken.items()]

    def _forget(self, number: int, bits: int) -> None:
        for bit in numbers_of(bits):
            del self._since[number * PAGE + bit]
        page = self._pages[number]
        if bits == page.waiting and (page.overlap or len(self._pages) > PAGES_KEPT):
            del self._pages[number]  # the next step may have other sources
        else:
            page.discard(bits)

    def discard(self, bit: int) -> None:
        """Forget a bit, if it waits."""
        if bit in self._since:
            self._forget(bit // PAGE, 1 << bit % PAGE)

    def excuse(self, ranks: int) -> list[Arrival]:
        """These count as ready from now on; what that completes (and forgets)."""
        self._absent |= ranks & self._needed
        self._recount()
        done = {
            number: page.complete(page.waiting, self._target)
            for number, page in self._pages.items()
        }
        return self.take(NumberSet({number: bits for number, bits in done.items() if bits}))

    def expect(self, ranks: int) -> None:
        """These are needed again."""
        if ranks & self._absent:
            self._absent &= ~ranks
            self._recount()

    def _recount(self) -> None:
        self._target = (self._needed & ~self._absent).bit_count()
        for page in self._pages.values():
            page.recount(self._absent)

    def take_partial(self, before: float) -> list[Arrival]:
        """Remove what has waited since before `before`."""
        return self.take(NumberSet.of(bit for bit, since in self._since.items() if since < before))

    @property
    def oldest(self) -> float | None:
        """Since when the longest waiting bit waits; None where nothing does."""
        return next(iter(self._since.values()), None)  # dicts keep the order of arrival

    def waiting(self) -> Iterator[tuple[int, int, float]]:
        """Each bit, the ranks that are missing, as bits, and since when it waits."""
        missing: dict[int, int] = {}
        for number, page in self._pages.items():
            for ranks, bits in page.ready(page.waiting).items():
                lacking = self._needed & ~(ranks | self._absent)
                missing |= {number * PAGE + bit: lacking for bit in numbers_of(bits)}
        for bit, since in self._since.items():
            yield bit, missing[bit], since
