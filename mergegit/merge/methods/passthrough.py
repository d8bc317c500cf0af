"""Passthrough: a model's tensors as they are, for stacking layers of several models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mergegit.kernels.combine import Coefficients
from mergegit.merge.method import Merges, Method, Parameter, Parameters, TensorContext, weighted


def _copies(experts: Sequence[Parameters], _shared: Parameters) -> bool:
    return experts[0]["scale"] == 1.0


def _scaled(context: TensorContext) -> Coefficients:
    """scale * e, which is scale * b + scale * d."""
    (scale,) = context.numbers("scale")
    return weighted([scale], base_scale=scale)


PASSTHROUGH: Final = Method(
    "passthrough",
    "each tensor of the one model, as it is or scaled; the method of layer stacking",
    "no paper; known from SOLAR's depth up-scaling, arXiv 2312.15166",
    (Parameter("scale", 1.0, "factor on the tensor", per_expert=True),),
    _scaled,
    models=(1, 1),
    merges=Merges.MODELS,
    copies=_copies,
    additive=True,
)
