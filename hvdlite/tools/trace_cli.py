"""``hvdlite-trace``: report on iteration traces.

hvdlite-trace report trace.csv
hvdlite-trace report trace.csv --html report.html --picture iteration.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from string import Template

from hvdlite.tools.drawing import check_suffix
from hvdlite.tools.trace_report import SCRIPT, IterationReport, Table, make_report
from hvdlite.tools.trace_summary import read_trace

# The report on an iteration trace as one HTML page without external files.
PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 68em; padding: 0 1em;
       color: #222; background: #fff; }
table { border-collapse: collapse; margin: 1em 0; }
caption { text-align: left; font-weight: 600; padding-bottom: 0.4em; }
th, td { padding: 0.25em 0.9em; border-bottom: 1px solid #ddd; text-align: left; }
td.figure, th.figure { text-align: right; font-variant-numeric: tabular-nums; }
svg { max-width: 100%; height: auto; }
.advice { border-left: 4px solid #2f6db0; padding: 0.3em 1em; background: #f3f7fb; }
code { background: #f0f0f0; padding: 0.1em 0.3em; }
</style>
</head>
<body>
<h1>$title</h1>
<div class="advice">
<p>$advice</p>
$command</div>
$picture
$tables
$notes
</body>
</html>
""")


def make_page(report: IterationReport, picture: str) -> str:
    """Return the page; `picture` is an SVG element."""
    command = (
        f"<p>Try, with your own script for {SCRIPT}: <code>{escape(report.command)}</code></p>\n"
        if report.command
        else ""
    )
    return PAGE.substitute(
        title=escape(report.title),
        advice=escape(report.advice.why),
        command=command,
        picture=picture,
        tables="\n".join(map(_table, report.tables)),
        notes="\n".join(f"<p>{escape(note)}</p>" for note in report.notes),
    )


def _table(table: Table) -> str:
    head = "".join(_cell("th", table, k, text) for k, text in enumerate(table.head))
    body = "\n".join(
        "<tr>" + "".join(_cell("td", table, k, text) for k, text in enumerate(row)) + "</tr>"
        for row in table.rows
    )
    return (
        f"<table>\n<caption>{escape(table.title)}</caption>\n"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    )


def _cell(tag: str, table: Table, k: int, text: str) -> str:
    kind = ' class="figure"' if table.is_figure(k) else ""
    return f"<{tag}{kind}>{escape(text)}</{tag}>"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`; return the exit code: 0, 1 (a problem) or 2 (usage)."""
    options = _parser().parse_args(argv)
    try:
        _run_report(options)
    except (OSError, ValueError, ImportError) as error:
        print(f"hvdlite-trace: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hvdlite-trace", description="Read iteration traces.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    report = commands.add_parser("report", help="say where the time goes, and what to try")
    report.add_argument(
        "file", metavar="FILE", help="as --trace-iterations was told: the files of all ranks"
    )
    report.add_argument("--html", metavar="OUT", help="write a page with tables and picture, too")
    report.add_argument("--picture", metavar="OUT", help="draw one iteration (.png, .svg or .pdf)")
    return parser


def _run_report(options: argparse.Namespace) -> None:
    if options.picture:
        check_suffix(options.picture)
    rows, of_other_runs = read_trace(options.file)
    if of_other_runs:
        print(
            f"hvdlite-trace: left out, since they are of another run: {', '.join(of_other_runs)}",
            file=sys.stderr,
        )
    report = make_report(rows)
    _print(report)
    if options.picture:
        import_module("hvdlite.tools.trace_plot").draw(rows, options.picture)
    if options.html:
        page = make_page(report, import_module("hvdlite.tools.trace_plot").svg(rows))
        Path(options.html).write_text(page, encoding="utf-8")


def _print(report: IterationReport) -> None:
    try:
        console = import_module("rich.console").Console(highlight=False)
        table_class = import_module("rich.table").Table
    except ImportError:
        raise ImportError("a report needs rich: pip install 'hvdlite[trace]'") from None
    console.print(report.title, style="bold", markup=False)
    for table in report.tables:
        rich = table_class(title=table.title, title_justify="left")
        for k, name in enumerate(table.head):
            rich.add_column(name, justify="right" if table.is_figure(k) else "left")
        for row in table.rows:
            rich.add_row(*row)
        console.print(rich)
    for text in (*report.notes, report.advice.why):
        console.print(text, markup=False)
    if report.command:  # not wrapped, so that it can be pasted
        text = f"Try, with your own script for {SCRIPT}:\n  {report.command}"
        console.print(text, markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
