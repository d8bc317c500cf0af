"""DARE: drop deltas at random and rescale the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from blake3 import blake3

from mergegit.kernels.combine import ALWAYS, Coefficients
from mergegit.merge.method import (
    DEPTH_SCALED,
    WEIGHT,
    Method,
    Parameter,
    TensorContext,
    floats,
    normalize,
    plain,
)

_KEEP: Final = Parameter(
    "density", 1.0, "probability of keeping an element",
    per_expert=True, low=0.0, high=1.0, open_low=True,
)  # fmt: skip
_RESCALE: Final = Parameter("rescale", True, "divide what is kept by its density")


def stream_key(seed: int, expert: bytes, tensor: str) -> int:
    """The key of an expert's random stream for one tensor, 64 bits.

    It depends on the recipe's seed, the expert's contents and the tensor's name alone, so that an
    element's fate is the same whatever else is merged, read or run beside it.
    """
    text = b"%d\n%s\n%s" % (seed, expert, tensor.encode())
    return int.from_bytes(blake3(text).digest(8), "little")


def _dare(context: TensorContext, *, elect: bool) -> Coefficients:
    densities = context.numbers("density")
    scales = [1.0 / p if context.parameters["rescale"] else 1.0 for p in densities]
    return replace(
        plain(context),
        scales=floats(scales),
        keep=np.array([round(p * ALWAYS) for p in densities], np.uint64),
        keys=np.array(
            [stream_key(context.seed, expert.key, context.name) for expert in context.experts],
            np.uint64,
        ),
        elect=elect,
    )


def _dare_linear(context: TensorContext) -> Coefficients:
    return _dare(context, elect=False)


def _dare_ties(context: TensorContext) -> Coefficients:
    return _dare(context, elect=True)


DARE_LINEAR: Final = Method(
    "dare_linear",
    "drop deltas at random, rescale the rest, add them up",
    "DARE, arXiv 2311.03099",
    (WEIGHT, _KEEP, normalize(False), *DEPTH_SCALED, _RESCALE),
    _dare_linear,
    additive=True,
)

DARE_TIES: Final = Method(
    "dare_ties",
    "drop deltas at random, rescale the rest, elect a sign per element",
    "DARE, arXiv 2311.03099, with the election of TIES",
    (WEIGHT, _KEEP, normalize(False), *DEPTH_SCALED, _RESCALE),
    _dare_ties,
    flips=0.3,
)
