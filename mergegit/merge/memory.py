"""What a merged block, or tensor, is made of, as one key: the same key, the same result.

A key is a hash of everything that the result depends on: the rule as it applies there, the base's
block, each expert's block and how many layers of it are read. Results that are remembered by such
keys need neither be computed nor read for again.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mergegit.encoding import canonical_json
from mergegit.kernels.combine import ALWAYS, Coefficients
from mergegit.merge.method import TensorContext
from mergegit.objects import BLOCK_ELEMENTS, Tensor

_VERSION: Final = 1
"""To be raised whenever a merge of the same things comes to have other bits."""

WHOLE: Final = 255
"""Stands for all layers of a block, in whatever form it is stored."""


def block_key(
    coefficients: Coefficients,
    base: Tensor,
    experts: Sequence[Tensor | None],
    index: int,
    layers: npt.NDArray[np.uint8],
    dtype: str,
) -> bytes:
    """The key of one merged block.

    ``layers`` are how many layers are read of each expert's block; ``WHOLE`` for all.
    """
    c = coefficients
    hasher = blake3(b"block")
    hasher.update(
        struct.pack(
            "<BBBff", _VERSION, c.elect, c.normalize, np.float32(c.base_scale), np.float32(c.factor)
        )
    )
    # Experts that are not read count by their weight alone, in the sum of the weights.
    hasher.update(c.weights.tobytes() if c.normalize and not c.elect else b"")
    hasher.update(f"{dtype} {base.dtype} ".encode() + base.block(index))
    drawn = False
    for k in map(int, np.flatnonzero(layers)):
        expert = experts[k]
        assert expert is not None
        ceiling = c.ceilings[k] if c.ceilings is not None else np.inf
        draws = int(c.keep[k]) < ALWAYS
        drawn = drawn or draws
        hasher.update(
            struct.pack(
                "<BffffQQ", layers[k], c.weights[k], c.scales[k], c.thresholds[k], ceiling,
                c.keep[k], c.keys[k] if draws else 0,
            )
        )  # fmt: skip
        hasher.update(f"{expert.dtype} ".encode() + expert.block(index))
    if drawn:
        hasher.update(struct.pack("<Q", index * BLOCK_ELEMENTS))
    return hasher.digest()


def tensor_key(
    method: str,
    context: TensorContext,
    base: Tensor,
    experts: Sequence[Tensor | None],
    layers: npt.NDArray[np.uint8],
    dtype: str,
) -> bytes:
    """The key of a merged tensor, for rules that look beyond a block.

    ``layers`` (experts, blocks) as in ``block_key``.
    """
    asked: dict[str, Any] = {
        "version": _VERSION,
        "method": method,
        "name": context.name,
        "depth": context.depth,
        "in_layers": context.in_layers,
        "shape": list(context.shape),
        "seed": context.seed,
        "parameters": dict(context.parameters),
        "experts": [
            {"parameters": dict(expert.parameters), "key": expert.key.hex()}
            for expert in context.experts
        ],
        "dtype": dtype,
        "dtypes": [base.dtype, *(expert.dtype if expert else None for expert in experts)],
    }
    hasher = blake3(b"tensor" + canonical_json(asked))
    hasher.update(base.block_ids)
    for expert in experts:
        hasher.update(expert.block_ids if expert is not None else b"")
    hasher.update(np.ascontiguousarray(layers).tobytes())
    return hasher.digest()
