"""What to test next to find what breaks a test: among commits, or among the experts of a merge.

Pure functions of the answers so far. They answer with a question or with what was found, and the
same answers lead to the same question again: nothing else needs to be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from mergegit.objects import CommitId

Verdict = Literal["good", "bad", "skip"]
VERDICTS: Final[tuple[Verdict, ...]] = ("good", "bad", "skip")
Subset = tuple[int, ...]
"""Experts by their places, in order; with none of them a merge is its base."""

IsBad = Callable[[Sequence[int]], bool]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CommitQuestion:
    """The commit to test next; ``left`` may be the first bad one."""

    commit: CommitId
    left: int


@dataclass(frozen=True, slots=True)
class CommitsFound:
    """The first bad commit; several where those between could not be tested."""

    commits: tuple[CommitId, ...]


def next_commit(
    bad: CommitId,
    good: Sequence[CommitId],
    answers: Sequence[tuple[CommitId, Verdict]],
    history: Mapping[CommitId, Sequence[CommitId]],
) -> CommitQuestion | CommitsFound | None:
    """The commit whose test says most, or the first bad one; None where a good commit descends from
    a bad one.

    ``history`` are the ancestors of ``bad``, itself among them, children first, with their
    parents; all commits that are named are among them. Every commit of which a bad one is an
    ancestor is taken to be bad. Each question halves the commits that are left as well as the
    graph allows.
    """
    ancestors = _ancestors(history)
    order = {commit: place for place, commit in enumerate(history)}
    said = {verdict: [c for c, v in answers if v == verdict] for verdict in VERDICTS}
    sound = skipped = 0
    for commit in (*good, *said["good"]):
        sound |= ancestors[commit]
    if any(sound >> order[commit] & 1 for commit in (bad, *said["bad"])):
        return None
    left = ancestors[bad] & ~sound
    for commit in said["bad"]:
        if left >> order[commit] & 1:
            left, bad = left & ancestors[commit], commit
    for commit in said["skip"]:
        skipped |= 1 << order[commit]
    count = left.bit_count()
    open_to = left & ~skipped & ~(1 << order[bad])
    if not open_to:
        return CommitsFound(tuple(commit for commit in history if left >> order[commit] & 1))

    def halves(commit: CommitId) -> int:
        below = (ancestors[commit] & left).bit_count()
        return min(below, count - below)

    candidates = [commit for commit in history if open_to >> order[commit] & 1]
    return CommitQuestion(max(candidates, key=halves), count)


def _ancestors(history: Mapping[CommitId, Sequence[CommitId]]) -> dict[CommitId, int]:
    """For each commit the set of its ancestors, itself among them, as bits by place."""
    order = {commit: place for place, commit in enumerate(history)}
    found: dict[CommitId, int] = {}
    for commit in reversed(list(history)):
        bits = 1 << order[commit]
        for parent in history[commit]:
            bits |= found[parent]
        found[commit] = bits
    return found


@dataclass(frozen=True, slots=True)
class SubsetQuestion:
    """The experts whose merge to test next; ``left`` are those that are suspected still."""

    experts: Subset
    left: int


@dataclass(frozen=True, slots=True)
class SubsetFound:
    """Experts whose merge breaks the test, while that of fewer of them was not seen to.

    None of them where the base breaks it already; None where the whole merge does not break it.
    ``is_certain`` is false where merges of fewer could not be tested.
    """

    experts: Subset | None
    is_certain: bool


class _Asked(Exception):
    """A subset of which nothing is known yet."""

    def __init__(self, subset: Subset) -> None:
        super().__init__(subset)
        self.subset = subset


def next_subset(count: int, answers: Mapping[Subset, Verdict]) -> SubsetQuestion | SubsetFound:
    """The subset of ``count`` experts to test next, or what was found.

    The whole first, then the base alone, then by delta debugging (ddmin: Zeller and Hildebrandt,
    Simplifying and Isolating Failure-Inducing Input, IEEE TSE 2002): where one expert breaks the
    test it is found as by bisection, and where several do so together these are.
    """
    suspects = list(range(count))
    skipped = False

    def is_bad(subset: Sequence[int]) -> bool:
        nonlocal skipped
        verdict = answers.get(tuple(subset))
        if verdict is None:
            raise _Asked(tuple(subset))
        skipped |= verdict == "skip"
        return verdict == "bad"

    try:
        if not is_bad(suspects):
            return SubsetFound(None, not skipped)
        if is_bad([]):
            return SubsetFound((), True)
        parts = 2
        while len(suspects) > 1:
            smaller = _first_bad(suspects, parts, is_bad)
            if smaller is not None:
                suspects, parts = smaller
                skipped = False
            elif parts < len(suspects):
                parts = min(2 * parts, len(suspects))
            else:
                break
    except _Asked as asked:
        return SubsetQuestion(asked.subset, len(suspects))
    return SubsetFound(tuple(suspects), not skipped)


def _first_bad(suspects: list[int], parts: int, is_bad: IsBad) -> tuple[list[int], int] | None:
    """Fewer suspects that break the test as well, and into how many parts to cut them."""
    cut = list(_cut(suspects, parts))
    for part in cut:
        if is_bad(part):
            return part, 2
    if parts > 2:
        for part in cut:
            rest = [place for place in suspects if place not in part]
            if is_bad(rest):
                return rest, max(parts - 1, 2)
    return None


def _cut(items: Sequence[_T], parts: int) -> Iterator[list[_T]]:
    """``items`` in so many runs of about one length."""
    for part in range(parts):
        yield list(items[part * len(items) // parts : (part + 1) * len(items) // parts])
