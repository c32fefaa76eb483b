"""Integer sets stored as bit masks, so that one operation handles many ranks or tensors at once.

A set of ranks is a plain int, a mask, in which rank r is ``1 << r``. A set of bits of the response
cache is a `NumberSet`, since these numbers grow without bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

PAGE = 4096  # Numbers in a page: an operation on an int of so many bits takes as long as on 30.
_LOG = PAGE.bit_length() - 1


def mask_of(numbers: Iterable[int]) -> int:
    if isinstance(numbers, NumberSet):
        return numbers.mask
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return mask


def runs_of(numbers: Iterable[int]) -> list[int]:
    """Return the numbers, ascending, as [start, length, start, length ...]: mostly a few bytes."""
    if isinstance(numbers, NumberSet):
        return numbers.runs
    pairs: list[int] = []
    for number in sorted(numbers):
        if pairs and pairs[-2] + pairs[-1] == number:
            pairs[-1] += 1
        else:
            pairs += (number, 1)
    return pairs


def lowest(mask: int) -> int:
    """Return the lowest number in a mask that is not empty."""
    return (mask & -mask).bit_length() - 1


def numbers_of(mask: int) -> Iterator[int]:
    if not mask & mask - 1:  # one number, or none
        return iter((mask.bit_length() - 1,) if mask else ())
    return (n for start, end in _spans(mask) for n in range(start, end))


def _spans(mask: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each run of set bits: a search in a string, which is fast."""
    if not mask & mask - 1:  # one number
        yield mask.bit_length() - 1, mask.bit_length()
        return
    digits = bin(mask)[:1:-1]  # lowest first
    start = digits.find("1")
    while start >= 0:
        end = digits.find("0", start)
        if end < 0:
            end = len(digits)
        yield start, end
        start = digits.find("1", end)


class NumberSet:
    """An immutable set of natural numbers, which may be large and far apart.

    ``pages[p]`` holds the numbers from ``p * PAGE`` on, as bits; no page is empty.
    """

    __slots__ = ("_mask", "_runs", "pages")

    def __init__(self, pages: dict[int, int]) -> None:
        self.pages = pages
        self._mask = -1  # Computed at first use.
        self._runs: list[int] | None = None

    @classmethod
    def of(cls, numbers: Iterable[int]) -> NumberSet:
        if isinstance(numbers, NumberSet):
            return numbers
        pages: dict[int, int] = {}
        for number in numbers:
            page = number >> _LOG
            pages[page] = pages.get(page, 0) | 1 << (number & PAGE - 1)
        return cls(pages)

    @classmethod
    def of_mask(cls, mask: int) -> NumberSet:
        pages, left, page = {}, mask, 0
        while left:
            low = left & (1 << PAGE) - 1
            if low:
                pages[page] = low
            left >>= PAGE
            page += 1
        numbers = cls(pages)
        numbers._mask = mask
        return numbers

    @classmethod
    def of_runs(cls, runs: Sequence[int]) -> NumberSet:
        """Make a set of the numbers of `runs`: [start, length, start, length ...]."""
        pages: dict[int, int] = {}
        for start, length in zip(runs[::2], runs[1::2], strict=True):
            page, low = start >> _LOG, start & PAGE - 1
            while length > 0:
                high = min(low + length, PAGE)
                pages[page] = pages.get(page, 0) | (1 << high) - (1 << low)
                length -= high - low  # noqa: PLW2901
                page, low = page + 1, 0
        return cls(pages)

    @property
    def mask(self) -> int:
        """The numbers as bits of one int: for sets without very large numbers."""
        if self._mask < 0:
            self._mask = sum(bits << (page << _LOG) for page, bits in self.pages.items())
        return self._mask

    @property
    def runs(self) -> list[int]:
        """The numbers as [start, length, start, length ...]. Not to be changed."""
        if self._runs is not None:
            return self._runs
        pairs: list[int] = []
        for page in sorted(self.pages):
            base = page << _LOG
            for start, end in _spans(self.pages[page]):
                if pairs and pairs[-2] + pairs[-1] == base + start:
                    pairs[-1] += end - start
                else:
                    pairs += (base + start, end - start)
        self._runs = pairs
        return pairs

    def __and__(self, other: NumberSet) -> NumberSet:
        pages = {}
        for page, bits in self.pages.items():
            both = bits & other.pages.get(page, 0)
            if both:
                pages[page] = both
        return NumberSet(pages)

    def __or__(self, other: NumberSet) -> NumberSet:
        pages = dict(self.pages)
        for page, bits in other.pages.items():
            pages[page] = pages.get(page, 0) | bits
        return NumberSet(pages)

    def __sub__(self, other: NumberSet) -> NumberSet:
        left = ((p, bits & ~other.pages.get(p, 0)) for p, bits in self.pages.items())
        return NumberSet({page: bits for page, bits in left if bits})

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        return bool(self.pages.get(number >> _LOG, 0) >> (number & PAGE - 1) & 1)

    def __iter__(self) -> Iterator[int]:
        for page in sorted(self.pages):
            base = page << _LOG
            for number in numbers_of(self.pages[page]):
                yield base + number

    def __bool__(self) -> bool:
        return bool(self.pages)

    def __len__(self) -> int:
        return sum(bits.bit_count() for bits in self.pages.values())

    def __eq__(self, other: object) -> bool:
        """Compare with a set, or with a sequence of numbers in ascending order."""
        if isinstance(other, NumberSet):
            return self.pages == other.pages
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"NumberSet({list(self)})"


NO_NUMBERS = NumberSet({})


class Tally:
    """Counters of many numbers, stored bit-sliced: one int holds one binary digit of all of them.

    An addition with carry then works on all counters side by side, and takes as many operations as
    the amount has binary digits, however many counters it is added to.
    """

    def __init__(self) -> None:
        self._digits: list[int] = []  # The ones, the twos, the fours ... of all counters.

    def add(self, numbers: int, amount: int) -> None:
        digits, place, carry = self._digits, 0, 0
        while amount or carry:
            if place == len(digits):
                digits.append(0)
            digit = digits[place]
            if amount & 1:
                digits[place] = digit ^ numbers ^ carry
                carry = digit & numbers | carry & (digit ^ numbers)
            else:
                digits[place] = digit ^ carry
                carry &= digit
            amount >>= 1
            place += 1

    def which(self, numbers: int, amount: int) -> int:
        """Return those of `numbers` whose counter is `amount`."""
        for digit in self._digits:
            numbers = numbers & digit if amount & 1 else numbers & ~digit
            amount >>= 1
        return 0 if amount else numbers

    def clear(self, numbers: int) -> None:
        self._digits = [digit & ~numbers for digit in self._digits]
