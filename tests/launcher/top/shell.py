"""What a shell does with jobs that read keys, on a terminal of its own; ends with 0 if all is well.

It is a process of its own, as only the leader of a session has a terminal.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import termios
import tty
from typing import NoReturn, TextIO

from hvdlite.launcher.live.keyboard import STOPS, Keyboard
from hvdlite.launcher.processes.event_loop import EventLoop

LOOK_SECONDS = 0.01
LIMIT_SECONDS = 60


class Job:
    """A process in a group of its own; it tells what the keyboard does."""

    def __init__(self, *, goes_on: bool, ignored: signal.Signals | None = None) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            for number in STOPS:
                signal.signal(number, signal.SIG_DFL)
            if ignored is not None:
                signal.signal(ignored, signal.SIG_IGN)
            run(os.fdopen(writer, "w", buffering=1), goes_on)
        os.setpgid(self.pid, self.pid)
        os.close(writer)
        self._told = os.fdopen(reader)

    def told(self) -> str:
        return self._told.readline().strip()

    def to_foreground(self) -> None:
        os.tcsetpgrp(0, self.pid)
        os.kill(self.pid, signal.SIGCONT)

    def stopped_by(self) -> int:
        """Wait until it is, and take the terminal."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), status
        os.tcsetpgrp(0, os.getpgrp())
        return os.WSTOPSIG(status)

    def ended_by(self, number: int) -> int:
        """Send a signal, and return the code of the end, as in `Popen.returncode`."""
        os.kill(self.pid, number)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        os.tcsetpgrp(0, os.getpgrp())
        return os.waitstatus_to_exitcode(status)


def run(tell: TextIO, goes_on: bool) -> NoReturn:
    """Have keys until SIGTERM comes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.alarm(LIMIT_SECONDS)
    loop = EventLoop()
    keyboard = Keyboard(
        loop, lambda key: None, goes_on=goes_on,
        left=lambda: print("left", file=tell), back=lambda: print("back", file=tell),
    )  # fmt: skip

    def look() -> None:
        loop.call_after(LOOK_SECONDS, look)
        keyboard.look()

    try:
        assert keyboard.start()
        print("started", signal.getsignal(signal.SIGTSTP) is signal.SIG_IGN, file=tell)
        look()
        while True:
            loop.run_once()
    except SystemExit:
        keyboard.close()
        os._exit(0)
    finally:
        os._exit(1)


def gives_keys() -> bool:
    return not termios.tcgetattr(0)[3] & termios.ICANON


def begin_and_take_to_the_foreground() -> None:
    usual = termios.tcgetattr(0)
    tty.setcbreak(0)  # A shell does so while a command is typed.
    job = Job(goes_on=True, ignored=signal.SIGTSTP)
    assert job.told() == "started True", "a signal that was ignored stays so"
    termios.tcsetattr(0, termios.TCSANOW, usual)
    job.to_foreground()
    assert job.told() == "back"
    assert gives_keys()
    assert job.ended_by(signal.SIGTERM) == 0
    assert termios.tcgetattr(0) == usual


def stop_in_the_background() -> None:
    usual = termios.tcgetattr(0)
    job = Job(goes_on=False)
    assert job.stopped_by() == signal.SIGTTOU, "begun in the background"
    job.to_foreground()
    assert [job.told(), job.told(), job.told()] == ["left", "back", "started False"]
    assert gives_keys()
    os.kill(job.pid, signal.SIGTSTP)
    assert job.stopped_by() == signal.SIGTSTP
    assert (job.told(), termios.tcgetattr(0)) == ("left", usual)
    os.kill(job.pid, signal.SIGCONT)
    assert job.stopped_by() == signal.SIGTTOU, "as by `bg`"
    assert termios.tcgetattr(0) == usual
    usual[3] ^= termios.ECHOK  # By `stty`, for example.
    termios.tcsetattr(0, termios.TCSANOW, usual)
    job.to_foreground()
    assert [job.told(), job.told()] == ["left", "back"]
    assert gives_keys()
    assert job.ended_by(signal.SIGQUIT) == -signal.SIGQUIT
    assert termios.tcgetattr(0) == usual


def main() -> None:
    faulthandler.register(signal.SIGALRM, chain=True)  # In jobs, too: it says what they wait for.
    signal.alarm(LIMIT_SECONDS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # Of SIGQUIT.
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # Ignored where tests run in the background.
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    begin_and_take_to_the_foreground()
    stop_in_the_background()
    print("all is well")


if __name__ == "__main__":
    main()
