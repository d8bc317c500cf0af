"""Where a tensor lies in its model, by its name alone: in which layer, or before or after them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

_NUMBER: Final = re.compile(r"(?:^|\.)(0|[1-9][0-9]{0,8})\.")
_INPUT: Final = re.compile(r"(?:^|[._])(?:embed(?!_out)|word_emb|wte|wpe|shared)")


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers one after another: ``prefix`` is what their tensors' names begin with."""

    prefix: str
    layers: int

    def layer_of(self, name: str) -> int | None:
        """The layer that a tensor belongs to, or None where it is not of this stack."""
        if not name.startswith(self.prefix):
            return None
        found = _NUMBER.match(name, max(len(self.prefix) - 1, 0))
        return int(found[1]) if found and int(found[1]) < self.layers else None

    def renamed(self, name: str, layer: int) -> str:
        """The name of the same tensor in another layer."""
        rest = name[len(self.prefix) :].partition(".")[2]
        return f"{self.prefix}{layer}.{rest}"


def stacks(names: Collection[str]) -> tuple[Stack, ...]:
    """The stacks of a model, the one with most tensors first.

    A tensor's layer is the first number in its name. Numbers that do not run from 0 without a gap
    are no stack, nor are those of a single tensor each, like a classifier's.
    """
    layers: dict[str, dict[int, int]] = {}
    for name in names:
        found = _NUMBER.search(name)
        if found:
            counts = layers.setdefault(name[: found.start(1)], {})
            layer = int(found[1])
            counts[layer] = counts.get(layer, 0) + 1
    found_stacks = [
        (sum(counts.values()), Stack(prefix, len(counts)))
        for prefix, counts in layers.items()
        if max(counts) == len(counts) - 1 and sum(counts.values()) > len(counts)
    ]
    return tuple(stack for _, stack in sorted(found_stacks, key=lambda f: (-f[0], f[1].prefix)))


def is_input(name: str) -> bool:
    """Whether a tensor outside the layers comes before them: an embedding."""
    return _INPUT.search(name) is not None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: ``position`` (0 to 1) among its slice's layers, which gradients go by;
    ``depth`` (0 to 1) in the whole model; and whether it belongs to a layer."""

    slice: int
    position: float
    depth: float
    in_layers: bool


def places(
    names: Collection[str], slice_lengths: tuple[int, ...] = (), stack: Stack | None = None
) -> Mapping[str, Place]:
    """The place of every tensor of a merged model.

    With ``slice_lengths`` the layers of ``stack`` are those of so many slices, one after another;
    what comes before the layers belongs to the first slice, what comes after to the last.
    """
    found = (stack,) if stack is not None else stacks(names)
    return {name: _place(name, found, slice_lengths) for name in names}


def _place(name: str, found: tuple[Stack, ...], slice_lengths: tuple[int, ...]) -> Place:
    for stack in found:
        layer = stack.layer_of(name)
        if layer is not None:
            depth = layer / max(stack.layers - 1, 1)
            at = 0
            for length in slice_lengths:
                if layer < length:
                    return Place(at, _fraction(layer, length), depth, True)
                layer, at = layer - length, at + 1
            return Place(0, _fraction(layer, stack.layers), depth, True)
    first = is_input(name)
    last = max(len(slice_lengths) - 1, 0)
    return Place(0 if first else last, 0.0, 0.0 if first else 1.0, False)


def _fraction(layer: int, layers: int) -> float:
    return layer / (layers - 1) if layers > 1 else 1.0
