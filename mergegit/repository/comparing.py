"""`diff`: which tensors differ between two models, and by how much.

What can be told by ids is told here: what is identical is known so, and never read. The numbers of
what differs come from statistics (``mergegit.repository.change_estimates``) or from the blocks
themselves (``mergegit.repository.change_reading``), and neither is loaded where nothing differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from mergegit.dtypes import DTYPES
from mergegit.objects import Tensor, TensorId
from mergegit.repository import figures
from mergegit.repository.figures import Figure
from mergegit.repository.file_changes import FileChange
from mergegit.repository.naming import ResolvedRef
from mergegit.repository.seen import Seen
from mergegit.repository.spots import Spot, is_asked_for, spots
from mergegit.storage.store import Store

Status = Literal["same", "changed", "added", "removed", "reshaped"]


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor in both models, of one shape; ``third`` is that of the model beside, if there."""

    name: str
    old: Tensor
    old_id: TensorId
    new: Tensor
    new_id: TensorId
    third: Tensor | None = None
    third_id: TensorId | None = None

    @property
    def has_numbers(self) -> bool:
        """Whether both are of types that can be subtracted."""
        return DTYPES[self.old.dtype].is_float and DTYPES[self.new.dtype].is_float


@dataclass(frozen=True, slots=True)
class Numbers:
    """What is known of a pair, with changes seen from the old tensor; None is not known.

    ``energy`` is the sum of squares of the change, ``base_energy`` that of the old tensor itself,
    ``third_energy`` that of the third model's change, and ``product`` the inner product of both
    changes. ``elements_changed`` counts elements.
    """

    energy: Figure | None = None
    base_energy: Figure | None = None
    third_energy: Figure | None = None
    product: Figure | None = None
    elements_changed: int | None = None


class NumberSource(Protocol):
    """Where numbers come from."""

    def numbers(self, pairs: Sequence[Pair]) -> Iterable[Numbers]:
        """The numbers of each pair, in order."""

    def base_energy(self, tensor: Tensor, tensor_id: TensorId) -> Figure | None:
        """The sum of squares of a tensor that is the same in both."""


@dataclass(frozen=True, slots=True)
class TensorChange:
    """What became of one tensor.

    ``old`` and ``new`` are None where it was added or removed. ``blocks_changed`` counts blocks
    that differ by their ids; of a reshaped tensor those of the new one that the old one has not in
    the same place. ``numbers`` are of tensors that both models have in one shape; ``is_beside``
    tells whether the third model has it, too.
    """

    name: str
    spot: Spot
    status: Status
    old: Tensor | None
    new: Tensor | None
    blocks_changed: int = 0
    numbers: Numbers = field(default_factory=Numbers)
    is_beside: bool = False

    @property
    def either(self) -> Tensor:
        tensor = self.new or self.old
        assert tensor is not None
        return tensor

    @property
    def is_common(self) -> bool:
        """Whether both models have it in one shape."""
        return self.status in ("same", "changed")

    @property
    def has_numbers(self) -> bool:
        """Whether it can be said how large its change is."""
        return (
            self.is_common
            and self.old is not None
            and DTYPES[self.old.dtype].is_float
            and DTYPES[self.either.dtype].is_float
        )

    @property
    def elements_changed(self) -> int | None:
        if self.status == "same":
            return 0
        return self.numbers.elements_changed if self.status == "changed" else self.either.elements

    @property
    def norm(self) -> Figure | None:
        """|B - A|."""
        return norm_of([self])

    @property
    def relative(self) -> Figure | None:
        """|B - A| / |A|."""
        return relative_of([self])

    @property
    def cosine(self) -> Figure | None:
        """The cosine of the change with the third model's."""
        return cosine_of([self])


def norm_of(changes: Iterable[TensorChange]) -> Figure | None:
    """The norm of what changed in several tensors together; None where one is not known."""
    energy = figures.total(change.numbers.energy for change in changes if change.has_numbers)
    return energy.root() if energy is not None else None


def relative_of(changes: Sequence[TensorChange]) -> Figure | None:
    """The norm of what changed beside that of the old tensors; None where one is not known, or
    where the old tensors were zero and are no more."""
    norm = norm_of(changes)
    base = figures.total(change.numbers.base_energy for change in changes if change.has_numbers)
    if norm is None or base is None:
        return None
    if base.value == 0.0 and norm.value == 0.0:
        return Figure(0.0)
    return norm.over(base.root())


def cosine_of(changes: Iterable[TensorChange]) -> Figure | None:
    """The cosine of what changed in several tensors together with what the third model changed.

    Tensors that the third model lacks, or has in another shape, are left out.
    """
    numbers = [change.numbers for change in changes if change.has_numbers and change.is_beside]
    return figures.cosine(
        figures.total(number.product for number in numbers),
        figures.total(number.energy for number in numbers),
        figures.total(number.third_energy for number in numbers),
    )


@dataclass(frozen=True, slots=True)
class DiffReport:
    """What differs between two commits, as `diff` found it.

    ``tensors`` are those of either, by name; ``files`` those around the weights that differ;
    ``shards`` the paths of the files of weights of each. ``read_bytes`` are the stored bytes of
    blocks that were read for exact numbers.
    """

    old: ResolvedRef
    new: ResolvedRef
    third: ResolvedRef | None
    exact: bool
    tensors: tuple[TensorChange, ...]
    files: tuple[FileChange, ...]
    shards: tuple[tuple[str, ...], tuple[str, ...]]
    read_bytes: int = 0
    notes: tuple[str, ...] = ()

    def with_status(self, *statuses: Status) -> list[TensorChange]:
        return [change for change in self.tensors if change.status in statuses]

    @property
    def is_same(self) -> bool:
        """Whether nothing differs of what was looked at."""
        return not self.files and all(change.status == "same" for change in self.tensors)


def compare_weights(
    store: Store,
    old: Seen,
    new: Seen,
    third: Seen | None,
    patterns: Sequence[str],
    source: Callable[[], NumberSource],
) -> tuple[TensorChange, ...]:
    """What became of every tensor whose name is asked for.

    ``source`` is called where something differs whose size can be told.
    """
    where = spots(old.ids.keys() | new.ids.keys())
    changes: list[TensorChange] = []
    pairs: dict[int, Pair] = {}
    for name in sorted(filter(lambda name: is_asked_for(name, patterns), where), key=_natural):
        change = _change(store, name, where[name], old, new)
        if change.is_common:
            assert change.old is not None
            assert change.new is not None
            beside = _third(store, name, change.old, third)
            pair = Pair(name, change.old, old.ids[name], change.new, new.ids[name], *beside)
            if pair.has_numbers or change.status == "changed":
                pairs[len(changes)] = pair
        changes.append(change)
    if any(change.status == "changed" for change in changes):
        _fill(changes, pairs, source())
    return tuple(changes)


def _fill(changes: list[TensorChange], pairs: dict[int, Pair], source: NumberSource) -> None:
    """Give every change its numbers."""
    asked = [
        place
        for place, pair in pairs.items()
        if pair.old_id != pair.new_id or pair.third_id not in (None, pair.old_id)
    ]
    told = dict(zip(asked, source.numbers([pairs[place] for place in asked]), strict=True))
    for place, pair in pairs.items():
        numbers = told.get(place)
        if numbers is None:
            none = figures.ZERO if pair.third_id is not None else None
            numbers = Numbers(
                figures.ZERO, source.base_energy(pair.old, pair.old_id), none, none, 0
            )
        changes[place] = replace(
            changes[place], numbers=numbers, is_beside=pair.third_id is not None
        )


def _change(store: Store, name: str, spot: Spot, old: Seen, new: Seen) -> TensorChange:
    before = old.tensor(store, name) if name in old.ids else None
    after = new.tensor(store, name) if name in new.ids else None
    if before is None or after is None:
        status: Status = "removed" if after is None else "added"
        return TensorChange(name, spot, status, before, after, len(after or before or ()))
    if old.ids[name] == new.ids[name]:
        return TensorChange(name, spot, "same", before, after)
    status = "changed" if before.shape == after.shape else "reshaped"
    return TensorChange(name, spot, status, before, after, _blocks_changed(before, after))


def _blocks_changed(old: Tensor, new: Tensor) -> int:
    if old.dtype != new.dtype:
        return len(new)
    differing = sum(one != other for one, other in zip(old.blocks(), new.blocks(), strict=False))
    return differing + max(len(new) - len(old), 0)


def _third(
    store: Store, name: str, old: Tensor, third: Seen | None
) -> tuple[Tensor, TensorId] | tuple[()]:
    if third is None or name not in third.ids:
        return ()
    tensor = third.tensor(store, name)
    if tensor.shape != old.shape or not DTYPES[tensor.dtype].is_float:
        return ()
    return tensor, third.ids[name]


def _natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Names in an order in which layer 10 comes after layer 9."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in name.split("."))
