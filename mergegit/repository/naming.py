"""From what a person types to a commit or another object."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final

from mergegit.errors import AmbiguousRef, InvalidName, UnknownRef
from mergegit.objects import ID_BYTES, Commit, CommitId
from mergegit.storage.refs import SPACES, Space, check_name
from mergegit.storage.store import Store

MIN_PREFIX: Final = 4
SHORT_ID: Final = 10
_SUFFIX: Final = re.compile(r"([~^])(\d{0,9})")
_MOVES_AGO: Final = re.compile(r"([^@]+)@\{(\d{1,9})\}")
_HEX: Final = re.compile(r"[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class ResolvedRef:
    """A commit and how the person named it."""

    name: str
    commit: CommitId


def resolve(store: Store, text: str) -> ResolvedRef:
    """The commit that ``text`` names: a branch, a tag, a commit id or a prefix of one, or where a
    branch stood N moves ago as ``NAME@{N}``, with Git's ``~N`` and ``^N`` suffixes.

    Raises ``UnknownRef`` and ``AmbiguousRef``.
    """
    at = min((text.find(mark) for mark in "~^" if mark in text), default=len(text))
    name, suffixes = text[:at], text[at:]
    if not name or _SUFFIX.sub("", suffixes):
        raise UnknownRef(
            f"{text!r} is not a ref", hint="name a branch, a tag or a commit, like base or base~1"
        )
    moves_ago = _MOVES_AGO.fullmatch(name)
    commit = _stood(store, moves_ago[1], int(moves_ago[2])) if moves_ago else _named(store, name)
    for mark, digits in _SUFFIX.findall(suffixes):
        commit = _step(store, commit, mark, int(digits) if digits else 1, text)
    return ResolvedRef(text, commit)


def resolve_object(store: Store, text: str) -> bytes:
    """The id of the object that ``text`` names: any ref, or any object's id or prefix.

    Raises ``UnknownRef`` and ``AmbiguousRef``.
    """
    try:
        return resolve(store, text).commit
    except UnknownRef:
        found = _with_prefix(store, text) if _is_prefix(text) else []
        if not found:
            raise
    if len(found) > 1:
        raise _ambiguous(text, "objects", found)
    return found[0]


def _named(store: Store, name: str) -> CommitId:
    for space in SPACES:
        commit = _read_ref(store, space, name)
        if commit is not None:
            return commit
    if _is_prefix(name):
        found = [
            CommitId(object_id)
            for object_id in _with_prefix(store, name)
            if isinstance(store.object(object_id), Commit)
        ]
        if len(found) > 1:
            raise _ambiguous(name, "commits", found)
        if found:
            return found[0]
    names = sorted({*store.refs.all("heads"), *store.refs.all("tags")})
    raise UnknownRef(f"there is no branch, tag or commit {name!r}", hint=_suggestion(name, names))


def _stood(store: Store, name: str, moves: int) -> CommitId:
    """Where a branch or tag stood so many moves ago; it may have been deleted since."""
    for space in SPACES:
        log = store.refs.moves(space, name) if _may_be_called(name, space) else []
        if log:
            break
    else:
        names = sorted({name for space in SPACES for name in store.refs.logged(space)})
        raise UnknownRef(
            f"there is no log of a branch or tag {name!r}", hint=_suggestion(name, names)
        )
    if moves > len(log):
        many = "1 move" if len(log) == 1 else f"{len(log)} moves"
        raise UnknownRef(
            f"{name}@{{{moves}}} goes beyond the log of {name}, which has {many}",
            hint=f"`mergegit reflog {name}` shows them",
        )
    commit = log[moves - 1].old if moves else log[0].new
    if commit is None:
        raise UnknownRef(
            f"{name}@{{{moves}}} is no commit: {name} was not there then, or that is forgotten",
            hint=f"`mergegit reflog {name}` shows where it stood",
        )
    return commit


def _ambiguous(text: str, kind: str, found: Sequence[bytes]) -> AmbiguousRef:
    listed = ", ".join(object_id.hex()[: len(text) + 4] for object_id in found[:4])
    return AmbiguousRef(
        f"{text!r} is the beginning of {len(found)} {kind}: {listed}", hint="give more characters"
    )


def _suggestion(name: str, names: Sequence[str]) -> str:
    if not names:
        return "the repository is empty; begin with `mergegit add CHECKPOINT`"
    close = difflib.get_close_matches(name, names, n=3)
    if close:
        return f"did you mean {' or '.join(sorted(close))}?"
    return f"there are {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"


def _read_ref(store: Store, space: Space, name: str) -> CommitId | None:
    return store.refs.read(space, name) if _may_be_called(name, space) else None


def _may_be_called(name: str, space: Space) -> bool:
    try:
        check_name(name, space)
    except InvalidName:
        return False
    return True


def _step(store: Store, commit: CommitId, mark: str, count: int, text: str) -> CommitId:
    """``~N``: the N-th first parent; ``^N``: the N-th parent."""
    steps = repeat(0, count) if mark == "~" else ([count - 1] if count else [])
    for parent in steps:
        parents = store.commit(commit).parents
        if parent >= len(parents):
            has = f"{len(parents)} parents" if len(parents) != 1 else "1 parent"
            raise UnknownRef(
                f"{text!r} goes beyond the history: commit {short(commit)} has {has}",
                hint="`mergegit log --graph` shows the history",
            )
        commit = parents[parent]
    return commit


def _is_prefix(text: str) -> bool:
    return bool(_HEX.fullmatch(text)) and MIN_PREFIX <= len(text) <= 2 * ID_BYTES


def _with_prefix(store: Store, text: str) -> list[bytes]:
    low = bytes.fromhex(text.ljust(2 * ID_BYTES, "0"))
    high = bytes.fromhex(text.ljust(2 * ID_BYTES, "f"))
    return store.catalog.objects_with_prefix(low, high)


def short(object_id: bytes) -> str:
    """An id as people are shown it."""
    return object_id.hex()[:SHORT_ID]
