"""Commands that compute nothing start without what computes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import environment

HEAVY = {"torch", "numba", "llvmlite", "numpy", "networkx", "rich", "safetensors"}

SCRIPT = """
import json, sys
from mergegit.cli import main
sys.argv = ["mergegit", *sys.argv[1:]]
try:
    main()
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def modules_of(*arguments: str, cwd: Path, **variables: str) -> set[str]:
    """The modules that a command has loaded when it ends."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
    )
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize(
    "command",
    ["--help", "--version", "log", "log --graph --json", "show merged",
     "log --graph --stat -- norm", "log --method ties", "log --format %h%E%r", "bisect --help",
     "show math --json",
     "status", "branch", "branch x math", "branch -m math maths", "branch -d math", "tag",
     "tag x math", "init", "completion bash", "show nothing", "nonsense", "add --help",
     "merge --help", "diff merged v1", "diff math math --json"],
)  # fmt: skip
def test_it_starts_light(command: str, place: Path) -> None:
    assert not modules_of(*command.split(), cwd=place) & HEAVY


def test_completion_of_refs_is_light(place: Path) -> None:
    words = {"COMP_WORDS": "mergegit log m", "COMP_CWORD": "2"}
    loaded = modules_of(cwd=place, _MERGEGIT_COMPLETE="bash_complete", **words)
    assert not loaded & HEAVY


def test_the_check_sees_what_it_looks_for(place: Path) -> None:
    """A merge does load what computes, so the list of modules is a true one."""
    assert "numba" in modules_of("plan", "math", "code", cwd=place)


@pytest.mark.parametrize("command", ["merge math prose", "checkout merged out"])
def test_torch_is_for_tensors_in_memory_alone(command: str, place: Path) -> None:
    assert not modules_of(*command.split(), cwd=place) & {"torch", "safetensors", "rich"}
