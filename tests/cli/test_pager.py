"""The pager: on a terminal, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from mergegit.cli.pager import pager_command
from tests.cli.conftest import run
from tests.cli.test_terminal import ESCAPE, on_terminal


@pytest.fixture
def pager(tmp_path: Path) -> Path:
    """A pager that marks what it is given."""
    path = tmp_path / "pager"
    path.write_text('#!/bin/sh\necho "LESS=$LESS"\nsed "s/^/> /"\n')
    path.chmod(0o755)
    return path


def test_on_a_terminal_the_log_goes_through_it(place: Path, pager: Path) -> None:
    out = on_terminal("log", "--oneline", cwd=place, MERGEGIT_PAGER=str(pager))
    lines = ESCAPE.sub("", out).splitlines()
    assert lines[0] == "LESS=FRX"
    assert len(lines) == 6
    assert all(line.startswith("> ") for line in lines[1:])
    assert ESCAPE.search(out)  # colours stay


def test_its_own_variable_goes_before_the_common_one(place: Path, pager: Path) -> None:
    words = ("log", "--oneline")
    assert "> " in on_terminal(*words, cwd=place, MERGEGIT_PAGER=str(pager), PAGER="false")
    assert "> " not in on_terminal(*words, cwd=place, MERGEGIT_PAGER="cat", PAGER=str(pager))


def test_settings_of_less_and_of_colours_are_kept(place: Path, pager: Path) -> None:
    out = on_terminal(
        "log", "--oneline", cwd=place, MERGEGIT_PAGER=str(pager), LESS="i", NO_COLOR="1"
    )
    assert out.startswith("LESS=i\n")
    assert not ESCAPE.search(out)


def test_one_can_do_without(place: Path, pager: Path) -> None:
    for words in (("log", "--oneline", "--no-pager"), ("log", "--json"), ("branch",)):
        assert "> " not in on_terminal(*words, cwd=place, MERGEGIT_PAGER=str(pager))
    assert "> " not in run("log", "--oneline", cwd=place, MERGEGIT_PAGER=str(pager)).out


def test_to_leave_it_early_is_no_error(place: Path) -> None:
    out = on_terminal("log", "--graph", cwd=place, MERGEGIT_PAGER="head -n 1")
    assert "Traceback" not in out
    assert "commit " in out
    assert on_terminal("log", cwd=place, MERGEGIT_PAGER="true") == ""


def test_errors_are_not_paged(place: Path, pager: Path) -> None:
    out = on_terminal("log", "nothing", cwd=place, MERGEGIT_PAGER=str(pager))
    assert "> " not in out
    assert "there is no branch, tag or commit 'nothing'" in out


def test_which_pager(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MERGEGIT_PAGER", "PAGER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    assert pager_command() == "less"
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert pager_command() is None
    monkeypatch.setenv("PAGER", "more -s")
    assert pager_command() == "more -s"
    for none in ("", " ", "cat"):
        monkeypatch.setenv("MERGEGIT_PAGER", none)
        assert pager_command() is None
