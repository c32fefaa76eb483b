"""What the launcher asks of a rank that runs, and the answer, as lines of text.

An order is a line of a named pipe of the rank, which lies beside that of the launcher's events; the
answer consists of events of the rank.

| order    | argument       | answer                                                              |
|----------|----------------|---------------------------------------------------------------------|
| count    | none           | none: the rank counts, and sends a line a second, from now on       |
| stack    | none           | the Python stack of its main thread                                 |
| tensor   | a name         | what was run of the tensor of late: see `Counts.history`            |
| timeline | a file, steps  | {begun: the file}, and after so many steps {file, steps, seconds}   |
| pass     | a rank, a line | none: the line is an order, which goes to that rank, -1: to all     |

The last one is for ranks on hosts without a pipe, as under mpirun: their engines pass orders on.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from typing import Any, NamedTuple

COUNT, STACK, TENSOR, TIMELINE, PASS = KINDS = ("count", "stack", "tensor", "timeline", "pass")
BEGUN = "begun"  # In an answer that another one follows, which may take long.
OF_ALL = b"all"  # In the file COUNT where orders are to be passed on.
PIPE_NAME = "orders"  # Followed by a dot and the rank.
LONGEST_ORDER = 2048
LONGEST_PART = 3500  # A line of at most 4096 bytes is written to a pipe as a whole.
MOST_PARTS = 64
LARGEST_ANSWER = 1 << 20  # When it is unpacked.


class Order(NamedTuple):
    """One order, whose number comes back with its answer."""

    number: int
    kind: str
    arguments: tuple[Any, ...] = ()


def pack_order(order: Order) -> str:
    """Return one line. Raises `ValueError` for one that is too long."""
    line = json.dumps([order.number, order.kind, *order.arguments], separators=(",", ":"))
    if len(line) > LONGEST_ORDER:
        raise ValueError(f"an order of {len(line)} characters is too long")
    return line


def unpack_order(line: str) -> Order | None:
    """Return the order of a line; None where it is none, whatever the line is."""
    try:
        number, kind, *arguments = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    if type(number) is not int or kind not in KINDS:
        return None
    return Order(number, kind, tuple(arguments))


def pack_answer(number: int, value: Any) -> list[str]:
    """Return the lines of an answer, which may be anything that JSON can say."""
    text = base64.b64encode(zlib.compress(json.dumps(value).encode(), 6)).decode()
    parts = [text[at : at + LONGEST_PART] for at in range(0, len(text), LONGEST_PART)]
    if len(parts) > MOST_PARTS:
        return pack_answer(number, None)
    return [f"{number} {index} {len(parts)} {part}" for index, part in enumerate(parts)]


class Answers:
    """Puts the parts of the answers of one rank together; others than the expected are dropped."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, str]] = {}

    def expect(self, number: int) -> None:
        """Accept the answer to the order of this number."""
        self._parts[number] = {}

    def forget(self, number: int) -> None:
        """Accept it no longer."""
        self._parts.pop(number, None)

    def add(self, line: str) -> tuple[int, Any] | None:
        """Take a line; return number and value of the answer that is complete with it."""
        words = line.split()
        if len(words) != 4 or not all(word.isdecimal() and len(word) < 10 for word in words[:3]):
            return None
        number, index, count = map(int, words[:3])
        parts = self._parts.get(number)
        if parts is None or not index < count <= MOST_PARTS or len(words[3]) > LONGEST_PART:
            return None
        parts[index] = words[3]
        if len(parts) < count:
            return None
        del self._parts[number]
        try:
            packed = base64.b64decode("".join(parts[each] for each in range(count)))
            unpacker = zlib.decompressobj()
            return number, json.loads(unpacker.decompress(packed, LARGEST_ANSWER))
        except (KeyError, ValueError, zlib.error, binascii.Error, RecursionError):
            return number, None
