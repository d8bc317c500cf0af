"""Commands whose system calls fail, are cut short, or end with the process or the machine.

At every call by which a command changes a file or a directory, one of these happens: the process
is killed before or in the middle of it, the disk or quota is full, the disk has an error, or the
power goes. Whatever it was: the repository is the old one or the new one, `fsck` finds nothing, the
same command again succeeds, and `gc` leaves nothing of the unfinished work. A process that lives on
says in one line what failed and in one what to do.

Some points are tried by default; all of them where MERGEGIT_FAULTS is ``all``.
"""

from __future__ import annotations

import copy
import errno
import os
import random
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from blake3 import blake3

from tests.families import Family
from tests.faults.cases import (
    CASES,
    COLLECT,
    REBUILD,
    Case,
    directory_of,
    filled,
    prepare,
)
from tests.faults.conftest import Driver, armed, command
from tests.faults.disk import HOLLOW, LOST, NAMELESS, Cut, Disk, torn
from tests.faults.places import REPOSITORY, TARGET
from tests.faults.shim import Call, Fault, Kind, Operation, calls_of
from tests.memory import directory_in_memory
from tests.trees import tree_of

EVERYTHING_IS_TRIED: Final = os.environ.get("MERGEGIT_FAULTS") == "all"
TRIALS: Final = 4
"""How many are tried of each command by default."""
TORN: Final = 3
"""How many power cuts at one point leave some changes and not others."""

FAILURES: Final = {
    "disk full": (Kind.FULL, errno.ENOSPC),
    "disk full after half a write": (Kind.SHORTEN, errno.ENOSPC),
    "quota used up": (Kind.FAIL, errno.EDQUOT),
    "disk error": (Kind.FAIL, errno.EIO),
    "killed": (Kind.KILL, 0),
    "killed in the middle": (Kind.TEAR, 0),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One thing that happens at one call; ``point`` may be the number of calls: after the last."""

    word: str
    point: int
    fault: Fault | None = None
    cut: Cut | None = None


@dataclass(slots=True)
class Scene:
    """A command as it runs undisturbed: before, after, and the calls between."""

    case: Case
    line: tuple[str, ...]
    start: Path
    disk: Disk
    calls: list[Call]
    before: dict[str, Any]
    after: dict[str, Any]
    packs: list[str] = field(default_factory=list)
    """The packs of the start when all is collected."""

    def words(self, trial: Trial, work: Path) -> str:
        if trial.point == len(self.calls):
            return f"{trial.word} after the last call"
        return f"{trial.word} at call {trial.point}, {self.calls[trial.point].below(work)}"


def look(driver: Driver, root: Path) -> dict[str, Any]:
    """What a repository holds, and what a checkout wrote."""
    (found,) = driver.steps({"step": "look", "root": root})
    return dict(found)


def make_scene(name: str, driver: Driver, family: Family, memory: Path) -> Scene:
    """Run a command undisturbed, on a copy of where it starts."""
    case = CASES[name]
    start, work = memory / "start", memory / "work"
    prepare(case, driver, family, start)
    shutil.copytree(start, work)
    before = look(driver, work)
    shutil.rmtree(work)  # that look may have made the catalog, which belongs to the command
    shutil.copytree(start, work)
    disk = Disk(work)
    line = filled(case.line, family)
    done = driver.steps(
        armed(work, memory / "log", Fault()), command(line, directory_of(line, work))
    )[-1]
    assert done["code"] == 0, done["err"]
    scene = Scene(case, line, start, disk, list(calls_of(memory / "log")), before, {})
    scene.after = look(driver, work)
    assert sound(scene.after)
    if name != "init":
        shutil.rmtree(work)
        shutil.copytree(start, work)
        driver.run(work / REPOSITORY, COLLECT)
        scene.packs = look(driver, work)["packs"]
    shutil.rmtree(work)
    return scene


def sound(state: dict[str, Any]) -> bool:
    return not state["problems"] and not state["unlogged"]


def trials_of(scene: Scene) -> Iterator[Trial]:
    """Everything that can happen, at every call."""
    for point, call in enumerate(scene.calls):
        for word, (kind, number) in FAILURES.items():
            if kind in (Kind.SHORTEN, Kind.TEAR) and call.operation is not Operation.WRITE:
                continue
            yield Trial(word, point, fault=Fault(kind, point, number))
    for point in range(len(scene.calls) + 1):
        for cut in (LOST, HOLLOW, NAMELESS):
            yield Trial(f"power cut ({cut.word})", point, cut=cut)
        for seed in range(TORN):
            cut = torn(point * TORN + seed)
            yield Trial(f"power cut ({cut.word})", point, cut=cut)


def some(trials: list[Trial], count: int, seed: str) -> list[Trial]:
    """Trials of different kinds, at points that lie evenly over the command."""
    draw = random.Random(zlib.crc32(seed.encode()))
    draw.shuffle(trials)
    last = max(trial.point for trial in trials)
    chosen: list[Trial] = []
    for number in range(count):
        low, high = (last + 1) * number // count, (last + 1) * (number + 1) // count
        kinds = {trial.word.split(" (")[0] for trial in chosen}
        near = [trial for trial in trials if low <= trial.point < high]
        chosen.append(next((t for t in near if t.word.split(" (")[0] not in kinds), near[0]))
    return chosen


# -- one trial -------------------------------------------------------------------------------------


class Witness:
    """Says what must be true after a trial, and after the commands that follow it."""

    def __init__(self, scene: Scene, trial: Trial, work: Path) -> None:
        self.scene = scene
        self.trial = trial
        self.where = scene.words(trial, work)
        self.state: dict[str, Any] = {}

    def happened(self, state: dict[str, Any], answer: dict[str, Any] | None) -> None:
        """The state is the old one or the new one; ``answer`` is of the process, if it was not a
        power cut."""
        self.state = state
        if not self.is_lost():
            self.old_or_new()
        if answer is None:
            finished = self.trial.point == len(self.scene.calls)
            assert not finished or self.is_new(), f"{self.where}: what was done is lost"
        elif "killed" in answer:
            assert answer == {"killed": 9}, self.where
            assert self.trial.fault is not None
            assert self.trial.fault.ends_the_process, self.where
        else:
            self.told(answer["done"][-1])

    def is_new(self) -> bool:
        return not self.is_lost() and self.same(self.scene.after)

    def is_lost(self) -> bool:
        """Whether the catalog is gone: between the old one and the new one of a rebuild alone."""
        if "unusable" not in self.state:
            return False
        assert self.scene.line == REBUILD, f"{self.where}: {self.state['unusable']}"
        assert "fsck --rebuild-catalog" in self.state["hint"], self.where
        return True

    def same(self, other: dict[str, Any]) -> bool:
        return all(self.state[key] == other[key] for key in ("refs", "out"))

    def is_by_file(self) -> bool:
        """Whether every file of a checkout is the old one or the new one, where that is enough."""
        old, new = (state["out"] for state in (self.scene.before, self.scene.after))
        found = {n: data for n, data in self.state["out"].items() if not _is_temporary(n)}
        return self.scene.case.by_file and all(
            data in (old.get(name), new.get(name)) for name, data in found.items()
        )

    def old_or_new(self) -> None:
        known = self.same(self.scene.before) or self.is_new() or self.is_by_file()
        assert known, f"{self.where}: neither old nor new"
        if self.state["refs"] is not None:
            assert self.state["problems"] == [], self.where
            assert self.state["unlogged"] == [], f"{self.where}: a ref without its log"

    def told(self, done: dict[str, Any]) -> None:
        """A process that lives on tells the truth, in two lines, and cleans up."""
        fault = self.trial.fault
        assert fault is not None
        assert not fault.ends_the_process, self.where
        text = f"{self.where}: exit {done['code']}: {done['err']}"
        if done["code"] == 0:
            assert self.is_new(), text
            return
        assert done["code"] == 1, text
        assert "Traceback" not in done["err"], text
        *notes, error, hint = done["err"].splitlines()
        assert error.startswith("error: "), text
        assert hint.startswith(" hint: "), text
        assert not any(line.startswith(("error: ", " hint: ")) for line in notes), text
        if fault.errno == errno.ENOSPC:
            assert "space" in error, text
        if fault.errno == errno.EDQUOT:
            assert "uota" in error or "space" in error, text
        if self.is_new() and not self.same(self.scene.before) and not self.scene.case.by_file:
            assert "did not confirm" in error, text
        removing = (Operation.UNLINK, Operation.RMDIR)
        if self.scene.calls[self.trial.point].operation not in removing and "strays" in self.state:
            left = [name for name in self.state["strays"] if name.startswith("tmp/")]
            assert left == [], text

    def repeated(self, done: dict[str, Any], state: dict[str, Any]) -> None:
        """The same command again brings the repository to where an undisturbed run does."""
        new = self.is_new()
        if self.scene.line[0] == "checkout" and new and not self.scene.case.by_file:
            assert "not empty" in done["err"]
        elif self.scene.case.repeatable or not new:
            assert done["code"] == 0, f"{self.where}: again: {done['err']}"
        self.state = state
        assert self.is_new(), f"{self.where}: again"
        assert sound(state), f"{self.where}: again"

    def collected(self, done: dict[str, Any], state: dict[str, Any]) -> None:
        """`gc` leaves nothing of the unfinished work."""
        if self.is_lost() or self.state["refs"] is None:
            return
        where = f"{self.where}: collected"
        assert done["code"] == 0, f"{where}: {done['err']}"
        was_old = not self.is_new()
        assert state["refs"] == self.state["refs"], where
        self.state = state
        assert sound(state), where
        for what in ("notes", "strays"):
            assert state[what] == [], f"{where}: {what} {state[what]}"
        assert state["collectable"] == 0, where
        if was_old and self.scene.line[0] != "repack":
            assert state["packs"] == self.scene.packs, where
        if self.scene.line[0] != "checkout" or self.is_new():
            assert set(state["beside"]) <= {REPOSITORY, TARGET}, where


def _is_temporary(name: str) -> bool:
    return Path(name).name.startswith(".")


class Stage:
    """Where trials of one command are carried out."""

    def __init__(self, scene: Scene, driver: Driver, memory: Path) -> None:
        self.scene = scene
        self.driver = driver
        self.work = memory / "work"
        self.log = memory / "log"
        self.states: set[str] = set()
        """What power cuts left, of which all has been seen already."""

    def carry_out(self, trial: Trial) -> None:
        """A trial, then the command again and `gc`; at every other point `gc` first."""
        shutil.rmtree(self.work, ignore_errors=True)
        answer = None
        if trial.cut is not None:
            disk = copy.deepcopy(self.scene.disk)
            disk.follow(self.scene.calls[: trial.point])
            disk.write(self.work, trial.cut)
            left = f"{trial.point % 2} {trial.point == len(self.scene.calls)} {hash_of(self.work)}"
            if left in self.states:
                return
            self.states.add(left)
        else:
            shutil.copytree(self.scene.start, self.work)
            answer = self._break(trial)
        place = directory_of(self.scene.line, self.work)
        again, collect = command(self.scene.line, place), command(COLLECT, self.work / REPOSITORY)
        look_at = {"step": "look", "root": self.work}
        is_there = (self.work / REPOSITORY / ".mergegit" / "format").exists()
        first = [collect, look_at] if trial.point % 2 and is_there else []
        answers = self.driver.steps(look_at, *first, again, look_at, collect, look_at)
        witness = Witness(self.scene, trial, self.work)
        witness.happened(answers.pop(0), answer)
        if first:
            witness.collected(answers.pop(0), answers.pop(0))
        witness.repeated(answers.pop(0), answers.pop(0))
        witness.collected(answers.pop(0), answers.pop(0))

    def _break(self, trial: Trial) -> dict[str, Any]:
        """Run the command, and let happen what the trial says; what became of the process."""
        assert trial.fault is not None
        return self.driver.ask(
            armed(self.work, self.log, trial.fault),
            command(self.scene.line, directory_of(self.scene.line, self.work)),
        )


def hash_of(root: Path) -> str:
    whole = blake3()
    for name, data in sorted(tree_of(root).items()):
        whole.update(f"{name} {-1 if data is None else len(data)} ".encode())
        whole.update(data or b"")
    return whole.hexdigest()


@pytest.mark.timeout(4 * 60 * 60 if EVERYTHING_IS_TRIED else 300)
@pytest.mark.parametrize("name", CASES)
def test_commands_whose_calls_fail(name: str, driver: Driver, tiny_family: Family) -> None:
    with directory_in_memory() as memory:
        scene = make_scene(name, driver, tiny_family, memory)
        trials = list(trials_of(scene))
        if not EVERYTHING_IS_TRIED:
            trials = some(trials, TRIALS, name)
        stage, failures = Stage(scene, driver, memory), []
        for trial in trials:
            try:
                stage.carry_out(trial)
            except AssertionError as failure:
                failures.append(str(failure))
        print(f"{name}: {len(trials)} trials at {len(scene.calls)} calls")
        assert failures == []
