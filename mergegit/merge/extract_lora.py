"""The low-rank matrix nearest to a delta, as the two factors of an adapter."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mergegit.errors import NotFinite

if TYPE_CHECKING:
    import torch

Floats = npt.NDArray[np.float32]

EXACT_SIDE: Final = 512
"""Up to this length of the shorter side the decomposition is exact; it takes the cube of it."""

_POWER_STEPS: Final = 4
_OVERSAMPLING: Final = 32
_ROWS: Final = 1024
_SEED: Final = 0x6D67


class Factors(NamedTuple):
    """``b``, (m, r), and ``a``, (r, n), float32; ``error`` is |delta - b a| / |delta|."""

    b: Floats
    a: Floats
    error: float


def factor(delta: Floats, rank: int, *, name: str = "a matrix") -> Factors:
    """Factors whose product is the best approximation of ``delta`` with at most ``rank``.

    ``delta`` is (m, n), float32; r is the least of ``rank``, m and n. With delta = U S V^T the
    factors are U_r S_r^1/2 and S_r^1/2 V_r^T (Eckart and Young, 1936). Matrices whose shorter side
    has more than ``EXACT_SIDE`` entries are decomposed within a random subspace that is drawn
    towards the largest singular vectors by power iterations (Halko, Martinsson and Tropp, 2011,
    arXiv 0909.4061, algorithms 4.4 and 5.1). Its seed is fixed: one machine with one number of
    threads makes the same factors every time.

    ``error`` is in the Frobenius norm, of the factors as they are returned, and 0 for a delta of
    zeros. Raises ``NotFinite``, with ``name``, where ``delta`` holds NaN or infinity, and
    ``ValueError`` where there is no rank to have.
    """
    import torch

    if delta.ndim != 2 or rank < 1 or delta.size == 0:
        raise ValueError(f"no factors of rank {rank} can be had of {delta.shape}")
    if not np.isfinite(delta).all():
        raise NotFinite(
            f"the change of {name} holds NaN or infinity", hint="leave this model out, or mend it"
        )
    rank = min(rank, *delta.shape)
    largest = float(np.abs(delta).max())
    if largest == 0:
        m, n = delta.shape
        return Factors(np.zeros((m, rank), np.float32), np.zeros((rank, n), np.float32), 0.0)
    # Squares of what is very small or very large would vanish or overflow. Powers of four have
    # roots, and change nothing but exponents.
    power = math.frexp(largest)[1] // 2 * 2
    matrix = torch.from_numpy(np.ldexp(delta, -power))
    exact = min(delta.shape) <= max(EXACT_SIDE, 2 * (rank + _OVERSAMPLING))
    u, s, vh = _decompose(matrix) if exact else _decompose_near(matrix, rank + _OVERSAMPLING)
    root = s[:rank].sqrt()
    b, a = u[:, :rank] * root, root[:, None] * vh[:rank]
    error = _relative_error(matrix, b, a)
    return Factors(np.ldexp(b.numpy(), power // 2), np.ldexp(a.numpy(), power // 2), error)


def _decompose(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    import torch

    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u, s, vh


def _decompose_near(
    matrix: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The decomposition of ``matrix`` within a subspace of ``width`` dimensions."""
    import torch

    generator = torch.Generator().manual_seed(_SEED)
    start = torch.randn(matrix.shape[1], width, generator=generator)
    q = torch.linalg.qr(matrix @ start).Q
    for _ in range(_POWER_STEPS):
        q = torch.linalg.qr(matrix.T @ q).Q
        q = torch.linalg.qr(matrix @ q).Q
    u, s, vh = _decompose(q.T @ matrix)
    return q @ u, s, vh


def _relative_error(matrix: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> float:
    missed, whole = _energies(matrix, b, a)
    return float((missed / whole) ** 0.5)


def energies(delta: Floats, b: Floats, a: Floats) -> tuple[float, float]:
    """|delta - b a|^2 and |delta|^2 in the Frobenius norm, in float64."""
    import torch

    return _energies(*map(torch.from_numpy, (delta, b, a)))


def _energies(matrix: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> tuple[float, float]:
    """A run of rows at a time."""
    wide = a.double()
    missed = whole = 0.0
    for start in range(0, len(matrix), _ROWS):
        rows = matrix[start : start + _ROWS].double()
        missed += float((rows - b[start : start + _ROWS].double() @ wide).square().sum())
        whole += float(rows.square().sum())
    return missed, whole
