"""The values of blocks, and their differences, for what is asked about weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from mergegit.kernels.floats import Floats, to_float32
from mergegit.objects import BlockId, Tensor
from mergegit.repository.adapters import ComputedBlock, LowRankReader
from mergegit.storage.reader import ByteCount
from mergegit.storage.store import Store

_ALL: Final = 255
"""More layers than any block has."""


class BlockValues:
    """Reads blocks of several tensors of one shape, and tells how each differs from the first.

    Bytes that are read are counted in ``read``. Safe to share by threads.
    """

    def __init__(self, store: Store, computed: Mapping[BlockId, ComputedBlock]) -> None:
        self.read = ByteCount()
        self._store = store
        self._computed = computed
        self._low_rank = LowRankReader(store, computed, self.read, self.read)

    def changes(self, tensors: Sequence[Tensor], index: int) -> tuple[Floats, Floats]:
        """Block ``index`` of the first tensor (n), and the others' differences from it (K, n), in
        float32.

        What is not finite counts as zero, as it does in statistics. A block that is the first's
        own is not read, and one that several share is read once.
        """
        first = tensors[0]
        below, dtype = self._reference(tensors, index)
        data = self._store.read_block(below, self.read)
        reference = to_float32(data, dtype)
        deltas: dict[tuple[BlockId, str], Floats] = {
            (below, dtype): np.zeros(reference.size, np.float32)
        }
        with np.errstate(over="ignore", invalid="ignore"):
            for tensor in tensors:
                block = tensor.block(index)
                if (block, tensor.dtype) not in deltas:
                    delta = self._delta(block, tensor.dtype, below, data, dtype, reference)
                    deltas[block, tensor.dtype] = delta
            own = deltas[first.block(index), first.dtype]
            changes = [deltas[tensor.block(index), tensor.dtype] - own for tensor in tensors[1:]]
            values = reference + own
        return _finite(values), _finite(np.stack(changes))

    def forget(self, name: str) -> None:
        """Let go of what is held of the tensors of this name, which are done."""
        self._low_rank.forget(name)

    def _reference(self, tensors: Sequence[Tensor], index: int) -> tuple[BlockId, str]:
        """The block from which the others are seen: what an adapter changes, else the first's."""
        for tensor in tensors:
            made = self._computed.get(tensor.block(index))
            if made is not None:
                return made.tensor.below.block(index), made.tensor.below.dtype
        return tensors[0].block(index), tensors[0].dtype

    def _delta(
        self,
        block: BlockId,
        dtype: str,
        below: BlockId,
        below_data: bytes,
        below_dtype: str,
        reference: Floats,
    ) -> Floats:
        if block in self._computed:
            return self._low_rank.delta(block, below, below_data, below_dtype)
        data = self.bytes_beside(block, below, below_data)
        return to_float32(data, dtype) - reference

    def bytes_beside(self, block: BlockId, below: BlockId, below_data: bytes) -> bytes:
        """A stored block's bytes; where it is a delta from ``below``, that is not read again."""
        data, is_delta = self._store.read_layers(
            block, _ALL, below, below_data, 0.0, self.read, self.read
        )
        assert not is_delta, "all layers are read"
        return bytes(data)


def _finite(values: Floats) -> Floats:
    values[~np.isfinite(values)] = 0.0
    return values
