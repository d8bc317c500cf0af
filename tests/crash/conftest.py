"""The driver as a process that tests talk to."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.families import Family
from tests.memory import directory_in_memory


class Driver:
    """Asks the driver to perform verbs, each in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Perform a verb that must succeed; its report."""
        answer = self.ask({"verb": verb, "arguments": arguments})
        assert "failed" not in answer, answer["failed"]
        return answer

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request, default=str) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def calls(self, verb: str, root: Path, **arguments: Any) -> list[str]:
        """Perform a verb and list the calls by which it writes."""
        answer = self.ask({"verb": verb, "arguments": arguments, "root": str(root)})
        assert "failed" not in answer, answer["failed"]
        calls: list[str] = answer["calls"]
        return calls

    def kill(self, verb: str, root: Path, point: int, torn: bool, **arguments: Any) -> None:
        """Perform a verb and kill it at its n-th call."""
        request = {"verb": verb, "arguments": arguments, "root": str(root), "point": point}
        answer = self.ask({**request, "torn": torn})
        assert answer == {"killed": 9}, answer


@pytest.fixture(scope="session")
def driver(tiny_family: Family) -> Iterator[Driver]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.crash.driver", tiny_family.base, tiny_family.experts[0]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield Driver(process)
    process.communicate()
    assert process.returncode == 0


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory: a process that is killed leaves there what it had written."""
    with directory_in_memory() as path:
        yield path
