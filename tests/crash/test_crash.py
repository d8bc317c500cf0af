"""Verbs that are killed at every call by which they write.

After each, the repository is as it was or as it would be, it is sound, and the same verb again
brings it to where an undisturbed run does, with nothing temporary left.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.crash.conftest import Driver
from tests.families import Family
from tests.trees import tree_of

STEP = 7
"""By default every so many-th point is tried; all of them are under ``slow``."""


@dataclass(frozen=True, slots=True)
class Case:
    """A verb with its arguments, and how the repository comes to be in which it runs."""

    verb: str
    prepare: Callable[[Driver, Family, Path], None]
    arguments: Callable[[Family], dict[str, Any]]
    repeatable: bool = True
    """Whether the verb may run again when it had succeeded."""


def nothing(driver: Driver, family: Family, path: Path) -> None:
    path.mkdir()


def empty(driver: Driver, family: Family, path: Path) -> None:
    driver("init", path=path)


def base_alone(driver: Driver, family: Family, path: Path) -> None:
    empty(driver, family, path)
    driver("add", path=path, checkpoint=family.base)


def two_experts(driver: Driver, family: Family, path: Path) -> None:
    base_alone(driver, family, path)
    for expert in family.experts[:2]:
        driver("add", path=path, checkpoint=expert)


def plain_bytes(driver: Driver, family: Family, path: Path) -> None:
    two_experts(driver, family, path)
    driver("repack", path=path, encoding="raw")


def two_experts_too_many(driver: Driver, family: Family, path: Path) -> None:
    """Packs that nothing needs, packs of which little is needed, and packs in the trash."""
    two_experts(driver, family, path)
    driver("merge", path=path, experts=["math", "code"], branch="m/c")
    driver("delete", path=path, name="m/c")
    driver("gc", path=path, grace=1000)
    driver("add", path=path, checkpoint=family.experts[2])
    driver("reset", path=path, name="code", ref="prose")
    driver("delete", path=path, name="prose")


CASES = {
    "init": Case("init", nothing, lambda f: {}),
    "add a base": Case("add", empty, lambda f: {"checkpoint": f.base}),
    "add an expert": Case("add", base_alone, lambda f: {"checkpoint": f.experts[0]}),
    "merge": Case("merge", two_experts, lambda f: {"experts": ["math", "code"], "branch": "m/c"}),
    "branch": Case("branch", base_alone, lambda f: {"name": "a/b", "ref": "base"}, False),
    "tag": Case("tag", base_alone, lambda f: {"name": "v1", "ref": "base"}, False),
    "delete": Case("delete", two_experts, lambda f: {"name": "math"}, False),
    "rename": Case("rename", two_experts, lambda f: {"old": "math", "new": "a/b"}, False),
    "reset": Case("reset", two_experts, lambda f: {"name": "math", "ref": "code"}, False),
    "gc": Case("gc", two_experts_too_many, lambda f: {"grace": 1000}),
    "gc of everything": Case("gc", two_experts_too_many, lambda f: {"grace": 0}),
    "repack as raw": Case("repack", two_experts, lambda f: {"encoding": "raw"}),
    "repack as delta": Case("repack", plain_bytes, lambda f: {"encoding": "delta"}),
}


def points(calls: list[str], step: int) -> Iterator[tuple[int, bool]]:
    """Every ``step``-th point before a call, and in the middle of a write."""
    every = [(number, False) for number in range(len(calls))]
    every += [(n, True) for n, call in enumerate(calls) if call.startswith("write")]
    every.sort()
    yield from every[:: max(step, 1)]


def kill_everywhere(name: str, step: int, driver: Driver, family: Family, memory: Path) -> int:
    """Run a case once undisturbed and once for every point; returns how many those were."""
    case = CASES[name]
    start, work = memory / "start", memory / "work"
    case.prepare(driver, family, start)
    before = {} if name == "init" else driver("inspect", path=start)["manifests"]
    arguments = {"path": work, **case.arguments(family)}
    shutil.copytree(start, work)
    calls = driver.calls(case.verb, work, **arguments)
    after = driver("inspect", path=work)
    assert (after["problems"], after["notes"], after["temporary"]) == ([], [], [])
    tried = 0
    for point, torn in points(calls, step):
        shutil.rmtree(work)
        shutil.copytree(start, work)
        driver.kill(case.verb, work, point, torn, **arguments)
        where = f"{name}: killed {'in' if torn else 'before'} call {point}, {calls[point]}"
        if name != "init":
            state = driver("inspect", path=work)
            assert state["problems"] == [], where
            assert state["manifests"] in (before, after["manifests"]), where
            assert state["logged"], where
            done = state["manifests"] == after["manifests"] != before
        if name == "init" or case.repeatable or not done:
            driver(case.verb, **arguments)
        else:
            driver("branch", path=work, name="x", ref="base")
            driver("delete", path=work, name="x")
        final = driver("inspect", path=work)
        assert final["problems"] == [], where
        assert final["manifests"] == after["manifests"], where
        assert final["temporary"] == [], where
        assert final["logged"], where
        tried += 1
    return tried


@pytest.mark.parametrize("name", CASES)
def test_killed_here_and_there(
    name: str, driver: Driver, tiny_family: Family, memory: Path
) -> None:
    assert kill_everywhere(name, STEP, driver, tiny_family, memory) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_killed_everywhere(
    name: str, driver: Driver, tiny_family: Family, memory: Path, record_property: Any
) -> None:
    tried = kill_everywhere(name, 1, driver, tiny_family, memory)
    record_property("points", tried)
    assert tried >= 15


def kill_checkouts(step: int, driver: Driver, family: Family, memory: Path) -> int:
    """Kill a checkout at its points: the target is whole or not there at all."""
    two_experts(driver, family, memory / "repository")
    target = memory / "targets" / "out"
    arguments = {"path": memory / "repository", "ref": "code", "target": target}
    calls = driver.calls("checkout", memory, **arguments)
    expected = tree_of(family.experts[1])
    assert tree_of(target) == expected
    tried = 0
    for point, torn in points(calls, step):
        shutil.rmtree(target.parent)
        driver.kill("checkout", memory, point, torn, **arguments)
        where = f"killed {'in' if torn else 'before'} call {point}, {calls[point]}"
        if target.exists():
            assert tree_of(target) == expected, where
        else:
            driver("checkout", **arguments)
        assert tree_of(target) == expected, where
        assert [path.name for path in target.parent.iterdir()] == ["out"], where
        tried += 1
    state = driver("inspect", path=memory / "repository")
    assert (state["problems"], state["notes"], state["temporary"]) == ([], [], [])
    return tried


def test_a_checkout_killed_here_and_there(
    driver: Driver, tiny_family: Family, memory: Path
) -> None:
    assert kill_checkouts(STEP, driver, tiny_family, memory) >= 5


@pytest.mark.slow
def test_a_checkout_killed_everywhere(driver: Driver, tiny_family: Family, memory: Path) -> None:
    assert kill_checkouts(1, driver, tiny_family, memory) >= 30


def test_a_rebuild_of_the_catalog_killed_everywhere(
    driver: Driver, tiny_family: Family, memory: Path
) -> None:
    """A repository whose catalog is gone says so; the rebuild again brings it back."""
    start, work = memory / "start", memory / "work"
    two_experts(driver, tiny_family, start)
    shutil.copytree(start, work)
    calls = driver.calls("rebuild", work, path=work)
    after = driver("inspect", path=work)
    assert after["problems"] == []
    for point, torn in points(calls, 1):
        shutil.rmtree(work)
        shutil.copytree(start, work)
        driver.kill("rebuild", work, point, torn, path=work)
        state = driver.ask({"verb": "inspect", "arguments": {"path": str(work)}})
        if "failed" in state:
            assert "UnusableRepository: the catalog of" in state["failed"]
        else:
            assert state["problems"] == []
        driver("rebuild", path=work)
        final = driver("inspect", path=work)
        assert (final["problems"], final["temporary"]) == ([], [])
        assert final["manifests"] == after["manifests"]


def test_killed_again_and_again(driver: Driver, tiny_family: Family, memory: Path) -> None:
    """What many crashes leave does not add up, and the end is as if there had been none."""
    path = memory / "repository"
    base_alone(driver, tiny_family, path)
    arguments = {"path": path, "checkpoint": tiny_family.experts[0]}
    shutil.copytree(path, memory / "undisturbed")
    calls = driver.calls("add", memory, **{**arguments, "path": memory / "undisturbed"})
    for point in range(0, len(calls) - 25, 5):
        driver.kill("add", memory, point, False, **arguments)
    driver("add", **arguments)
    final = driver("inspect", path=path)
    expected = driver("inspect", path=memory / "undisturbed")
    assert (final["problems"], final["temporary"]) == ([], [])
    assert final["manifests"] == expected["manifests"]
