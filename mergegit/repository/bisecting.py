"""`bisect`: what breaks a test, found by testing few commits, or few merges of some experts."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from mergegit.errors import BadRecipe, Busy, Damaged, NotStarted, UnknownRef
from mergegit.history import walk
from mergegit.merge.plan import Planner
from mergegit.merge.recipe import Recipe
from mergegit.objects import Commit, CommitId
from mergegit.repository.bisection import (
    VERDICTS,
    CommitQuestion,
    CommitsFound,
    Subset,
    SubsetFound,
    SubsetQuestion,
    Verdict,
    next_commit,
    next_subset,
)
from mergegit.repository.naming import short
from mergegit.repository.repository import Progress, Repository, plan_report
from mergegit.repository.subsets import plan_without, recipe_without
from mergegit.storage.location import locked, write_durably

Mode = Literal["commits", "experts"]

_VERSION: Final = 1
_STATE: Final = "bisect"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a test said of a commit, or of a merge of some experts."""

    verdict: Verdict
    commit: CommitId | None = None
    experts: Subset | None = None


@dataclass(frozen=True, slots=True)
class BisectStatus:
    """Where a bisection stands.

    ``ref`` is what was bad at the beginning. Either there is something to test next, a ``commit``
    or the merge of ``experts`` (places among ``names``), of ``left`` that are suspected, in about
    ``steps`` more tests; or it is ``found``: commits, or ``experts`` again, ``is_certain`` where
    nothing was skipped that would have told. With ``is_groundless`` no expert is to blame: the
    base breaks the test alone, or the whole merge does not.
    """

    mode: Mode
    ref: str
    bad: CommitId
    answers: tuple[Answer, ...]
    names: tuple[str, ...] = ()
    commit: CommitId | None = None
    experts: Subset | None = None
    left: int = 0
    steps: int = 0
    is_found: bool = False
    found: tuple[CommitId, ...] = ()
    is_certain: bool = True
    is_groundless: bool = False

    def names_of(self, subset: Subset) -> str:
        return ", ".join(self.names[place] for place in subset) or "no expert"


@dataclass(frozen=True, slots=True)
class _State:
    """What is kept of a bisection: how it began, and the answers."""

    mode: Mode
    ref: str
    bad: CommitId
    good: tuple[CommitId, ...]
    answers: tuple[Answer, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "mode": self.mode,
            "ref": self.ref,
            "bad": self.bad.hex(),
            "good": [commit.hex() for commit in self.good],
            "answers": [
                {"verdict": answer.verdict}
                | ({"commit": answer.commit.hex()} if answer.commit is not None else {})
                | ({"experts": list(answer.experts)} if answer.experts is not None else {})
                for answer in self.answers
            ],
        }

    @classmethod
    def from_json(cls, value: Any) -> _State:
        if value["version"] != _VERSION or value["mode"] not in ("commits", "experts"):
            raise ValueError("another version")
        answers = []
        for answer in value["answers"]:
            if answer["verdict"] not in VERDICTS:
                raise ValueError(f"{answer['verdict']!r} is no verdict")
            commit, experts = answer.get("commit"), answer.get("experts")
            answers.append(
                Answer(
                    answer["verdict"],
                    CommitId(bytes.fromhex(commit)) if commit is not None else None,
                    tuple(map(int, experts)) if experts is not None else None,
                )
            )
        return cls(
            value["mode"],
            str(value["ref"]),
            CommitId(bytes.fromhex(value["bad"])),
            tuple(CommitId(bytes.fromhex(commit)) for commit in value["good"]),
            tuple(answers),
        )


Test = Callable[[Path], Verdict]
"""Tests the checkpoint in a directory."""


class Bisection:
    """The bisection of a repository: one at a time, kept in a small file between commands."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._store = repository.store
        self._planner: Planner | None = None

    # -- where it stands -------------------------------------------------------------------------

    def start(self, ref: str, *, good: Sequence[str] = (), experts: bool = False) -> BisectStatus:
        """Begin with a bad commit, and perhaps good ones; with ``experts`` among those of a merge.

        Raises ``Busy`` where a bisection is under way, ``BadRecipe`` where there is nothing to
        look among, and ``UnknownRef``.
        """
        bad = self._repository.resolve(ref)
        known = tuple(self._repository.resolve(name) for name in good)
        if self._path.exists():
            raise Busy("a bisection is under way", hint="end it with `mergegit bisect reset` first")
        state = _State("experts" if experts else "commits", ref, bad, known)
        if experts:
            self._check_merge(ref, bad)
        status = self._status(state)
        self._write(state)
        return status

    def status(self) -> BisectStatus:
        """Where it stands. Raises ``NotStarted`` where none is under way."""
        return self._status(self._read())

    def answer(self, verdict: Verdict, ref: str | None = None) -> BisectStatus:
        """Say what a test said of what is to be tested, or of the commit ``ref``.

        Raises ``NotStarted``, ``UnknownRef``, and ``BadRecipe`` where the answer contradicts those
        before it.
        """
        state = self._read()
        status = self._status(state)
        if ref is not None:
            if state.mode == "experts":
                raise BadRecipe(
                    "among the experts of a merge no commit is asked for",
                    hint=f"say `mergegit bisect {verdict}` of the merge that is to be tested",
                )
            commit = self._repository.resolve(ref)
            if verdict == "good":  # which need not be an ancestor of the bad one
                return self._record(replace(state, good=(*state.good, commit)), None)
            answer = Answer(verdict, commit=commit)
        elif status.is_found:
            raise BadRecipe(
                "the bisection has found what it looked for",
                hint="end it with `mergegit bisect reset`",
            )
        else:
            answer = Answer(verdict, status.commit, status.experts)
        return self._record(state, answer)

    def reset(self) -> bool:
        """End the bisection and forget it; whether there was one."""
        there = self._path.exists()
        self._path.unlink(missing_ok=True)
        return there

    # -- testing ---------------------------------------------------------------------------------

    def checkout(
        self, directory: str | os.PathLike[str], progress: Progress | None = None
    ) -> BisectStatus:
        """Write what is to be tested next into a directory."""
        status = self.status()
        if status.is_found:
            raise BadRecipe(
                "the bisection has found what it looked for",
                hint="end it with `mergegit bisect reset`",
            )
        self._write_out(status, directory, progress or _silent)
        return status

    def run(
        self,
        test: Test,
        *,
        told: Callable[[BisectStatus, Answer | None], None],
        progress: Progress | None = None,
    ) -> BisectStatus:
        """Test until it is found what breaks the test; ``told`` of each status before it is tested,
        and with its answer after that.

        Each checkpoint is written to a temporary directory, which goes when it has been tested.
        """
        status = self.status()
        while not status.is_found:
            told(status, None)
            with tempfile.TemporaryDirectory(prefix="mergegit-bisect-") as directory:
                target = Path(directory) / "model"
                self._write_out(status, target, progress or _silent)
                verdict = test(target)
            answer = Answer(verdict, status.commit, status.experts)
            told(status, answer)
            status = self._record(self._read(), answer)
        return status

    def _write_out(
        self, status: BisectStatus, directory: str | os.PathLike[str], progress: Progress
    ) -> None:
        # No ref reaches a trial merge: it must not be collected before it is written out.
        with self._store.lease.shared():
            commit = status.commit
            if commit is None:
                assert status.experts is not None
                commit = self._merged(status, status.experts, progress)
            self._repository.checkout(commit.hex(), directory, progress=progress)

    def _merged(self, status: BisectStatus, experts: Subset, progress: Progress) -> CommitId:
        """The commit of a merge of some of the experts, under no ref, reading the same of them."""
        merge = self._store.commit(status.bad)
        recipe = _recipe_of(merge)
        if len(experts) == len(recipe.experts):
            return status.bad
        if not experts:
            return recipe.base
        left_out = [k for k in range(len(recipe.experts)) if k not in experts]
        smaller = recipe_without(recipe, left_out)
        if self._planner is None:
            self._planner = self._repository.planner(recipe, progress=progress)
        others = self._repository.planner(smaller, progress=progress)
        assert merge.plan is not None
        plan = plan_without(self._store.plan(merge.plan), self._planner, others, left_out)
        return self._repository.merge_unnamed(
            plan_report(plan or others.plan(None)),
            message=f"bisect {status.ref}: {status.names_of(experts)} alone",
            progress=progress,
        )

    # -- inside ----------------------------------------------------------------------------------

    def _status(self, state: _State) -> BisectStatus:
        status = BisectStatus(state.mode, state.ref, state.bad, state.answers)
        if state.mode == "commits":
            return self._status_of_commits(state, status)
        recipe = _recipe_of(self._store.commit(state.bad))
        names = tuple(expert.ref for expert in recipe.experts)
        answers: dict[Subset, Verdict] = {
            answer.experts: answer.verdict for answer in state.answers if answer.experts is not None
        }
        while True:
            found = next_subset(len(names), answers)
            if not isinstance(found, SubsetQuestion) or _can_be_merged(recipe, found.experts):
                break
            answers[found.experts] = "skip"
        status = replace(status, names=names)
        if isinstance(found, SubsetFound):
            groundless = not found.experts
            return replace(
                status,
                is_found=True,
                experts=found.experts,
                is_certain=found.is_certain,
                is_groundless=groundless,
            )
        return replace(status, experts=found.experts, left=found.left, steps=_steps(found.left) * 2)

    def _status_of_commits(self, state: _State, status: BisectStatus) -> BisectStatus:
        history = {i: commit.parents for i, commit in walk([state.bad], self._store.commit)}
        answers = [(a.commit, a.verdict) for a in state.answers if a.commit is not None]
        unknown = [commit for commit, _ in answers if commit not in history]
        if unknown:
            raise BadRecipe(
                f"{short(unknown[-1])} is no ancestor of {state.ref}, which is bad",
                hint=f"`mergegit log {state.ref}` shows its ancestors",
            )
        below: set[CommitId] = set()
        for commit in state.good:
            below |= {ancestor for ancestor, _ in walk([commit], self._store.commit)}
        good = [commit for commit in below if commit in history]
        found = next_commit(state.bad, good, answers, history)
        if found is None:
            raise BadRecipe(
                "a good commit descends from a bad one",
                hint="begin anew: `mergegit bisect reset`, then `mergegit bisect start`",
            )
        if isinstance(found, CommitsFound):
            certain = len(found.commits) == 1
            return replace(status, is_found=True, found=found.commits, is_certain=certain)
        assert isinstance(found, CommitQuestion)
        return replace(status, commit=found.commit, left=found.left, steps=_steps(found.left))

    def _check_merge(self, ref: str, commit_id: CommitId) -> None:
        commit = self._store.commit(commit_id)
        if commit.recipe is None or commit.plan is None:
            raise BadRecipe(
                f"{ref} is no merge", hint="`mergegit log` shows which commits are merges"
            )
        recipe = _recipe_of(commit)
        count = len(recipe.experts)
        if count < 2:
            raise BadRecipe(
                f"{ref} is a merge of {recipe.experts[0].ref} alone",
                hint="look among commits, without --experts",
            )
        try:
            recipe_without(recipe, [count - 1])
        except BadRecipe as error:
            raise BadRecipe(
                f"no expert of {ref} can be left out: {error.message}", hint=error.hint
            ) from error

    def _record(self, state: _State, answer: Answer | None) -> BisectStatus:
        """Keep an answer, unless it contradicts those before it."""
        if answer is not None:
            state = replace(state, answers=(*state.answers, answer))
        status = self._status(state)
        self._write(state)
        return status

    @property
    def _path(self) -> Path:
        return self._store.location.root / _STATE

    def _read(self) -> _State:
        try:
            text = self._path.read_text()
        except FileNotFoundError as error:
            raise NotStarted(
                "no bisection is under way", hint="begin one with `mergegit bisect start REF`"
            ) from error
        try:
            state = _State.from_json(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(
                f"{self._path} does not tell of a bisection",
                hint="forget it with `mergegit bisect reset`",
            ) from error
        commits = [state.bad, *state.good, *(a.commit for a in state.answers if a.commit)]
        for commit in commits:
            if not self._store.has_object(commit):
                raise UnknownRef(
                    f"commit {short(commit)} of the bisection is not in the repository any more",
                    hint="end it with `mergegit bisect reset`",
                )
        return state

    def _write(self, state: _State) -> None:
        location = self._store.location
        data = json.dumps(state.to_json(), indent=2).encode() + b"\n"
        with locked(location.lock_file):
            write_durably(self._path, data, location.temporary / _STATE)


def _silent(what: str, done: int, total: int) -> None:
    """The progress of who does not ask."""


def _recipe_of(merge: Commit) -> Recipe:
    assert merge.recipe is not None
    return Recipe.from_json(merge.recipe)


def _can_be_merged(recipe: Recipe, experts: Subset) -> bool:
    """Whether there is a merge of these experts alone: some methods need more of them."""
    if not experts:
        return True
    try:
        recipe_without(recipe, [k for k in range(len(recipe.experts)) if k not in experts])
    except BadRecipe:
        return False
    return True


def _steps(left: int) -> int:
    """About how many tests halve so many suspects down to one."""
    return math.ceil(math.log2(left)) if left > 1 else 0
