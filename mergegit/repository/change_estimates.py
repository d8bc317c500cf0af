"""Numbers of what differs between two models, from statistics: exact where those tell, else
estimated. No block is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mergegit.objects import Tensor, TensorId
from mergegit.repository.comparing import Numbers, Pair
from mergegit.repository.figures import ZERO, Figure
from mergegit.repository.known import Knowledge, Known, product


class Estimates:
    """Numbers from what is known."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge

    def numbers(self, pairs: Sequence[Pair]) -> Iterator[Numbers]:
        return map(self._numbers, pairs)

    def base_energy(self, tensor: Tensor, tensor_id: TensorId) -> Figure | None:
        known = self._knowledge.size(tensor_id, tensor.elements, len(tensor))
        return None if known is None else known.energy

    def third_energy(self, pair: Pair) -> Figure | None:
        third = self._change(pair, pair.third_id) if pair.third_id is not None else None
        return None if third is None else third.energy

    def _numbers(self, pair: Pair) -> Numbers:
        if not pair.has_numbers:
            return Numbers()
        change = self._change(pair, pair.new_id)
        third = self._change(pair, pair.third_id) if pair.third_id is not None else None
        return Numbers(
            energy=change.energy if change is not None else None,
            base_energy=self.base_energy(pair.old, pair.old_id),
            third_energy=third.energy if third is not None else None,
            product=_product(change, third),
            elements_changed=change.changed if change is not None else None,
        )

    def _change(self, pair: Pair, new: TensorId) -> Known | None:
        return self._knowledge.change(pair.old_id, new, pair.old.elements, len(pair.old))


def _product(one: Known | None, other: Known | None) -> Figure | None:
    if one is None or other is None:
        return None
    if not one.energy.value or not other.energy.value:
        return ZERO
    return product(one, other)
