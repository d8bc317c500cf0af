"""The commands whose faults are tried, and how the repository comes to be in which they run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.families import Family
from tests.faults.conftest import Driver
from tests.faults.places import REPOSITORY, TARGET

Line = tuple[str, ...]
"""A command line, without the program's name. ``{base}`` and the names of experts stand for their
checkpoints."""

_BASE: Final[tuple[Line, ...]] = (("init", REPOSITORY), ("add", "{base}"))
_EXPERTS: Final = (*_BASE, ("add", "{math}"), ("add", "{code}"))
_MERGED: Final = (
    *("merge", "math", "code", "--budget", "60%"),
    *("--method", "ties", "-p", "density=0.5"),
)
_AT_ONCE: Final = ("--expire", "0", "--grace", "0")
_LATER: Final = ("--expire", "0", "--grace", "1h")
_LEFT_OVER: Final = (
    *_EXPERTS,
    (*_MERGED, "-b", "m/c"),
    ("branch", "-d", "m/c"),
    ("gc", *_LATER),
    ("add", "{prose}"),
    ("reset", "code", "prose"),
    ("branch", "-d", "prose"),
)
"""Packs that nothing needs, packs of which little is needed, and packs in the trash."""


COLLECT: Final[Line] = ("gc", *_AT_ONCE)
REBUILD: Final[Line] = ("fsck", "--rebuild-catalog")


@dataclass(frozen=True, slots=True)
class Case:
    """A command, those before it, and whether it may be run again when it has succeeded."""

    line: Line
    before: tuple[Line, ...]
    repeatable: bool = True
    by_file: bool = False
    """Whether it may leave some files of a checkout new and others old."""


CASES: Final = {
    "init": Case(("init", REPOSITORY), ()),
    "add a base": Case(("add", "{base}"), _BASE[:1]),
    "add an expert": Case(("add", "{math}"), _BASE),
    "add a second version": Case(("add", "{prose}", "--name", "math"), _EXPERTS),
    "plan": Case(("plan", "math", "code", "--budget", "60%"), _EXPERTS),
    "merge": Case((*_MERGED, "-b", "m/c"), (*_EXPERTS, ("plan", *_MERGED[1:]))),
    "checkout": Case(("checkout", "code", f"../{TARGET}"), _EXPERTS),
    "update a checkout": Case(
        ("checkout", "code", f"../{TARGET}", "--update"),
        (*_EXPERTS, ("checkout", "math", f"../{TARGET}")),
        by_file=True,
    ),
    "branch": Case(("branch", "a/b", "base"), _BASE, repeatable=False),
    "rename a branch": Case(("branch", "-m", "math", "a/b"), _EXPERTS, repeatable=False),
    "delete a branch": Case(("branch", "-d", "math"), _EXPERTS, repeatable=False),
    "tag": Case(("tag", "v1", "base"), _BASE, repeatable=False),
    "reset": Case(("reset", "math", "code"), (*_EXPERTS, ("reset", "math", "base"))),
    "repack as raw": Case(("repack", "--encoding", "raw"), _EXPERTS),
    "repack as delta": Case(("repack",), (*_EXPERTS, ("repack", "--encoding", "raw"))),
    "gc": Case(("gc", *_LATER), _LEFT_OVER),
    "gc of everything": Case(("gc", *_AT_ONCE), _LEFT_OVER),
    "rebuild": Case(REBUILD, _EXPERTS),
}


def filled(line: Line, family: Family) -> Line:
    """A line with the checkpoints' paths in it."""
    paths = {path.name: path for path in (family.base, *family.experts)}
    return tuple(word.format(**paths) if word.startswith("{") else word for word in line)


def prepare(case: Case, driver: Driver, family: Family, root: Path) -> None:
    """Run what comes before a command."""
    root.mkdir()
    for line in case.before:
        driver.run(directory_of(line, root), filled(line, family))


def directory_of(line: Line, root: Path) -> Path:
    """Where a line is run: in the repository, unless it makes it."""
    return root if line[0] == "init" else root / REPOSITORY
