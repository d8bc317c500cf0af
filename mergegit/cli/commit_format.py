"""`log --format`: a line of a person's own for each commit."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import click

from mergegit.cli.commit_text import decoration
from mergegit.cli.text import error_number, human_bytes, local_time, printable
from mergegit.objects import Commit, CommitId
from mergegit.repository import Repository
from mergegit.repository.naming import short


@dataclass(frozen=True, slots=True)
class _View:
    """A commit with all that a placeholder may ask for."""

    repository: Repository
    commit_id: CommitId
    commit: Commit
    names: Sequence[str]

    @property
    def experts(self) -> list[str]:
        recipe = self.commit.recipe or {}
        return [str(expert["ref"]) for expert in recipe.get("experts", ())]

    def measured(self, name: str) -> int | float | None:
        """A number that a merge has noted of itself."""
        value = (self.commit.execution or {}).get(name)
        return value if isinstance(value, int | float) else None

    @property
    def error(self) -> str:
        plan = self.commit.plan
        return error_number(self.repository.store.plan(plan).predicted_error) if plan else ""


def _bytes(value: float | None) -> str:
    return "" if value is None else human_bytes(value)


def _plain(value: float | None) -> str:
    return "" if value is None else str(value)


PLACEHOLDERS: Final[Mapping[str, tuple[str, Callable[[_View], str]]]] = {
    "H": ("commit id", lambda v: v.commit_id.hex()),
    "h": ("commit id, abbreviated", lambda v: short(v.commit_id)),
    "P": ("parents' ids", lambda v: " ".join(parent.hex() for parent in v.commit.parents)),
    "p": ("parents' ids, abbreviated", lambda v: " ".join(map(short, v.commit.parents))),
    "T": ("manifest's id", lambda v: v.commit.manifest.hex()),
    "an": ("author", lambda v: printable(v.commit.author)),
    "ad": ("date", lambda v: local_time(v.commit.time)),
    "ai": ("date, ISO 8601", lambda v: datetime.fromtimestamp(v.commit.time).astimezone()
           .isoformat(" ", "seconds")),
    "at": ("date, seconds since 1970", lambda v: str(v.commit.time)),
    "s": ("first line of the message", lambda v: printable(v.commit.title)),
    "B": ("whole message", lambda v: "\n".join(map(printable, v.commit.message.splitlines()))),
    "d": ("branches and tags, in brackets", lambda v: click.unstyle(decoration(v.names))),
    "D": ("branches and tags", lambda v: ", ".join(v.names)),
    "m": ("method", lambda v: str((v.commit.recipe or {}).get("method", ""))),
    "e": ("experts", lambda v: printable(", ".join(v.experts))),
    "r": ("expert bytes read", lambda v: _bytes(v.measured("read_bytes"))),
    "R": ("the same as a number", lambda v: _plain(v.measured("read_bytes"))),
    "w": ("bytes written", lambda v: _bytes(v.measured("written_bytes"))),
    "W": ("the same as a number", lambda v: _plain(v.measured("written_bytes"))),
    "E": ("predicted error", lambda v: v.error),
    "S": ("seconds that it took", lambda v: _plain(v.measured("seconds"))),
    "n": ("new line", lambda _: "\n"),
    "%": ("%", lambda _: "%"),
}  # fmt: skip

_PLACEHOLDER: Final = re.compile(
    "%(" + "|".join(sorted(map(re.escape, PLACEHOLDERS), key=len, reverse=True)) + ")"
)


def check_format(_ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """A format of which every ``%`` begins a placeholder."""
    rest = _PLACEHOLDER.sub("", value or "")
    if "%" in rest:
        unknown = rest[rest.index("%") : rest.index("%") + 2]
        known = ", ".join(f"%{name}" for name in PLACEHOLDERS)
        raise click.BadParameter(f"{unknown!r} is no placeholder; there are {known}", param=param)
    return value


def formatted(
    text: str,
    repository: Repository,
    commit_id: CommitId,
    commit: Commit,
    names: Sequence[str],
) -> str:
    """A checked format, filled in for a commit; what a commit has not is left empty."""
    view = _View(repository, commit_id, commit, names)
    return _PLACEHOLDER.sub(lambda match: PLACEHOLDERS[match[1]][1](view), text)
