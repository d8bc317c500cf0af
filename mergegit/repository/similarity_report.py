"""What `similarity` reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mergegit.repository.figures import Figure
from mergegit.repository.naming import ResolvedRef


@dataclass(frozen=True, slots=True)
class Overlap:
    """Elements that both of two experts changed, as a share of all; ``low`` and ``high`` are what
    it can be at least and at most."""

    share: float
    low: float
    high: float

    @property
    def is_exact(self) -> bool:
        return self.low == self.high


Matrix = tuple[tuple[Figure | None, ...], ...]


@dataclass(frozen=True, slots=True)
class SimilarityReport:
    """How alike K experts' changes of ``base`` are, over the ``tensors`` that all of them have.

    ``norms`` (K) are the lengths of the changes beside that of the base. ``cosines`` (K, K) are
    None where an expert changed nothing, or where statistics tell nothing of it. ``agreements``
    (K, K) are shares of the elements that both changed, and that both moved to the same side.
    ``overlaps`` (K, K) say how many those are; on the diagonal, how many an expert changed.
    ``left_out`` gives tensors the reason why they were not looked at.
    """

    base: ResolvedRef
    experts: tuple[ResolvedRef, ...]
    exact: bool
    tensors: int
    elements: int
    norms: tuple[Figure | None, ...]
    cosines: Matrix
    agreements: Matrix
    overlaps: tuple[tuple[Overlap | None, ...], ...]
    left_out: Mapping[str, str]
    read_bytes: int = 0
