"""Commands as a person runs them: in this process where that is enough, else in their own."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mergegit import Repository
from mergegit.cli.main import main
from tests import layered
from tests.families import EXPERTS, Family
from tests.memory import directory_in_memory

AUTHOR = "Ada <ada@example.org>"


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended: its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    def failed(self, code: int = 1) -> tuple[str, str]:
        """The error's message and hint, of which there must be one line each and nothing else."""
        assert self.code == code, self
        assert self.out == ""
        message, hint = self.err.splitlines()
        assert message.startswith("error: ")
        assert hint.startswith(" hint: ")
        assert "Traceback" not in self.err
        return message.removeprefix("error: "), hint.removeprefix(" hint: ")


class CommandLine:
    """Runs commands in a directory, in this process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(self, *arguments: str | Path) -> Result:
        streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
        before = (sys.argv, sys.stdout, sys.stderr, os.getcwd())
        os.chdir(self.directory)
        sys.argv = ["mergegit", *map(os.fspath, arguments)]
        sys.stdout, sys.stderr = streams
        code = 0
        try:
            main()
        except SystemExit as request:
            code = request.code if isinstance(request.code, int) else int(request.code is not None)
        finally:
            sys.argv, sys.stdout, sys.stderr = before[:3]
            os.chdir(before[3])
        for stream in streams:
            stream.flush()
        out, err = (stream.buffer.getvalue().decode() for stream in streams)  # type: ignore[attr-defined]
        return Result(code, out, err)

    def ok(self, *arguments: str | Path) -> Result:
        """The result of a command that must succeed and have nothing to say about it."""
        result = self(*arguments)
        assert (result.code, result.err) == (0, "")
        return result


def environment(**variables: str) -> dict[str, str]:
    """The environment of a command in a process of its own."""
    known = {"MERGEGIT_AUTHOR": AUTHOR, "MERGEGIT_PAGER": "cat", "PYTHONPATH": os.getcwd()}
    return os.environ | known | variables


def run(*arguments: str | Path, cwd: Path, **variables: str) -> Result:
    """Run a command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "mergegit", *map(os.fspath, arguments)],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def merged_template(
    tmp_path_factory: pytest.TempPathFactory, tiny_family: Family
) -> Iterator[Path]:
    """A repository with the tiny family, a branch ``merged`` of math and code, and a tag ``v1``."""
    with directory_in_memory() as path:
        with Repository.init(path, author=AUTHOR) as repository:
            for place, checkpoint in enumerate((tiny_family.base, *tiny_family.experts)):
                repository._clock = lambda place=place: 1_700_000_000 + place
                repository.add(checkpoint)
            repository._clock = lambda: 1_700_000_100
            recipe = repository.recipe(EXPERTS[:2], parameters={"math.weight": 0.5})
            repository.merge(repository.plan(recipe, budget="60%"), branch="merged")
            repository.create_tag("v1", "merged")
        yield path


@pytest.fixture
def place(tmp_path: Path, merged_template: Path) -> Path:
    """A directory with a repository of its own, a copy of the template."""
    path = tmp_path / "place"
    shutil.copytree(merged_template, path)
    return path


@pytest.fixture
def family_place(tmp_path: Path, family: Family) -> Path:
    """A directory with a repository of the larger family, whose deltas have layers."""
    path = tmp_path / "family"
    with Repository.init(path, author=AUTHOR) as repository:
        for checkpoint in (family.base, *family.experts):
            repository.add(checkpoint)
    return path


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No colours and no author from outside."""
    monkeypatch.setenv("MERGEGIT_AUTHOR", AUTHOR)
    for name in ("NO_COLOR", "FORCE_COLOR", "_MERGEGIT_COMPLETE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def mergegit(place: Path) -> CommandLine:
    """Commands in the copy of the template."""
    return CommandLine(place)


@pytest.fixture
def nowhere(tmp_path: Path) -> CommandLine:
    """Commands in an empty directory."""
    path = tmp_path / "nowhere"
    path.mkdir()
    return CommandLine(path)


@pytest.fixture
def commit_of(place: Path) -> Callable[[str], str]:
    """The id of a ref's commit, in hexadecimal digits."""

    def resolve(ref: str) -> str:
        with Repository.open(place) as repository:
            return repository.resolve(ref).hex()

    return resolve


@pytest.fixture(scope="session")
def layered_template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A repository with a family of four layers, and a branch ``merged`` of math and code."""
    checkpoints = layered.make_family(tmp_path_factory.mktemp("layered"))
    with directory_in_memory() as path:
        with Repository.init(path, author=AUTHOR) as repository:
            for checkpoint in checkpoints:
                repository.add(checkpoint)
            recipe = repository.recipe(EXPERTS[:2], parameters={"math.weight": 0.5})
            repository.merge(repository.plan(recipe), branch="merged")
        yield path


@pytest.fixture
def layers(tmp_path: Path, layered_template: Path) -> CommandLine:
    """Commands in a copy of the repository of the family of four layers."""
    path = tmp_path / "layers"
    shutil.copytree(layered_template, path)
    return CommandLine(path)
