"""Many processes at once: adding, merging, moving refs, reading, checking, collecting.

No update is lost, no reader is disturbed, and who loses a race is told so and succeeds later.
MERGEGIT_STRESS says how many rounds each process goes.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest

from tests.families import EXPERTS, Family, tiny_checkpoint
from tests.faults.cases import Line
from tests.faults.conftest import Driver, command, inspect
from tests.faults.contents import contents
from tests.memory import directory_in_memory

ROUNDS: Final = int(os.environ.get("MERGEGIT_STRESS", "4"))
TRIES: Final = 300
"""After so many lost races something is wrong."""

Job = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Field:
    """The repository, where others lie, and the processes that will run at once, by what they
    do."""

    driver: Driver
    memory: Path
    jobs: dict[str, Job]

    @property
    def path(self) -> Path:
        return self.memory / "repository"

    def checkpoint(self, name: str, number: int) -> Path:
        return tiny_checkpoint(self.memory / "sources" / name, moved=1000 + number)

    def insist(self, line: Line) -> dict[str, Any]:
        return {"step": "insist", "arguments": line, "directory": self.path, "tries": TRIES}

    def run(self) -> dict[str, list[Any]]:
        """What each process did; everything at the same time."""
        answers = self.driver.together(*self.jobs.values())
        return {name: answer["done"] for name, answer in zip(self.jobs, answers, strict=True)}


@contextmanager
def field_of(driver: Driver, family: Family) -> Iterator[Field]:
    with directory_in_memory() as memory:
        field = Field(driver, memory, {})
        driver.run(memory, ("init", str(field.path)))
        driver.run(field.path, *(("add", str(p)) for p in (family.base, *family.experts)))
        yield field


def adders(field: Field) -> dict[str, Path]:
    """Two processes that add checkpoints, each to branches of its own."""
    sources = {}
    for who in range(2):
        lines = []
        for number in range(ROUNDS):
            name = f"own-{who}-{number}"
            sources[name] = field.checkpoint(name, 10 * number + who)
            lines.append(("add", str(sources[name]), "--base", "base"))
        field.jobs[f"adder {who}"] = {"steps": [field.insist(line) for line in lines]}
    return sources


def rivals(field: Field) -> None:
    """Three processes that add versions to one branch."""
    for who in range(3):
        steps = []
        for number in range(ROUNDS):
            source = field.checkpoint(f"rival-{who}-{number}", 10 * number + 5 + who)
            line = ("add", str(source), "--name", "race", "--base", "base", "--json")
            steps.append(field.insist(line))
        field.jobs[f"rival {who}"] = {"steps": steps}


def mergers(field: Field) -> None:
    """A process that merges, under a budget."""
    pairs = [EXPERTS[:2], EXPERTS[1:], EXPERTS[::2]]
    lines = [
        ("merge", *pairs[n % 3], "--budget", f"{30 + n}%", "-b", f"merged-{n}")
        for n in range(ROUNDS)
    ]
    field.jobs["merger"] = {"steps": [field.insist(line) for line in lines]}


def movers(field: Field) -> None:
    """Two processes that move one branch to and fro."""
    for who in range(2):
        steps = [
            field.insist(("reset", "mover", EXPERTS[(n + who) % 3], "--json"))
            for n in range(3 * ROUNDS)
        ]
        field.jobs[f"mover {who}"] = {"steps": steps}


def readers(field: Field) -> None:
    """Two processes that look and check out, and one that checks everything."""
    lines: list[Line] = [("log", "--graph"), ("status",), ("reflog",), ("diff", "math", "code")]
    for who in range(2):
        steps = []
        for number in range(2 * ROUNDS):
            target = field.memory / f"read-{who}-{number}"
            steps.append(command(lines[number % 3], field.path))
            steps.append(command(("checkout", EXPERTS[number % 3], str(target)), field.path))
            steps.append({"step": "contents", "path": target})
        field.jobs[f"reader {who}"] = {"steps": steps}
    field.jobs["checker"] = {"steps": [command(("fsck",), field.path)] * ROUNDS}


def collectors(field: Field) -> None:
    """A process that collects, with the shortest grace."""
    line = ("gc", "--expire", "1h", "--grace", "0")
    field.jobs["collector"] = {"steps": [field.insist(line)] * ROUNDS}


def check_losers(done: dict[str, list[Any]]) -> Counter[str]:
    """Every loser was told so, and won in the end. Returns how many lost, by what they did."""
    lost: Counter[str] = Counter()
    for who, steps in done.items():
        for tries in steps:
            if not isinstance(tries, list):
                continue
            *losses, last = tries
            assert last["code"] == 0, f"{who}: {last['err']}"
            lost[who.split()[0]] += len(losses)
            for loss in losses:
                error, hint = loss["err"].splitlines()
                assert error.startswith("error: "), error
                assert hint.startswith(" hint: run "), hint
                if who == "collector":
                    assert "another command is at work" in error
                else:
                    assert who.split()[0] in ("rival", "mover"), error
                    assert "was moved by another command meanwhile" in error
    return lost


def check_readers(field: Field, family: Family, done: dict[str, list[Any]]) -> int:
    """Every reader got what was asked for, whatever happened around it."""
    trees = {path.name: contents(path) for path in family.experts}
    reads = 0
    for who in ("reader 0", "reader 1"):
        for number in range(2 * ROUNDS):
            look, out, tree = done[who][3 * number : 3 * number + 3]
            assert (look["code"], out["code"]) == (0, 0), look["err"] + out["err"]
            assert tree == trees[EXPERTS[number % 3]]
            reads += 1
    for check in done["checker"]:
        assert check["code"] == 0, check["out"] + check["err"]
    return reads


def moves_of(field: Field, ref: str) -> list[dict[str, Any]]:
    """A ref's log, oldest first."""
    (log,) = field.driver.steps(command(("reflog", ref, "--json"), field.path))
    return list(reversed(json.loads(log["out"])))


def check_chain(moves: list[dict[str, Any]]) -> None:
    assert moves[0]["old"] is None
    for before, after in pairwise(moves):
        assert after["old"] == before["new"]


@pytest.mark.timeout(3600)
def test_many_processes_at_once(plain_driver: Driver, tiny_family: Family) -> None:
    with field_of(plain_driver, tiny_family) as field:
        field.driver.run(field.path, ("branch", "mover", "base"))
        sources = adders(field)
        for crowd in (rivals, mergers, movers, readers, collectors):
            crowd(field)
        assert len(field.jobs) >= 8
        done = field.run()
        lost = check_losers(done)
        reads = check_readers(field, tiny_family, done)
        field.driver.run(field.path, ("gc",))
        (state,) = field.driver.steps(inspect(field.path))
        assert (state["problems"], state["unlogged"], state["strays"]) == ([], [], [])
        for name, path in sources.items():
            assert state["refs"][f"heads/{name}"] == contents(path), f"{name} is lost"
        for number in range(ROUNDS):
            assert f"heads/merged-{number}" in state["refs"], "a merge is lost"
        check_race(field, done)
        check_moves(field, done)
        print(f"{len(field.jobs)} processes, {reads} reads; races lost: {dict(lost)}")


def check_race(field: Field, done: dict[str, list[Any]]) -> None:
    """Every version that was added to the one branch is in its history."""
    won = {
        json.loads(tries[-1]["out"])["commit"]
        for who, steps in done.items()
        if who.startswith("rival")
        for tries in steps
    }
    assert len(won) == 3 * ROUNDS
    moves = moves_of(field, "race")
    check_chain(moves)
    assert {move["new"] for move in moves} == won
    (log,) = field.driver.steps(command(("log", "race", "--json"), field.path))
    assert won <= {commit["commit"] for commit in json.loads(log["out"])}


def check_moves(field: Field, done: dict[str, list[Any]]) -> None:
    """Every move of the one branch is in its log, once."""
    reports = [
        json.loads(tries[-1]["out"])
        for who, steps in done.items()
        if who.startswith("mover")
        for tries in steps
    ]
    told = Counter((r["was"], r["commit"]) for r in reports if r["was"] != r["commit"])
    created, *moves = moves_of(field, "mover")
    check_chain([created, *moves])
    assert Counter((move["old"], move["new"]) for move in moves) == told
