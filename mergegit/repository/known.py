"""What is known of the change from one tensor to another without reading either.

Statistics tell of a tensor beside its base: the change's energy, exactly, and a sketch of it, which
is linear. So the change between any two tensors is known as far as steps from a tensor to its base
lead from one to the other, through a base of both or through bases of bases; the last base of all
is zero. A merge's own step is known from its recipe (``mergegit.repository.merge_record``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from mergegit.objects import TensorId
from mergegit.repository.figures import Figure
from mergegit.statistics import NO_BASE, SKETCH_BUCKETS, TensorStatistics
from mergegit.storage.store import Store

Doubles = npt.NDArray[np.float64]

_FARTHEST: Final = 6
"""Steps that are looked for from a tensor down to bases."""
_ROUNDS: Final = 24
"""Rounds of the fixed point in ``apart``; each takes off nine tenths of what is wrong."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a change of a tensor of so many ``elements``.

    ``energy`` is its sum of squares and ``sketch`` (256, float64) its sketch; ``nonzero`` (uint32)
    counts the elements of each block that it changes, None where they were not counted. The sketch
    may be of a part of it alone, of the energy ``sketched``, if nothing is known of the rest but
    its own energy: it is taken to be at a right angle to everything.
    """

    elements: int
    energy: Figure
    sketch: Doubles
    nonzero: npt.NDArray[np.uint32] | None = None
    sketched: float | None = None

    @property
    def sketched_energy(self) -> float:
        return self.energy.value if self.sketched is None else self.sketched

    @classmethod
    def nothing(cls, elements: int, blocks: int) -> Known:
        """No change at all."""
        none = np.zeros(blocks, np.uint32)
        return cls(elements, Figure(0.0), np.zeros(SKETCH_BUCKETS), none)

    @classmethod
    def measured(cls, elements: int, statistics: TensorStatistics) -> Known:
        energy = Figure(float(statistics.energy.sum()))
        return cls(elements, energy, statistics.sketch.astype(np.float64), statistics.nonzero)

    @property
    def changed(self) -> int | None:
        """How many elements are changed, if they were counted."""
        return None if self.nonzero is None else int(self.nonzero.sum())

    def reversed(self) -> Known:
        return replace(self, sketch=-self.sketch)


Step = Callable[[], Known | None]
"""What is known of the change from a base to a tensor, told when it is asked for."""


class Knowledge:
    """Finds what is known of the changes between tensors. Reads statistics, and no block.

    ``steps`` are changes that are known otherwise: by the tensor, its base and what is known.
    """

    def __init__(
        self, store: Store, steps: Mapping[TensorId, tuple[TensorId, Step]] | None = None
    ) -> None:
        self._store = store
        self._steps = steps or {}

    def change(self, old: TensorId, new: TensorId, elements: int, blocks: int) -> Known | None:
        """The change from one tensor to another of the same shape; None where it is not known."""
        if old == new:
            return Known.nothing(elements, blocks)
        straight = self._measured(new, old, elements)
        if straight is not None:
            return straight
        back = self._measured(old, new, elements)
        if back is not None:
            return back.reversed()
        path = self._path(old, new)
        if path is None:
            return None
        known = [self._step(tensor, base, elements) for tensor, base, _ in path]
        signed = [
            step if forward else step.reversed()
            for step, (_, _, forward) in zip(known, path, strict=True)
            if step is not None
        ]
        return added_up(signed) if len(signed) == len(path) else None

    def size(self, tensor: TensorId, elements: int, blocks: int) -> Known | None:
        """The tensor itself, as its change from zeros."""
        return self.change(TensorId(NO_BASE), tensor, elements, blocks)

    def _measured(self, tensor: TensorId, base: TensorId, elements: int) -> Known | None:
        data = self._store.read_statistics(tensor, base)
        return None if data is None else Known.measured(elements, TensorStatistics.from_bytes(data))

    def _step(self, tensor: TensorId, base: TensorId, elements: int) -> Known | None:
        measured = self._measured(tensor, base, elements)
        if measured is not None:
            return measured
        told = self._steps.get(tensor)
        return told[1]() if told is not None and told[0] == base else None

    def _path(self, old: TensorId, new: TensorId) -> list[tuple[TensorId, TensorId, bool]] | None:
        """Steps (tensor, base, whether up) from ``old`` to ``new`` by way of the nearest base."""
        downs, ups = self._bases(old), self._bases(new)
        shared = downs.keys() & ups.keys()
        if not shared:
            return None
        meeting = min(shared, key=lambda base: (len(downs[base]) + len(ups[base]), base))
        down = [(tensor, base, False) for tensor, base in pairwise(downs[meeting])]
        up = [(tensor, base, True) for tensor, base in pairwise(ups[meeting])]
        return down + up

    def _bases(self, tensor: TensorId) -> dict[TensorId, tuple[TensorId, ...]]:
        """The way, of known steps, from a tensor to each of its bases and their bases."""
        ways: dict[TensorId, tuple[TensorId, ...]] = {tensor: (tensor,)}
        found = [tensor]
        for _ in range(_FARTHEST):
            further: list[TensorId] = []
            for here in found:
                for base in self._bases_of(here):
                    if base not in ways:
                        ways[base] = (*ways[here], base)
                        further.append(base)
            found = further
        return ways

    def _bases_of(self, tensor: TensorId) -> list[TensorId]:
        bases = [TensorId(base) for base in self._store.catalog.measured_against(tensor)]
        told = self._steps.get(tensor)
        if told is not None and told[0] not in bases and told[1]() is not None:
            bases.append(told[0])
        return bases


def added_up(changes: Sequence[Known]) -> Known:
    """What is known of the sum of changes, one after another.

    The energy of a sum is known from energies and cosines, or from the sum of the sketches alone;
    the one that errs less is taken.
    """
    if len(changes) == 1:
        return changes[0]
    elements = changes[0].elements
    sketch = np.sum([change.sketch for change in changes], axis=0)
    plain = float(sketch @ sketch)
    sketched = Figure(plain, plain * _spread(elements) * math.sqrt(2.0))
    pairwise_energy = _energy_of_sum(changes)
    assert sketched.error is not None
    if pairwise_energy.error is None or pairwise_energy.error <= sketched.error:
        sketched = pairwise_energy
    rest = sum(change.energy.value - change.sketched_energy for change in changes)
    energy = Figure(max(sketched.value + rest, 0.0), sketched.error)
    return Known(elements, energy, sketch, sketched=sketched.value)


def _energy_of_sum(changes: Sequence[Known]) -> Figure:
    """|sum d_i|^2 = (sum over i of |d_i|^2) + 2 (sum over i < j of |d_i| |d_j| (v_ij - 1)), where
    v_ij = 1 + cosine says how far d_i is from cancelling d_j; of what was sketched."""
    count = len(changes)
    energies = np.array([change.sketched_energy for change in changes])
    sketches = np.stack([change.sketch for change in changes])
    both_ways = np.concatenate([sketches, -sketches])
    far, errors = apart(both_ways, np.tile(energies, 2), changes[0].elements)
    products = np.sqrt(np.outer(energies, energies))[np.triu_indices(count, 1)]
    v, errors = (matrix[:count, count:][np.triu_indices(count, 1)] for matrix in (far, errors))
    value = float(energies.sum() + 2 * (products * (v - 1.0)).sum())
    variance = float(((2 * products * errors) ** 2).sum())
    variance += sum((change.energy.error or 0.0) ** 2 for change in changes)
    exact = not variance and all(change.energy.error is None for change in changes)
    return Figure(max(value, 0.0), None if exact else math.sqrt(variance))


def product(one: Known, other: Known) -> Figure:
    """The inner product of two changes of one tensor."""
    energies = np.array([one.sketched_energy, other.sketched_energy])
    u, errors = apart(np.stack([one.sketch, other.sketch]), energies, one.elements)
    lengths = math.sqrt(max(energies[0], 0.0)) * math.sqrt(max(energies[1], 0.0))
    error = float(errors[0, 1]) * lengths
    exact = not error and one.energy.error is None and other.energy.error is None
    return Figure((1.0 - float(u[0, 1])) * lengths, None if exact else error)


def apart(sketches: Doubles, energies: Doubles, elements: int) -> tuple[Doubles, Doubles]:
    """1 - cosine of every two of K changes of a tensor, and its standard error, (K, K) each.

    ``sketches`` (K, 256) and ``energies`` (K). That the lengths of the changes are known says much
    about the errors of their sketches. The estimate is the likeliest cosine given both, as in Li,
    Hastie and Church, Improving Random Projections Using Marginal Information (COLT 2006). With
    sketches x and y of changes of length one, that is a root of

        c^3 - c^2 (x y) + c (|x|^2 + |y|^2 - 1) - (x y) = 0,

    and its standard error is (1 - c^2) / sqrt(256 (1 + c^2)). With u = 1 - c and
    T = |x|^2 + |y|^2 - 2 the same equation is

        u = |x - y|^2 / 2 - T u^2 / (2 (1 + (1 - u)^2)),

    which loses no digits where two changes are nearly the same, and is solved by going round. A
    change of nothing is at a right angle to all.
    """
    lengths = np.sqrt(np.maximum(energies, 0.0))
    present = lengths > 0
    unit = sketches / np.where(present, lengths, 1.0)[:, None]
    squares = np.einsum("ki,ki->k", unit, unit)
    half = ((unit[:, None] - unit[None, :]) ** 2).sum(axis=2) / 2
    excess = squares[:, None] + squares[None, :] - 2.0
    u = np.clip(half, 0.0, 2.0)
    for _ in range(_ROUNDS):
        u = np.clip(half - excess * u * u / (2.0 * (1.0 + (1.0 - u) ** 2)), 0.0, 2.0)
    both = present[:, None] & present[None, :]
    u = np.where(both, u, 1.0)
    squared_cosines = (1.0 - u) ** 2
    errors = (1.0 - squared_cosines) / np.sqrt(1.0 + squared_cosines) * _spread(elements)
    return u, np.where(both, errors, 0.0)


def _spread(elements: int) -> float:
    """1 / sqrt(256), or nothing where every element of a tensor has a bucket of its own."""
    return 1.0 / math.sqrt(SKETCH_BUCKETS) if elements > SKETCH_BUCKETS else 0.0
