"""The job at one moment as a plain dict: what the table, `hvdlite-top` and pages show.

All values are numbers, texts, None, lists and dicts with names, so that they can be sent as JSON
or msgpack. Times are seconds, sizes bytes, and moments seconds since 1970.

    at               when this was
    ranks            by rank: {rank, host, slow, age, steps, steps_a_second, step, compute, data,
                     hidden, waited, peers_waited, memory, bytes_a_second, tensor}
    hosts            {host, ranks, cores, runnable}
    events           the last ones: {at, kind, text}
    steps_a_second   the mean of the ranks
    straggler        None, or {ranks, host, seconds, share, cause, text}
    progress         None, or {done, total, left, ends_at}; the last two are None without steps

Of a rank, `step` and what it is made of are means of a step of the last seconds, None where no
steps are counted; `age` is how long ago it was heard of, and `tensor` the one for which it has
waited longest of late.
"""

from __future__ import annotations

from typing import Any

from hvdlite.launcher.live.job_view import JobView, RankView

Snapshot = dict[str, Any]
# The names of the parts of a step here, and what the ranks count of them.
PARTS = {
    "step": "step_seconds_total",
    "compute": "compute_seconds_total",
    "data": "data_seconds_total",
    "hidden": "exchange_hidden_seconds_total",
    "waited": "exchange_waited_seconds_total",
    "peers_waited": "peers_waited_seconds_total",
}


def snapshot(job: JobView, now: float, at: float) -> Snapshot:
    """Return the job as it is `now`, by the clock that `job` was told of, or `at` by the wall's."""
    ranks, straggler = job.in_order(), job.watch.current
    slow = set() if straggler is None else set(straggler.ranks)
    rows = [_rank(rank, now, rank.rank in slow) for rank in ranks]
    speeds = [row["steps_a_second"] for row in rows]
    return {
        "at": at,
        "ranks": rows,
        "hosts": _hosts(ranks),
        "events": [
            {"at": at - (now - event.at), "kind": event.kind, "text": event.text}
            for event in job.events
        ],
        "steps_a_second": sum(speeds) / len(speeds) if speeds else 0.0,
        "straggler": None
        if straggler is None
        else {**straggler._asdict(), "ranks": list(straggler.ranks)},
        "progress": _progress(ranks[0], at) if ranks else None,
    }


def _rank(rank: RankView, now: float, slow: bool) -> dict[str, Any]:
    changes = rank.changes()
    steps, seconds = changes.get("steps_total", 0.0), rank.seconds
    moved = sum(
        value for key, value in changes.items() if key.startswith("collective_bytes_total.")
    )
    return {
        "rank": rank.rank,
        "host": rank.host,
        "slow": slow,
        "age": max(rank.age(now), 0.0),
        "steps": rank.values.get("steps_total", 0.0),
        "steps_a_second": rank.steps_a_second(now),
        **{
            name: changes.get(counter, 0.0) / steps if steps > 0 else None
            for name, counter in PARTS.items()
        },
        "memory": rank.values.get("memory_bytes", 0.0),
        "bytes_a_second": moved / seconds if seconds > 0 else 0.0,
        "tensor": rank.tensor,
    }


def _hosts(ranks: list[RankView]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for rank in ranks:
        host = found.setdefault(rank.host, {"host": rank.host, "ranks": []})
        host["ranks"].append(rank.rank)
        host["cores"] = rank.values.get("cores", 0.0)
        host["runnable"] = rank.values.get("runnable_processes", 0.0)
    return [found[host] for host in sorted(found)]


def _progress(first: RankView, at: float) -> dict[str, Any] | None:
    total = first.values.get("progress_total_steps", 0.0)
    if not total:
        return None
    done = first.values.get("progress_steps", 0.0)
    made, seconds = first.changes().get("progress_steps", 0.0), first.seconds
    left = (total - done) * seconds / made if made > 0 < seconds and total > done else None
    ends_at = None if left is None else at + left
    return {"done": done, "total": total, "left": left, "ends_at": ends_at}
