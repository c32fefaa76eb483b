"""A rank that receives from any rank is told who has sent first."""

from __future__ import annotations

from hvdlite.common.decisions.aggregator import Aggregator
from hvdlite.common.decisions.coordinator import Coordinator
from hvdlite.common.requests.messages import Report, Request, Response, Segment
from tests.common.decisions.requests import new_coordinator

RECEIVER = 1


def message(sender: int, *, sends: bool = True) -> tuple[int, Request]:
    """A message to the receiver: the rank that reports it, and its request."""
    parties = min(sender, RECEIVER), max(sender, RECEIVER)
    request = Request(
        0, f"m.{sender}", "point_to_point", "float32", (3,), root_rank=sender, parties=parties
    )
    return sender if sends else RECEIVER, request


def search(*senders: int) -> tuple[int, Request]:
    names = "\n".join(f"m.{sender}" for sender in senders)
    request = Request(0, "s", "find_sender", shape=senders, settings=names, parties=(RECEIVER,))
    return RECEIVER, request


def answers(coordinator: Coordinator, *reports: tuple[int, Request]) -> list[Response]:
    """The answers after these reports."""
    for rank, request in reports:
        coordinator.receive(Report(0, (rank,), (), (request,)), 1.0)
    found = [order.items for order in coordinator.pop_orders() if isinstance(order, Segment)]
    return [item for items in found for item in items if isinstance(item, Response)]


def test_the_first_sender_is_found_whoever_comes_first() -> None:
    for reports in ((message(2), search(0, 2, 3)), (search(0, 2, 3), message(2))):
        coordinator = new_coordinator(4)
        (found,) = answers(coordinator, *reports)
        assert (found.request.name, found.first_dims, found.error) == ("s", (2,), "")
        assert [each.name for each in coordinator.waiting()] == ["m.2"], "as it is not received yet"
        (received,) = answers(coordinator, message(2, sends=False))
        assert received.request.name == "m.2" and coordinator.oldest is None


def test_other_messages_are_not_taken() -> None:
    coordinator = new_coordinator(4)
    assert answers(coordinator, search(0, 3), message(2)) == []
    waiting = {each.name: each.missing for each in coordinator.waiting()}
    assert waiting == {"s": (0, 3), "m.2": (RECEIVER,)}
    assert coordinator.oldest == 1.0
    (found,) = answers(coordinator, message(3))
    assert found.first_dims == (3,)


def test_nobody_is_left_who_could_send() -> None:
    coordinator = new_coordinator(4)
    assert answers(coordinator, search(0, 2)) == []
    coordinator.depart(3)
    coordinator.depart(0)
    assert answers(coordinator) == []
    coordinator.depart(2, "has ended")
    (failed,) = answers(coordinator)
    assert failed.request.name == "s" and "rank 0 has been shut down" in failed.error
    assert coordinator.oldest is None
    (refused,) = answers(coordinator, search(0, 2))
    assert "rank 0 has been shut down" in refused.error


def test_ranks_that_have_joined_do_not_send() -> None:
    coordinator = new_coordinator(3)
    join = Request(0, "join", "join", shape=(0, 0))
    assert answers(coordinator, search(0, 2), (0, join)) == []
    (failed,) = answers(coordinator, (2, join))
    assert failed.request.name == "s" and "join()" in failed.error


def test_a_search_ends_with_its_receiver() -> None:
    coordinator = new_coordinator(3)
    assert answers(coordinator, search(0, 2)) == []
    coordinator.depart(RECEIVER)
    assert [each.request.name for each in answers(coordinator)] == ["s"]
    assert coordinator.oldest is None


def test_a_leader_passes_on_what_is_awaited_from_any_rank() -> None:
    """Also where both ranks are below it: it holds other messages until both have them."""
    leader = Aggregator(6, range(1, 4))
    reports = [Report(0, (rank,), (), (request,)) for rank, request in (message(2), search(0, 2))]
    leader.receive(reports[0], 0.0)
    assert leader.pop_reports() == ()
    leader.receive(reports[1], 0.0)
    assert leader.pop_reports() == tuple(reports)
    leader.note(Segment(0, (Response(search(0, 2)[1], first_dims=(2,)),)))
    rank, received = message(2, sends=False)
    leader.receive(Report(0, (rank,), (), (received,)), 1.0)
    assert leader.pop_reports() == (Report(0, (rank,), (), (received,)),)
    leader.note(Segment(0, (Response(received),)))

    leader.receive(Report(0, (RECEIVER,), (), (search(0, 2)[1],)), 2.0)
    leader.pop_reports()
    leader.receive(reports[0], 2.0)
    assert leader.pop_reports() == (reports[0],)
