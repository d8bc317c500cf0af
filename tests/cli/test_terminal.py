"""What is shown on a terminal and nowhere else: colours and progress."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mergegit.cli.progress
from mergegit.cli.progress import progress_bar
from mergegit.cli.text import human_bytes, human_seconds, percent, plural, printable
from tests.cli.conftest import environment

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(*arguments: str, cwd: Path, **variables: str) -> str:
    """All that a command writes when both streams are a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "mergegit", *arguments],
        cwd=cwd,
        env=environment(TERM="xterm-256color", **variables),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            data = os.read(ours, 4096)
        except OSError:
            break
        if not data:
            break
        written += data
    os.close(ours)
    process.wait(timeout=60)
    return written.decode().replace("\r\n", "\n")


def test_a_terminal_has_colours_and_the_words_are_the_same(place: Path) -> None:
    coloured = on_terminal("log", "--graph", cwd=place)
    plain = on_terminal("log", "--graph", cwd=place, NO_COLOR="1")
    assert ESCAPE.search(coloured)
    assert not ESCAPE.search(plain)
    assert ESCAPE.sub("", coloured) == plain


def test_errors_are_coloured_on_a_terminal_unless_it_is_not_wanted(place: Path) -> None:
    coloured = on_terminal("show", "nothing", cwd=place)
    assert re.search(r"\x1b\[31m.*error:", coloured)
    assert not ESCAPE.search(on_terminal("show", "nothing", cwd=place, NO_COLOR="1"))


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_progress_appears_after_a_while_and_goes_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mergegit.cli.progress, "_PATIENCE", 0.0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    with progress_bar() as progress:
        progress("adding math", 1 << 20, 4 << 20)
        progress("adding math", 3 << 20, 4 << 20)
        progress("checking blocks", 1, 2)
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "adding math" in shown
    assert "checking blocks" in shown
    assert shown.endswith("\x1b[2K")


def test_what_is_quick_shows_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress_bar() as progress:
        progress("adding math", 1, 2)
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_a_pipe_shows_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mergegit.cli.progress, "_PATIENCE", 0.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress_bar() as progress:
        progress("adding math", 1, 2)
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_progress_is_taken_away_when_a_command_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mergegit.cli.progress, "_PATIENCE", 0.0)
    monkeypatch.setattr(sys, "stderr", Terminal())

    def fail() -> None:
        with progress_bar() as progress:
            progress("adding math", 1, 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "\x1b[?25h" in sys.stderr.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (10 << 10, "10.0 KiB"),
     (100 << 20, "100 MiB"), (1 << 30, "1.00 GiB"), (1 << 40, "1.00 TiB"), (5 << 50, "5120 TiB")],
)  # fmt: skip
def test_bytes_have_three_digits(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.004, "0.00 s"),
        (1.234, "1.23 s"),
        (12.34, "12.3 s"),
        (59.94, "59.9 s"),
        (125, "2 min 5 s"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


def test_counts_and_shares() -> None:
    assert plural(1, "block") == "1 block"
    assert plural(1234, "block") == "1,234 blocks"
    assert plural(2, "branch") == "2 branches"
    assert percent(1, 8) == "12.5%"
    assert percent(0, 0) == "0.0%"


def test_control_characters_are_made_visible() -> None:
    assert printable("a\tb\x1b[1m\x9bc\u2028d\udce9é模") == "a\\tb\\x1b[1m\\x9bc\\u2028d\\udce9é模"
