"""How near a result is to one that was computed exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.merge.reference import ulps


def rounded_once(got: torch.Tensor, exact: torch.Tensor, of: Sequence[torch.Tensor]) -> bool:
    """Whether ``got`` is ``exact``, in float64, up to a few roundings of the largest element ``of``
    which it is made in float32, and one to its own dtype: at most one value from the nearest, and
    that seldom where the dtype is narrower."""
    largest = max(float(tensor.float().abs().max()) for tensor in of)
    slack = 8 * 2.0**-24 * largest
    apart = ulps(got, exact.to(got.dtype))
    apart = apart.masked_fill((got.double() - exact).abs() <= slack, 0)
    if int(apart.max()) > (1 if got.dtype.itemsize < 4 else 0):
        return False
    return got.dtype.itemsize == 4 or float((apart > 0).double().mean()) < 2e-3
