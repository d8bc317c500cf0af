"""What earlier merges made, found again by what went into it, so that nothing is merged twice."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mergegit.kernels.combine import Coefficients
from mergegit.merge.memory import WHOLE, block_key, tensor_key
from mergegit.merge.method import TensorContext
from mergegit.objects import ID_BYTES, BlockId, Tensor, TensorId
from mergegit.repository.adapters import Computed, reading_cost
from mergegit.storage.store import Store
from mergegit.storage.transaction import Transaction


@dataclass(slots=True)
class Spared:
    """Stored bytes that were planned and need not be read: of each expert's layers, and of bases.

    ``experts`` are lists of bytes by layer, one for each expert of the recipe.
    """

    experts: list[list[int]]
    bases: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def none(cls, experts: int) -> Spared:
        return cls([[] for _ in range(experts)])

    @property
    def total(self) -> int:
        """Bytes of experts."""
        return sum(map(sum, self.experts))

    def add(self, expert: int, layers: Sequence[int], bases: int) -> None:
        with self._lock:
            own = self.experts[expert]
            own.extend([0] * (len(layers) - len(own)))
            for layer, nbytes in enumerate(layers):
                own[layer] += nbytes
            self.bases += bases

    def add_base(self, nbytes: int) -> None:
        with self._lock:
            self.bases += nbytes


@dataclass(frozen=True, slots=True)
class Remembered:
    """The results of earlier merges, and what a merge is spared by them.

    ``transaction`` keeps what is merged now; without ``recalls`` nothing is spared.
    """

    store: Store
    computed: Computed
    spared: Spared
    transaction: Transaction | None = None
    recalls: bool = True

    def of_tensor(
        self,
        method: str,
        context: TensorContext,
        base: Tensor,
        experts: Sequence[Tensor | None],
        places: Sequence[int],
        layers: npt.NDArray[np.uint8],
        dtype: str,
        thresholds: npt.NDArray[np.float32],
        *,
        as_one: bool,
    ) -> TensorMemory:
        """The memory of one tensor.

        ``places`` are those of its experts in the recipe, ``thresholds`` what they are trimmed at
        where they are read. ``as_one`` where a rule looks beyond a block; so do adapters, whose
        factors are read for all blocks of a tensor or none.
        """
        made = any(e is not None and e.block_ids[:ID_BYTES] in self.computed for e in experts)
        return TensorMemory(
            self, method, context, base, experts, places, layers, dtype, thresholds, as_one or made
        )


class TensorMemory:
    """What is remembered of one tensor's results; safe to ask by several threads."""

    def __init__(
        self,
        remembered: Remembered,
        method: str,
        context: TensorContext,
        base: Tensor,
        experts: Sequence[Tensor | None],
        places: Sequence[int],
        layers: npt.NDArray[np.uint8],
        dtype: str,
        thresholds: npt.NDArray[np.float32],
        as_one: bool,
    ) -> None:
        self._remembered = remembered
        self._method = method
        self._context = context
        self._base = base
        self._experts = experts
        self._places = places
        self._layers = layers
        self._dtype = dtype
        self._thresholds = thresholds
        self._costs: list[dict[int, tuple[tuple[int, ...], int]]] = [{} for _ in experts]
        self.as_one = as_one
        self._whole = self._canonical()

    def recall_block(self, index: int, coefficients: Coefficients) -> BlockId | None:
        """A block that was merged of the same before, if it is still stored."""
        if self.as_one or not self._remembered.recalls:
            return None
        key = self._block_key(index, coefficients)
        found = self._find([key]).get(key)
        if found is None:
            return None
        self._spare(index)
        return BlockId(found)

    def keep_block(self, index: int, coefficients: Coefficients, block: BlockId) -> None:
        transaction = self._remembered.transaction
        if transaction is not None and not self.as_one:
            transaction.remember(self._block_key(index, coefficients), block)

    def recall_tensor(self) -> Tensor | None:
        """The tensor, if it was merged of the same before and is stored."""
        if not self.as_one or not self._remembered.recalls or not self._layers.any():
            return None
        store, key = self._remembered.store, self._tensor_key()
        found = store.catalog.results([key]).get(key)
        if found is None or not store.has_object(found):
            return None
        tensor = store.tensor(TensorId(found))
        if len(store.catalog.forms_of(set(tensor.blocks()))) < len(set(tensor.blocks())):
            return None
        for index in range(len(self._base)):
            self._spare(index)
        self._spare_factors()
        return tensor

    def keep_tensor(self, tensor: Tensor) -> None:
        transaction = self._remembered.transaction
        if transaction is not None and self.as_one and self._layers.any():
            transaction.remember(self._tensor_key(), transaction.write_tensor(tensor))

    def _find(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Blocks by their keys, of those that are stored."""
        catalog = self._remembered.store.catalog
        found = catalog.results(keys)
        stored = catalog.forms_of(found.values()) if found else {}
        return {key: block for key, block in found.items() if block in stored}

    def _block_key(self, index: int, coefficients: Coefficients) -> bytes:
        return block_key(
            coefficients, self._base, self._experts, index, self._whole[:, index], self._dtype
        )

    def _tensor_key(self) -> bytes:
        return tensor_key(
            self._method, self._context, self._base, self._experts, self._whole, self._dtype
        )

    def _canonical(self) -> npt.NDArray[np.uint8]:
        """The layers that are read, with ``WHOLE`` where these are all that a block has."""
        store, whole = self._remembered.store, self._layers.copy()
        for k, expert in enumerate(self._experts):
            read = np.flatnonzero(self._layers[k])
            if expert is None or not read.size:
                continue
            if expert.block(0) in self._remembered.computed:
                whole[k, read] = WHOLE
                continue
            forms = store.forms(expert.block(int(index)) for index in read)
            for index in map(int, read):
                stored, below = forms[expert.block(index)], self._base.block(index)
                costs = store.layer_costs(stored, below)
                self._costs[k][index] = costs, store.other_base_cost(stored, below)
                if len(costs) == self._layers[k, index]:
                    whole[k, index] = WHOLE
        return whole

    def _spare(self, index: int) -> None:
        """Count what reading a block of the base and of the experts would cost."""
        store, spared = self._remembered.store, self._remembered.spared
        seen = set()
        for k in map(int, np.flatnonzero(self._layers[:, index])):
            expert = self._experts[k]
            assert expert is not None
            key = (expert.block(index), expert.dtype, float(self._thresholds[k]))
            if key not in seen and index in self._costs[k]:
                seen.add(key)
                costs, bases = self._costs[k][index]
                spared.add(self._places[k], costs[: self._layers[k, index]], bases)
        below = self._base.block(index)
        spared.add_base(store.whole_cost(store.forms([below])[below]))

    def _spare_factors(self) -> None:
        """Count the factors that computing adapters' tensors would cost."""
        store, computed = self._remembered.store, self._remembered.computed
        seen = set()
        for k, expert in enumerate(self._experts):
            first = expert.block(0) if expert is not None and len(expert) else None
            if first is None or first not in computed or not self._layers[k].any():
                continue
            key = (first, float(self._thresholds[k]))
            if key in seen:
                continue
            seen.add(key)

            def stored_bytes(tensor: Tensor) -> list[int]:
                forms = store.forms(tensor.blocks())
                return [store.whole_cost(forms[block]) for block in tensor.blocks()]

            cost = reading_cost(computed[first].tensor, self._base, stored_bytes)
            self._remembered.spared.add(self._places[k], [cost.expert], sum(cost.below))
