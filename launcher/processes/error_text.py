"""The exception at the end of a Python traceback, found in what a process has printed."""

from __future__ import annotations

import errno
import re

from hvdlite.common.base.report_failure import shortened

# But of what is inside of an exception group, whose lines all have a margin.
HEADER = re.compile(r"^(?! *\|)(.*)Traceback \(most recent call last\):", re.MULTILINE)
GROUP, MARGIN = "  + Exception Group ", "  | "
LONGEST_TEXT = 300
# The line after the frames: the type with its module, and the text where there is one.
EXCEPTION = re.compile(r"^(?:[^\W\d]\w*\.|<locals>\.)*([^\W\d]\w*)(: .*)?$")
# These have no header where the script itself cannot be read.
SYNTAX = re.compile(r"^(?:Syntax|Indentation|Tab)Error: .*$", re.MULTILINE)


def last_exception(printed: bytes) -> str:
    """Return the last exception as ``Type: text``, on one line; empty where there is none."""
    text = printed.decode(errors="replace").replace("\r\n", "\n")
    headers = [*HEADER.finditer(text)]
    if headers:
        margin = MARGIN if headers[-1][1] == GROUP else ""
        for each in text[headers[-1].end() :].splitlines()[1:]:
            line = each.removeprefix(margin)
            if line[:1].isspace() or not line:
                continue
            match = EXCEPTION.match(line)
            return shorten(match[1] + (match[2] or "")) if match else ""
    syntax = SYNTAX.findall(text)
    return shorten(syntax[-1]) if syntax else ""


def spell_os_error(error: OSError) -> str:
    """Return what the system refuses, and the remedy where there is a usual one."""
    about = f" ({error.filename})" if error.filename else ""
    text = f"{error.strerror or error}{about}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return f"{text}: free some space, or set TMPDIR to a folder that has some"
    if error.errno == errno.ENOENT and "temporary directory" in str(error):  # By tempfile.
        return f"{error.strerror}: none can be written to; set TMPDIR to a folder that has space"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{text}: is the loopback interface up? ip link set lo up"
    return text


def shorten(text: str) -> str:
    """Return `text` with at most `LONGEST_TEXT` characters."""
    return shortened(text, LONGEST_TEXT)
