"""What hvdlite-top shows on the whole terminal: a list of jobs, or one of them."""

from __future__ import annotations

import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.inspection.asking import Answer
from hvdlite.launcher.inspection.requests import LOOK
from hvdlite.launcher.live.keyboard import DOWN, ENTER, ESCAPE, UP, Keyboard
from hvdlite.launcher.live.table import lines_of, printable
from hvdlite.launcher.live.viewer import Viewer
from hvdlite.launcher.processes.console import Console
from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.top.connection import JobConnection

LOOK_SECONDS = 1.0
# The alternate screen without a cursor, so that the terminal is as before at the end.
ENTER_SCREEN, LEAVE_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


class Screen:
    """The whole terminal, on which one job is drawn, or a list of jobs."""

    def __init__(self) -> None:
        self._entered = False

    def enter(self) -> None:
        """Take the terminal; idempotent."""
        if not self._entered:
            self._entered = True
            self._write(ENTER_SCREEN)

    def leave(self) -> None:
        """Give it back; idempotent."""
        if self._entered:
            self._entered = False
            self._write(LEAVE_SCREEN)

    def size(self) -> tuple[int, int]:
        """Return columns and lines."""
        return Console().size("stdout")

    def draw(self, lines: Sequence[str]) -> None:
        """Show lines, which must fit, in the place of those before; nothing while it is left."""
        if not self._entered:
            return
        body = "\r\n".join(line + CLEAR_LINE for line in lines)
        self._write(f"{HOME}{body}{CLEAR_BELOW}")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class Page(ABC):
    """One of them."""

    @abstractmethod
    def lines(self, columns: int, height: int) -> list[str]:
        """Return at most `height` lines."""

    @abstractmethod
    def press(self, key: str) -> None:
        """Take a key."""

    def look(self) -> None:  # noqa: B027 - a page may have nothing to do
        """Do what is due each second."""


class Pages:
    """Shows one page after the other, until one ends all."""

    def __init__(self, loop: EventLoop) -> None:
        self.loop = loop
        self._screen = Screen()
        self._keyboard = Keyboard(
            loop, self._press, left=self._screen.leave, back=self._come_back, goes_on=False
        )
        self._page: Page | None = None
        self._over = False
        self._last_words = ""

    def run(self, page: Page) -> int:
        """Show pages, first `page`; return the exit code. Raises `ConfigError` without keys."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, lambda number, _frame: sys.exit(128 + number))
        signal.signal(signal.SIGWINCH, lambda *_: self.loop.post(self.draw))
        try:
            if not self._keyboard.start():
                raise ConfigError(
                    "the keys of this terminal go to another session: --once prints one table"
                )
            self.turn_to(page)
            self.loop.call_after(LOOK_SECONDS, self._look)
            while not self._over:
                self.loop.run_once()
        except KeyboardInterrupt:
            pass
        finally:
            self._keyboard.close()
            self._screen.leave()
        if self._last_words:
            print(self._last_words)
        return 0

    def turn_to(self, page: Page) -> None:
        """Show another page."""
        self._page = page
        page.look()
        self.draw()

    def end(self, last_words: str = "") -> None:
        """Show nothing any more, and print `last_words`."""
        self._over, self._last_words = True, last_words

    def draw(self) -> None:
        """Show what is to be shown now."""
        if self._page is not None and not self._over:
            columns, height = self._screen.size()
            self._screen.draw(self._page.lines(columns, height)[:height])

    def _look(self) -> None:
        self.loop.call_after(LOOK_SECONDS, self._look)
        self._keyboard.look()
        if self._keyboard.lost:
            self.end()
        elif self._page is not None:
            self._page.look()

    def _press(self, key: str) -> None:
        if self._page is not None:
            self._page.press(key)

    def _come_back(self) -> None:
        self._screen.enter()
        self.draw()


def _cut(line: str, columns: int) -> str:
    return line if len(line) <= columns else f"{line[: columns - 1]}…"


class ListPage(Page):
    """The running jobs, of which one can be opened; ``find()`` returns a number and a line of each.

    They are looked for each second.
    """

    def __init__(self, pages: Pages, find: Callable[[], list[tuple[int, str]]]) -> None:
        self.opened: Callable[[int], None] = lambda number: None
        self.said = ""  # What has become of the job that was shown.
        self._pages, self._find = pages, find
        self._rows: list[tuple[int, str]] = []
        self._chosen: int | None = None  # The number of a job, which keeps it though others end.

    @property
    def _at(self) -> int:
        numbers = [number for number, _ in self._rows]
        return numbers.index(self._chosen) if self._chosen in numbers else 0

    def look(self) -> None:
        self._rows = self._find()
        self._pages.draw()

    def lines(self, columns: int, height: int) -> list[str]:
        at = self._at
        first = max(0, at - max(height - 4, 1))
        title = "running jobs (arrows or a number, Enter; q: quit)"
        rows = [line for _, line in self._rows] or ["no job runs now"]
        shown = [_cut(line, columns - 1) for line in (title, self.said, *rows)]
        shown[at + 2] = f"\x1b[7m{shown[at + 2]}\x1b[m"
        return [*shown[:2], *shown[2 + first :]]

    def press(self, key: str) -> None:
        self.said = ""
        count, at = len(self._rows), self._at
        if key in (UP, "k"):
            self._choose(max(at - 1, 0))
        elif key in (DOWN, "j"):
            self._choose(min(at + 1, count - 1))
        elif key.isdecimal() and 0 < int(key) <= count:
            self._choose(int(key) - 1)
        elif key == ENTER and count:
            self.opened(self._rows[at][0])
            return
        elif key in ("q", ESCAPE):
            self._pages.end()
        self._pages.draw()

    def _choose(self, at: int) -> None:
        if self._rows:
            self._chosen = self._rows[at][0]


class JobPage(Page):
    """One job, with its table and what was asked; `back` is where q leads, None: to the end."""

    def __init__(
        self, pages: Pages, connection: JobConnection, pid: int, back: ListPage | None
    ) -> None:
        self._pages, self._connection, self._pid, self._back = pages, connection, pid, back
        self._viewer = Viewer(connection.ask, pages.draw, self._quit)
        self._waits = False  # For the answer to the last look.
        self._trouble: list[str] = []  # Why the last look has failed.
        connection.ended = self._end

    def _quit(self) -> None:
        self._connection.ended = lambda: None
        if self._back is None:
            self._pages.end()
        else:
            self._pages.turn_to(self._back)

    def _end(self) -> None:
        sentence = f"the job of process {self._pid} {self._connection.end}"
        if self._back is None:
            self._pages.end(sentence)
        else:
            self._back.said = sentence
            self._pages.turn_to(self._back)

    def lines(self, columns: int, height: int) -> list[str]:
        job = self._viewer.job
        if job is None:
            said = self._trouble or ["the job has not answered yet"]
            return [_cut(printable(line), columns - 1) for line in said]
        return lines_of(
            job, columns, height, share=1.0, chosen=self._viewer.chosen, title=True,
            panel=[*self._viewer.panel, *self._trouble, self._viewer.help],
        )  # fmt: skip

    def press(self, key: str) -> None:
        self._viewer.press(key)

    def look(self) -> None:
        if not self._connection.open:
            self._end()
        elif not self._waits:
            self._waits = True
            self._connection.ask([LOOK], self._seen)
        self._pages.draw()

    def _seen(self, answer: Answer) -> None:
        self._waits = False
        if "error" in answer:
            self._trouble = [str(answer["error"])]
        else:
            self._viewer.job, self._trouble = answer, []
        self._pages.draw()
