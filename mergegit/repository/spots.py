"""Tensors by what they are called: those that a person asks for, and where each of them lies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from mergegit.errors import UnknownRef
from mergegit.merge.layers import Stack, stacks

ANY: Final = "*"


class UnknownTensor(UnknownRef):
    """No tensor answers to the name."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a tensor lies.

    ``kind`` is its name with ``*`` for the number of its layer, and of anything below that is
    numbered, like the experts of a mixture; all tensors of a kind do the same work. ``layer`` is
    the number of its layer in the stack whose names begin with ``stack``, None outside of any.
    """

    kind: str
    layer: int | None = None
    stack: str | None = None

    @property
    def short_kind(self) -> str:
        """The kind without what is the same for all of its stack, and without ``.weight``."""
        inside = self.kind if self.stack is None else self.kind[len(self.stack) + 2 :]
        return inside.removesuffix(".weight")


def spots(names: Collection[str]) -> Mapping[str, Spot]:
    """The spot of every tensor of a model, by the names of all of them."""
    found = stacks(names)
    return {name: _spot(name, found) for name in names}


def _spot(name: str, found: Sequence[Stack]) -> Spot:
    for stack in found:
        layer = stack.layer_of(name)
        if layer is not None:
            rest = name[len(stack.prefix) :].split(".")[1:]
            return Spot(f"{stack.prefix}{ANY}.{_unnumbered(rest)}", layer, stack.prefix)
    return Spot(_unnumbered(name.split(".")))


def _unnumbered(parts: Sequence[str]) -> str:
    return ".".join(ANY if part.isdigit() else part for part in parts)


def is_asked_for(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name holds one of the patterns or, where that has ``*`` or ``?``, is like it.

    Without patterns every name is asked for.
    """
    return not patterns or any(_matches(name, pattern) for pattern in patterns)


def _matches(name: str, pattern: str) -> bool:
    if "*" in pattern or "?" in pattern:
        return fnmatchcase(name, pattern)
    return pattern in name


def require_some(patterns: Sequence[str], names: Collection[str], what: str) -> None:
    """Raises ``UnknownTensor`` for a pattern to which nothing answers."""
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in names):
            raise UnknownTensor(
                f"no {what} is called like {pattern!r}",
                hint="give a part of a name, or a pattern of the whole name like '*.mlp.*'; "
                "`mergegit show` lists the names of a commit's manifest",
            )
