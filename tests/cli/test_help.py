"""Help: the groups of commands, what each takes, and the words that are used."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

import mergegit.cli
from mergegit._version import VERSION
from mergegit.cli.main import _SUMMARIES
from tests.cli.conftest import CommandLine

COMMANDS = sorted(
    path.name.removesuffix("_command.py").replace("_", "-")
    for path in Path(mergegit.cli.__file__).parent.glob("*_command.py")
)


def test_commands_are_listed_in_groups(nowhere: CommandLine) -> None:
    out = nowhere.ok("--help").out
    groups = re.findall(r"^(\w+):\n((?:  .*\n)+)", out, re.MULTILINE)
    listed = {title: [line.split()[0] for line in body.splitlines()] for title, body in groups}
    del listed["Options"]
    assert list(listed)[:3] == ["Begin", "Store", "Merge"]
    assert listed["Begin"] == ["init"]
    assert listed["Merge"] == ["plan", "merge", "methods", "cherry-pick", "revert", "rebase"]
    assert sorted(itertools.chain(*listed.values())) == COMMANDS


def test_without_a_command_help_goes_to_standard_error(nowhere: CommandLine) -> None:
    result = nowhere()
    assert (result.code, result.out) == (2, "")
    assert result.err == nowhere.ok("--help").out


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_every_command_explains_itself(command: str, option: str, nowhere: CommandLine) -> None:
    out = nowhere.ok(command, option).out
    assert out.startswith(f"Usage: mergegit {command} ")
    assert "INTEGER RANGE" not in out
    assert " TEXT " not in out or "--message TEXT" in out
    assert all(len(line) <= 100 for line in out.splitlines())


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"completion"}))
def test_every_command_that_prints_facts_has_json(command: str, nowhere: CommandLine) -> None:
    assert "--json" in nowhere.ok(command, "--help").out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_summary_is_one_short_line(command: str) -> None:
    summary = _SUMMARIES[command]
    assert len(summary) < 66
    assert not summary.endswith(".")
    assert summary[0].islower()


def test_the_version(nowhere: CommandLine) -> None:
    assert nowhere.ok("--version").out == f"mergegit {VERSION}\n"


def test_a_command_that_is_nearly_right(nowhere: CommandLine) -> None:
    message, hint = nowhere("chekout").failed(2)
    assert message == "there is no command 'chekout'"
    assert hint == "did you mean `mergegit checkout`?"


def test_a_command_that_is_not_there(nowhere: CommandLine) -> None:
    assert nowhere("zzz").failed(2) == (
        "there is no command 'zzz'", "see `mergegit --help`",
    )  # fmt: skip


def test_an_option_that_is_not_there(nowhere: CommandLine) -> None:
    message, hint = nowhere("log", "--zzz").failed(2)
    assert "--zzz" in message
    assert hint == "`mergegit log --help` shows how it is used"


def test_a_missing_argument(nowhere: CommandLine) -> None:
    message, hint = nowhere("checkout").failed(2)
    assert message == "missing argument 'REF'"
    assert hint == "`mergegit checkout --help` shows how it is used"
