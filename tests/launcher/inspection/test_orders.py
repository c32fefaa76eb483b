"""Orders to ranks, and their answers, as lines of text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.common.connections.loop import Loop
from hvdlite.common.connections.order_lines import (
    LONGEST_PART,
    Answers,
    Order,
    pack_answer,
    pack_order,
    unpack_order,
)
from hvdlite.launcher.inspection.asking import Asking
from hvdlite.launcher.live.job_view import RankView
from hvdlite.launcher.processes import rank_orders


def test_orders_and_answers_arrive() -> None:
    order = Order(7, "timeline", ("/a b\n.json", 10))
    assert "\n" not in pack_order(order)
    assert unpack_order(pack_order(order)) == order
    with pytest.raises(ValueError, match="too long"):
        pack_order(Order(1, "tensor", ("x" * 5000,)))
    value = {"stack": os.urandom(6000).hex()}
    lines, answers = pack_answer(3, value), Answers()
    assert len(lines) > 1
    assert max(map(len, lines)) < LONGEST_PART + 30
    assert answers.add(lines[0]) is None, "nobody has asked"
    answers.expect(3)
    for line in lines[:-1]:
        assert answers.add(line) is None
    assert answers.add(lines[-1]) == (3, value)
    assert answers.add(lines[-1]) is None, "the answer has come"


@settings(max_examples=50)
@given(st.text() | st.from_regex(r"\d{1,3} \d{1,3} \d{1,3} [A-Za-z0-9+/=]*", fullmatch=True))
def test_whatever_comes(text: str) -> None:
    unpack_order(text)
    answers = Answers()
    for number in range(5):
        answers.expect(number)
    answers.add(text)


def test_pipes_of_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path)
    rank_orders.give(folder, 1, "to nobody")
    os.mkfifo(tmp_path / "orders.1")
    rank_orders.give(folder, 1, "nobody listens")
    pipe = os.open(tmp_path / "orders.1", os.O_RDWR | os.O_NONBLOCK)
    rank_orders.give(folder, 1, "line")
    rank_orders.count(folder)
    assert os.read(pipe, 100) == b'line\n[0,"count"]\n'
    rank_orders.count(folder, passes=True)
    assert (tmp_path / "count").read_bytes() == b"all"
    rank_orders.pass_on(folder, 1, 3, "line")
    lines = os.read(pipe, 200).decode().splitlines()
    assert [unpack_order(line) for line in lines] == [
        Order(0, "count"), Order(0, "pass", (-1, '[0,"count"]')), Order(0, "pass", (3, "line"))
    ]  # fmt: skip
    os.close(pipe)
    assert (tmp_path / "count").exists(), "ranks that start later look for it"
    rank_orders.forget(folder, 1)
    assert not (tmp_path / "orders.1").exists()


def test_ranks_count_also_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(rank_orders, "open", full, raising=False)
    os.mkfifo(tmp_path / "orders.1")
    pipe = os.open(tmp_path / "orders.1", os.O_RDWR | os.O_NONBLOCK)
    rank_orders.count(str(tmp_path))
    assert os.read(pipe, 100) == b'[0,"count"]\n'
    os.close(pipe)


def views(count: int) -> list[RankView]:
    return [RankView(rank, "a", 10 + rank) for rank in range(count)]


def test_ranks_are_asked() -> None:
    loop, given_, found = Loop(), list[tuple[int, str]](), list[dict[int, Any]]()

    def give(number: int, line: str) -> str:
        given_.append((number, line))
        return "cannot be reached" if number == 12 else ""

    asking = Asking(loop, give)
    asking.ask(views(4), "tensor", ("x",), 0.05, found.append)
    numbers = {process: unpack_order(line) for process, line in given_}
    orders = {process: order.number for process, order in numbers.items() if order is not None}
    asking.receive(11, pack_answer(orders[10], {"a": 1})[0])  # That is another rank's.
    asking.receive(10, pack_answer(orders[10], {"a": 1})[0])
    asking.receive(11, pack_answer(orders[11], ["no dict"])[0])
    asking.receive(99, "x")
    assert not found
    while not found:
        loop.run_once(1.0)
    assert found[0][0] == {"a": 1}
    assert [found[0][rank]["error"][:20] for rank in (1, 2, 3)] == [
        "gave an answer that ", "cannot be reached", "does not answer: it "
    ]  # fmt: skip
    asking.receive(13, pack_answer(orders[13], {"late": 1})[0])
    assert len(found) == 1
    loop.close()
