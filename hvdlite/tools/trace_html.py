"""The report on an iteration trace as one HTML page without external files."""

from __future__ import annotations

from html import escape
from string import Template

from hvdlite.tools.trace_report import SCRIPT, IterationReport, Table

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
