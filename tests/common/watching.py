"""What is logged while a test runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Watch(logging.Handler):
    """Notes what is logged, and that `word` was."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word, self.seen = word, threading.Event()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"
        if self.word in self.text:
            self.seen.set()


@contextmanager
def watching(word: str) -> Iterator[Watch]:
    """Watch the log of hvdlite for a word."""
    log, watch = logging.getLogger("hvdlite"), Watch(word)
    log.addHandler(watch)
    try:
        yield watch
    finally:
        log.removeHandler(watch)
