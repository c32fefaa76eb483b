"""``hvdlite-timeline``: join, check and draw timelines.

hvdlite-timeline merge a.rank0.json a.rank1.json -o a.json
hvdlite-timeline check a.json
hvdlite-timeline draw a.json -o a.png
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress

from hvdlite.common.timeline.chrome_trace import HEAD_PID
from hvdlite.tools.drawing import check_suffix
from hvdlite.tools.timeline_reader import (
    Event,
    Head,
    TimelineFormatError,
    check,
    is_cut_off,
    read_events,
    read_head,
)

PROBLEMS_SHOWN = 20
SORTED_BEFORE = 2  # the sort indices of a file's special tracks begin with -SORTED_BEFORE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`; return the exit code: 0, 1 (a problem) or 2 (usage)."""
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except (OSError, ValueError, ImportError) as error:
        print(f"hvdlite-timeline: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hvdlite-timeline", description="Work with timelines.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    merge = commands.add_parser("merge", help="join the files of several ranks on one clock")
    merge.add_argument("files", nargs="+", metavar="FILE")
    merge.add_argument("-o", "--output", required=True, metavar="OUT")
    merge.set_defaults(run=_run_merge)

    checker = commands.add_parser("check", help="say what is in a file, and what is wrong with it")
    checker.add_argument("file", metavar="FILE")
    checker.set_defaults(run=_run_check)

    draw = commands.add_parser("draw", help="draw a picture (needs matplotlib)")
    draw.add_argument("file", metavar="FILE")
    draw.add_argument("-o", "--output", required=True, metavar="PNG")
    draw.add_argument("--start-ms", type=float, metavar="T", help="leave out what ended before")
    draw.add_argument("--end-ms", type=float, metavar="T", help="leave out what began after")
    draw.add_argument("--tensors", type=int, default=24, metavar="N", help="most rows of tensors")
    draw.add_argument("--title", default="", metavar="TEXT")
    draw.set_defaults(run=_run_draw)
    return parser


def _run_check(options: argparse.Namespace) -> int:
    result = check(read_events(options.file))
    print(f"{options.file}: {result.events} events on {result.tracks} tracks, ", end="")
    print(f"{result.collectives} collectives completed")
    _warn_if_cut_off(options.file)
    if not result.dropped and not result.problems:  # Else spans lack their beginning or end.
        for line in result.time_shares.lines():
            print(line)
    if result.dropped:
        print(f"{result.dropped} events were dropped: the writer could not keep up")
    if result.open_spans:
        print(f"{result.open_spans} spans have no end: the process was killed")
    for problem in result.problems[:PROBLEMS_SHOWN]:
        print(problem, file=sys.stderr)
    if len(result.problems) > PROBLEMS_SHOWN:
        print(f"and {len(result.problems) - PROBLEMS_SHOWN} more problems", file=sys.stderr)
    return 1 if result.problems else 0


def _warn_if_cut_off(path: str) -> None:
    if is_cut_off(path):
        print(
            f"hvdlite-timeline: {path} is cut off, and is read up to its last whole line: the "
            "process was killed while it wrote, or the disk was full",
            file=sys.stderr,
        )


def _run_draw(options: argparse.Namespace) -> int:
    from hvdlite.tools.timeline_plot import draw

    check_suffix(options.output)
    window = (options.start_ms, options.end_ms)
    draw(read_events(options.file), options.output, window, options.tensors, options.title)
    return 0


def _run_merge(options: argparse.Namespace) -> int:
    """Join timelines on rank 0's clock; tracks are named ``rank N: tensor``.

    Each file is read twice, event by event, so that memory does not grow with the files. Without
    clock offsets in all of them, the ranks' wall clocks are used, with a warning. Raises `OSError`
    and `TimelineFormatError`; `output` appears complete or not at all.
    """
    paths = options.files
    heads = [read_head(path) for path in paths]
    for path in paths:
        _warn_if_cut_off(path)
    for path, head in zip(paths, heads, strict=True):
        if head.start_epoch is None:
            raise TimelineFormatError(f"{path}: no event says when the file began")
    ranks = [index if head.rank is None else head.rank for index, head in enumerate(heads)]
    starts = _common_starts(heads)
    streams, first_pid = [], HEAD_PID
    for path, head, rank, start in zip(paths, heads, ranks, starts, strict=True):
        streams.append(_shifted(path, rank, start - min(starts), first_pid))
        # The pids of a file are shifted so that no two files share one.
        first_pid += max(head.names, default=HEAD_PID) + SORTED_BEFORE + 1
    merged = heapq.merge(*streams, key=lambda event: event.get("ts", -1))
    epoch = min(head.start_epoch or 0 for head in heads)
    args = {"start_time_since_epoch_in_micros": epoch, "ranks": ranks}
    first = {"name": "process_name", "ph": "M", "pid": HEAD_PID, "args": args}
    _write(options.output, first, merged)
    return 0


def _common_starts(heads: Sequence[Head]) -> list[int]:
    common = [head.start_common for head in heads if head.start_common is not None]
    if len(common) == len(heads):
        return common
    print(
        "hvdlite-timeline: not all files know how far their rank's clock is from rank 0's; "
        "the wall clocks of the hosts are used instead",
        file=sys.stderr,
    )
    return [head.start_epoch or 0 for head in heads]


def _shifted(path: str, rank: int, shift: int, first_pid: int) -> Iterator[Event]:
    """Yield the events of one file on the common clock, with unique pids and names."""
    for event in read_events(path):
        args = event.get("args", {})
        if event.get("pid", HEAD_PID) != HEAD_PID:
            event["pid"] += first_pid
        elif event.get("ph") == "M":
            continue
        if event.get("ph") == "M":
            if "name" in args:
                args["name"] = f"rank {rank}: {args['name']}"
            if "sort_index" in args:
                args["sort_index"] += first_pid
        elif "ts" in event:
            event["ts"] += shift
        if event.get("ph") == "i":
            event["args"] = {**args, "rank": rank}
        yield event


def _write(output: str, first: Event, events: Iterator[Event]) -> None:
    # A device such as /dev/stdout is written to, not replaced; so is the file behind a link.
    output = os.path.realpath(output) if os.path.isfile(output) else output
    part = output if os.path.exists(output) and not os.path.isfile(output) else f"{output}.part"
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write("[\n" + json.dumps(first))
            for event in events:
                file.write(",\n" + json.dumps(event))
            file.write("\n]\n")
        if part != output:
            os.replace(part, output)
    except BaseException:
        if part != output:
            with suppress(OSError):
                os.unlink(part)
        raise


if __name__ == "__main__":
    sys.exit(main())
