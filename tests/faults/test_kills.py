"""Many kills in a row on one repository, while others read it.

Processes run commands that are drawn by chance and are killed, after a time or at a call. After
each, every ref is where it was or where the command was to bring it, and nothing else moved; what
readers got meanwhile was right. From time to time and at the end `fsck` finds nothing, and every
ref's checkout is what was added or merged.

A few are killed by default; as many as MERGEGIT_KILLS says.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import pytest

from tests.families import Family, tiny_checkpoint
from tests.faults import shim
from tests.faults.cases import COLLECT, Line
from tests.faults.conftest import Driver, armed, command, inspect
from tests.faults.contents import contents
from tests.faults.shim import Fault, Kind
from tests.memory import directory_in_memory

KILLS: Final = int(os.environ.get("MERGEGIT_KILLS", "15"))
LOOK: Final = 20
"""After so many commands everything is looked at."""
SOURCES: Final = ("ada", "bob", "cyd", "dan")
MERGES: Final = ("m/one", "m/two", "best")
NAMES: Final = ("x", "x/y", "spare")
TAGS: Final = ("v1", "v2")
CALLS: Final = 110
"""Commands make about so many calls; a kill at a later one does not happen."""

Tree = dict[str, str | None]
Refs = dict[str, str]


def weights(tree: Tree) -> str | None:
    return tree["model.safetensors"]


@dataclass(slots=True)
class Truth:
    """What must be true of the repository: where its refs stand, and what its commits hold."""

    sources: dict[str, Path]
    merged: dict[tuple[str, str], str | None]
    """The weights of merges, by the sources of their experts, from a repository in peace."""
    refs: Refs = field(default_factory=dict)
    trees: dict[str, Tree] = field(default_factory=dict)
    source_of: dict[str, str] = field(default_factory=dict)
    """The source that a commit was added from."""

    def experts(self) -> list[str]:
        return [
            name.removeprefix("heads/") for name, at in self.refs.items() if at in self.source_of
        ]


@dataclass(frozen=True, slots=True)
class Move:
    """A command that may move refs: its line, and where it is to bring them; None deletes, and
    ``new`` stands for a commit that it makes."""

    line: Line
    moves: dict[str, str | None] = field(default_factory=dict)
    source: str = ""
    experts: tuple[str, ...] = ()


def a_move(draw: random.Random, truth: Truth) -> Move:
    """A command, by chance; one that may fail as a person's may."""
    refs = truth.refs
    heads = [name.removeprefix("heads/") for name in refs if name.startswith("heads/")]
    word = draw.choices(
        ("add", "merge", "branch", "delete", "rename", "tag", "untag", "reset", "repack", "gc"),
        (6, 5, 2, 2, 1, 1, 1, 2, 1, 3),
    )[0]
    if word == "add":
        name, source = draw.choice(SOURCES), draw.choice(SOURCES)
        line = ("add", str(truth.sources[source]), "--name", name, "--base", "base")
        return Move(line, {f"heads/{name}": "new"}, source=source)
    if word == "merge" and len(truth.experts()) >= 2:
        pair = tuple(sorted(draw.sample(truth.experts(), 2)))
        branch = draw.choice(MERGES)
        return Move(
            ("merge", *pair, "--base", "base", "-b", branch),
            {f"heads/{branch}": "new"},
            experts=pair,
        )
    if word == "branch":
        name, ref = draw.choice(NAMES), draw.choice(heads)
        return Move(("branch", name, ref), {f"heads/{name}": refs[f"heads/{ref}"]})
    if word == "delete":
        name = draw.choice([*MERGES, *NAMES, draw.choice(SOURCES)])
        return Move(("branch", "-d", name), {f"heads/{name}": None})
    if word == "rename":
        old, new = draw.choice([*MERGES, *NAMES]), draw.choice(NAMES)
        moves = {f"heads/{old}": None, f"heads/{new}": refs.get(f"heads/{old}")}
        return Move(("branch", "-m", old, new), moves)
    if word == "tag":
        name, ref = draw.choice(TAGS), draw.choice(heads)
        return Move(("tag", name, ref), {f"tags/{name}": refs[f"heads/{ref}"]})
    if word == "untag":
        name = draw.choice(TAGS)
        return Move(("tag", "-d", name), {f"tags/{name}": None})
    if word == "reset":
        name, ref = draw.choice([*MERGES, *NAMES]), draw.choice(heads)
        return Move(("reset", name, ref), {f"heads/{name}": refs[f"heads/{ref}"]})
    if word == "repack":
        return Move(("repack", "--encoding", draw.choice(("raw", "delta"))))
    return Move(("gc", "--expire", draw.choice(("0", "1h")), "--grace", draw.choice(("0", "1h"))))


class Siege:
    """One repository, its truth, and the processes that work on it."""

    def __init__(
        self, driver: Driver, family: Family, memory: Path, draw: random.Random, layered: bool
    ) -> None:
        self.driver = driver
        self.memory = memory
        self.draw = draw
        self.layered = layered
        self.path = memory / "repository"
        self.usual: dict[str, float] = {}
        self.kills = self.commands = self.reads = 0
        sources = {
            name: tiny_checkpoint(memory / "sources" / name, moved=place)
            for place, name in enumerate(SOURCES)
        }
        self.truth = Truth(sources, dict(self._merges_in_peace(family, sources)))
        driver.run(memory, ("init", str(self.path)))
        driver.run(self.path, ("add", str(family.base)))
        self.truth.refs = self.look_at_refs()
        (base,) = self.truth.refs.values()
        self.truth.trees[base] = contents(family.base)

    def _merges_in_peace(
        self, family: Family, sources: dict[str, Path]
    ) -> Iterator[tuple[tuple[str, str], str | None]]:
        path = self.memory / "peace"
        self.driver.run(self.memory, ("init", str(path)))
        self.driver.run(path, *(("add", str(p)) for p in (family.base, *sources.values())))
        for one, two in combinations(SOURCES, 2):
            self.driver.run(path, ("merge", one, two, "--base", "base", "-b", f"{one}-{two}"))
            yield (one, two), weights(self.checkout(path, f"{one}-{two}"))

    def checkout(self, path: Path, ref: str) -> Tree:
        target = self.memory / "target"
        done, tree = self.driver.steps(
            command(("checkout", ref, str(target)), path), {"step": "contents", "path": target}
        )
        shutil.rmtree(target)
        assert done["code"] == 0, done["err"]
        return dict(tree)

    def look_at_refs(self) -> Refs:
        (refs,) = self.driver.steps({"step": "refs", "path": self.path})
        return dict(refs)

    def next(self) -> None:
        """One command that is to be killed, beside two that read."""
        move = a_move(self.draw, self.truth)
        word = move.line[0]
        steps = [command(move.line, self.path)]
        job: dict[str, Any] = {"steps": steps}
        if self.layered and self.draw.random() < 0.6:
            kind = self.draw.choice((Kind.KILL, Kind.TEAR))
            fault = Fault(kind, self.draw.randrange(CALLS))
            steps.insert(0, armed(self.path, self.memory / "log", fault))
        else:
            job["kill_after"] = self.draw.random() * 1.5 * self.usual.get(word, 0.05)
        readers = [self.a_reader(number) for number in range(2)]
        answer, *read = self.driver.together(job, *(job for job, _ in readers))
        self.commands += 1
        if "killed" in answer:
            assert answer == {"killed": 9}
            self.kills += 1
        else:
            done = answer["done"][-1]
            self.usual[word] = max(self.usual.get(word, 0), done["seconds"])
            told_well(done, move.line)
        for (_, commit), told in zip(readers, read, strict=True):
            self.check_reading(told["done"], commit, move)
        self.check_refs(move, answer_code(answer))

    def a_reader(self, number: int) -> tuple[dict[str, Any], str]:
        """A process that reads, and the commit that it checks out."""
        commit = self.draw.choice(sorted(set(self.truth.refs.values())))
        target = self.memory / f"read-{number}"
        lines: list[Line] = [("log",), ("log", "--graph"), ("status",), ("reflog",), ("branch",)]
        steps = [command(self.draw.choice(lines), self.path)]
        if self.draw.random() < 0.3:
            steps.append(command(("fsck",), self.path))
        steps.append(command(("checkout", commit, str(target)), self.path))
        steps.append({"step": "contents", "path": target})
        return {"steps": steps}, commit

    def check_reading(self, done: list[Any], commit: str, move: Move) -> None:
        *commands, tree = done
        beside = f"beside {' '.join(move.line)}"
        for one in commands:
            assert one["code"] == 0, f"{one['line']} {beside}: {one['out']}{one['err']}"
        assert tree == self.truth.trees[commit], f"something else than {commit} {beside}"
        for number in range(2):
            shutil.rmtree(self.memory / f"read-{number}", ignore_errors=True)
        self.reads += 1

    def check_refs(self, move: Move, code: int | None) -> None:
        """Refs are where they were, or where the command was to bring them."""
        truth, after = self.truth, self.look_at_refs()
        where = f"{' '.join(move.line)}: exit {code}"
        changed = {n for n in truth.refs | after if truth.refs.get(n) != after.get(n)}
        assert changed <= move.moves.keys(), where
        if code == 1:
            assert not changed, where
        if changed:
            for name, target in move.moves.items():
                if target == "new":
                    self.learn(move, after[name], where)
                else:
                    assert after.get(name) == target, where
        truth.refs = after

    def learn(self, move: Move, commit: str, where: str) -> None:
        """A commit that was made: what it holds must be what it was made from."""
        truth = self.truth
        tree = self.checkout(self.path, commit)
        assert truth.trees.setdefault(commit, tree) == tree, where
        if move.source:
            assert tree == contents(truth.sources[move.source]), where
            truth.source_of[commit] = move.source
        else:
            sources = [truth.source_of[truth.refs[f"heads/{name}"]] for name in move.experts]
            if sources[0] != sources[1]:
                one, two = sorted(sources)
                assert weights(tree) == truth.merged[one, two], where

    def look(self) -> None:
        """Everything is sound, and every ref's checkout is right."""
        (state,) = self.driver.steps(inspect(self.path))
        assert state["problems"] == []
        assert state["unlogged"] == []
        expected = {name: self.truth.trees[commit] for name, commit in self.truth.refs.items()}
        assert state["refs"] == expected

    def end(self) -> None:
        """Nothing of all that was not finished is left."""
        self.look()
        self.driver.run(self.path, COLLECT)
        self.look()
        (state,) = self.driver.steps(inspect(self.path))
        assert (state["notes"], state["strays"], state["collectable"]) == ([], [], 0)


def answer_code(answer: dict[str, Any]) -> int | None:
    return answer["done"][-1]["code"] if "done" in answer else None


def told_well(done: dict[str, Any], line: Line) -> None:
    """A command that failed was refused for a reason, in two lines."""
    if done["code"]:
        text = f"{' '.join(line)}: {done['err']}"
        assert done["code"] == 1, text
        *_, error, hint = done["err"].splitlines()
        assert error.startswith("error: "), text
        assert hint.startswith(" hint: "), text
        assert "damaged" not in error, text
        assert "missing" not in error, text


def test_a_repository_outlives_many_kills(
    tiny_family: Family, request: pytest.FixtureRequest
) -> None:
    layered = shim.why_not() is None
    driver: Driver = request.getfixturevalue("driver" if layered else "plain_driver")
    with directory_in_memory() as memory:
        siege = Siege(driver, tiny_family, memory, random.Random(KILLS), layered)
        while siege.kills < KILLS:
            siege.next()
            if siege.commands % LOOK == 0:
                siege.look()
        siege.end()
        print(f"{siege.kills} kills among {siege.commands} commands; {siege.reads} readers")
