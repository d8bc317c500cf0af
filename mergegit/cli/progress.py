"""Progress on a terminal: rate and remaining time for whatever takes more than a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from mergegit.repository.repository import Progress

_PATIENCE: Final = 0.7
"""Seconds before the bar appears."""


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A ``progress`` for a verb. Silent where standard error is no terminal."""
    if not sys.stderr.isatty():
        yield lambda _what, _done, _total: None
        return
    bar = _Bar()
    try:
        yield bar.update
    finally:
        bar.stop()


class _Bar:
    def __init__(self) -> None:
        self._started = time.monotonic()
        self._shown = 0.0
        self._rich: Any = None
        self._task: Any = None
        self._what = ""

    def update(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._started < _PATIENCE or (now - self._shown < 0.1 and what == self._what):
            return
        self._shown = now
        if self._rich is None:
            self._start()
        if what != self._what:
            if self._task is not None:
                self._rich.remove_task(self._task)
            self._task = self._rich.add_task(what, total=total)
            self._what = what
        self._rich.update(self._task, completed=done, total=total)

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._rich = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._rich.start()

    def stop(self) -> None:
        if self._rich is not None:
            self._rich.stop()
