"""Long output in a pager, as Git shows it: on a terminal, and nowhere else."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import click

_DEFAULT: Final = "less"
_LESS: Final = "FRX"
"""Leaves what fits the screen there, shows colours, and does not clear the screen at the end."""


@contextmanager
def paged(ctx: click.Context, *, wanted: bool = True) -> Iterator[None]:
    """Sends standard output to MERGEGIT_PAGER, PAGER or less, where that is a terminal.

    An empty pager, or ``cat``, is none. Whoever leaves the pager early is done.
    """
    command = pager_command() if wanted and sys.stdout.isatty() else None
    if command is None:
        yield
        return
    sys.stdout.flush()
    environment = {"LESS": _LESS, **os.environ}
    process = subprocess.Popen(command, shell=True, stdin=subprocess.PIPE, env=environment)
    assert process.stdin is not None
    before, encoding = sys.stdout, sys.stdout.encoding
    if ctx.color is None and not os.environ.get("NO_COLOR"):
        ctx.color = True
    sys.stdout = io.TextIOWrapper(process.stdin, encoding=encoding, errors="replace")
    try:
        with suppress(BrokenPipeError):
            yield
    finally:
        with suppress(BrokenPipeError):
            sys.stdout.close()
        sys.stdout = before
        _wait(process)


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait for the pager, which interrupts are meant for while it is there."""
    while True:
        try:
            process.wait()
        except KeyboardInterrupt:
            continue
        return


def pager_command() -> str | None:
    """The command of the pager, None where there is to be none."""
    for name in ("MERGEGIT_PAGER", "PAGER"):
        if name in os.environ:
            chosen = os.environ[name].strip()
            return None if chosen in ("", "cat") else chosen
    return _DEFAULT if shutil.which(_DEFAULT) else None
