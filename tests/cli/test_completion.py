"""`mergegit completion`, and what it completes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import CommandLine


def complete(mergegit: CommandLine, monkeypatch: pytest.MonkeyPatch, line: str) -> list[str]:
    """What bash is offered for the last word of a line."""
    words = line.split(" ")
    monkeypatch.setenv("_MERGEGIT_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    result = mergegit()
    assert result.err == ""
    return [offer.partition(",")[2] for offer in result.lines if offer]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell(shell: str, nowhere: CommandLine) -> None:
    assert "_MERGEGIT_COMPLETE" in nowhere.ok("completion", shell).out


def test_commands(mergegit: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert complete(mergegit, monkeypatch, "mergegit ch") == ["checkout", "cherry-pick"]


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("mergegit log m", ["math", "merged"]),
        ("mergegit show v", ["v1"]),
        ("mergegit checkout pr", ["prose"]),
        ("mergegit merge math co", ["code"]),
        ("mergegit plan --base b", ["base"]),
        ("mergegit add model --base b", ["base"]),
        ("mergegit branch best pr", ["prose"]),
        ("mergegit tag v2 pr", ["prose"]),
        ("mergegit merge math --method dare", ["dare_linear", "dare_ties"]),
    ],
)
def test_refs_and_methods(
    line: str, offers: list[str], mergegit: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert complete(mergegit, monkeypatch, line) == offers


def test_refs_of_another_directory(
    mergegit: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outside = CommandLine(tmp_path)
    line = f"mergegit -C {mergegit.directory} log m"
    assert complete(outside, monkeypatch, line) == ["math", "merged"]


def test_outside_a_repository_nothing_is_offered(
    nowhere: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert complete(nowhere, monkeypatch, "mergegit log m") == []
