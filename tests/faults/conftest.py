"""The driver as a process that tests talk to, started under the layer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.families import Family
from tests.faults import shim
from tests.faults.shim import Fault
from tests.memory import directory_in_memory


class Driver:
    """Asks the driver to take steps, each request in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def together(self, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
        """What jobs gave that ran at the same time: each ``done`` or ``killed``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(jobs, default=str) + "\n")
        self._process.stdin.flush()
        answers: list[dict[str, Any]] = json.loads(self._process.stdout.readline())
        for answer in answers:
            assert "failed" not in answer, answer["failed"]
        return answers

    def ask(self, *steps: dict[str, Any]) -> dict[str, Any]:
        """What the steps of one job gave, in ``done``, or ``killed``."""
        (answer,) = self.together({"steps": steps})
        return answer

    def steps(self, *steps: dict[str, Any]) -> list[Any]:
        """What steps gave that nothing ends."""
        done: list[Any] = self.ask(*steps)["done"]
        return done

    def run(self, directory: Path, *commands: tuple[str, ...]) -> None:
        """Commands that must succeed."""
        for done in self.steps(*(command(line, directory) for line in commands)):
            assert done["code"] == 0, done["err"]


def command(line: tuple[str, ...], directory: Path) -> dict[str, Any]:
    return {"step": "command", "arguments": line, "directory": directory}


def inspect(path: Path) -> dict[str, Any]:
    return {"step": "inspect", "path": path}


def armed(root: Path, log: Path, fault: Fault) -> dict[str, Any]:
    return {
        "step": "fault",
        "root": root,
        "log": log,
        "kind": fault.kind,
        "point": fault.point,
        "errno": fault.errno,
    }


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled layer; tests that need it are skipped where it can't be had."""
    reason = shim.why_not()
    if reason is not None:
        pytest.skip(reason)
    return shim.compile_shim(tmp_path_factory.mktemp("shim"))


@contextmanager
def running_driver(family: Family, environment: dict[str, str] | None) -> Iterator[Driver]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.driver", family.base, family.experts[0]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    yield Driver(process)
    process.communicate()
    assert process.returncode == 0


@pytest.fixture(scope="session")
def driver(library: Path, tiny_family: Family) -> Iterator[Driver]:
    with running_driver(tiny_family, shim.environment(library)) as driver:
        yield driver


@pytest.fixture(scope="session")
def plain_driver(tiny_family: Family) -> Iterator[Driver]:
    """A driver without the layer: it needs no compiler."""
    with running_driver(tiny_family, None) as driver:
        yield driver


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory: a process that is killed leaves there what it had written."""
    with directory_in_memory() as path:
        yield path
