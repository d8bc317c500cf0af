"""How alike experts' changes of their base are: cosines, signs that agree, elements in common.

From statistics all of it is estimated. The cosines are those of sketches. Signs are taken to agree
as often as those of normal variables with that cosine do, 1 - arccos(c) / pi (Sheppard 1899), and
elements of a block to be chosen by experts independently of one another.
``mergegit.repository.similarity_reading`` reads the blocks, and is exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mergegit.dtypes import DTYPES
from mergegit.objects import Tensor, TensorId, block_elements
from mergegit.repository.figures import Figure
from mergegit.repository.known import Doubles, Knowledge, Known, apart
from mergegit.repository.naming import ResolvedRef
from mergegit.repository.seen import Seen
from mergegit.repository.similarity_report import Overlap, SimilarityReport
from mergegit.repository.spots import is_asked_for
from mergegit.storage.store import Store


@dataclass(frozen=True, slots=True)
class Compared:
    """One tensor of the base, and the experts' tensors in its place."""

    name: str
    base: Tensor
    base_id: TensorId
    tensors: tuple[Tensor, ...]
    ids: tuple[TensorId, ...]

    def differs(self, expert: int, index: int) -> bool:
        """Whether an expert's block is not the base's own."""
        own = self.tensors[expert]
        return own.dtype != self.base.dtype or own.block(index) != self.base.block(index)


def comparable(
    store: Store, base: Seen, experts: Sequence[Seen], patterns: Sequence[str]
) -> tuple[list[Compared], dict[str, str]]:
    """The tensors that all have in one shape, in a type that can be subtracted; and of the others
    that are asked for why they are left out."""
    found: list[Compared] = []
    left_out: dict[str, str] = {}
    for name in sorted(base.ids):
        if not is_asked_for(name, patterns):
            continue
        tensor = base.tensor(store, name)
        lacking = [expert.ref for expert in experts if name not in expert.ids]
        if lacking:
            left_out[name] = f"{', '.join(lacking)} lack it"
            continue
        theirs = tuple(expert.tensor(store, name) for expert in experts)
        odd = [e.ref for e, t in zip(experts, theirs, strict=True) if t.shape != tensor.shape]
        if odd:
            left_out[name] = f"it has another shape in {', '.join(odd)}"
        elif not all(DTYPES[t.dtype].is_float for t in (tensor, *theirs)):
            if any(expert.ids[name] != base.ids[name] for expert in experts):
                left_out[name] = f"{tensor.dtype} can't be subtracted"
        else:
            ids = tuple(expert.ids[name] for expert in experts)
            found.append(Compared(name, tensor, base.ids[name], theirs, ids))
    return found, left_out


class Sums:
    """Adds up what K experts have in common, tensor by tensor.

    ``products`` (K, K) are inner products with their variances, ``agreeing`` (K, K) the expected
    numbers of elements that both changed, and moved to the same side, with the variances of that.
    ``both`` (3, K, K) are numbers of elements that both changed: expected, at least and at most.
    What is not known of an expert is NaN.
    """

    def __init__(self, experts: int) -> None:
        shape = (experts, experts)
        self.products, self.variances = np.zeros(shape), np.zeros(shape)
        self.agreeing, self.doubts = np.zeros(shape), np.zeros(shape)
        self.both = np.zeros((3, *shape))
        self.base = 0.0
        self.base_variance = 0.0
        self.elements = 0

    def add_base(self, size: Figure | None) -> None:
        """Add the energy of one of the base's tensors."""
        self.base += size.value if size is not None else math.nan
        self.base_variance += (size.error or 0.0) ** 2 if size is not None else 0.0

    def report(
        self,
        base: ResolvedRef,
        experts: Sequence[ResolvedRef],
        exact: bool,
        tensors: int,
        left_out: Mapping[str, str],
        read_bytes: int,
    ) -> SimilarityReport:
        places = range(len(experts))
        energies = [self._figure(self.products[k, k], self.variances[k, k], exact) for k in places]
        size = None
        if not math.isnan(self.base):
            size = Figure(self.base, math.sqrt(self.base_variance) or None).root()
        return SimilarityReport(
            base,
            tuple(experts),
            exact,
            tensors,
            self.elements,
            tuple(None if e is None or size is None else e.root().over(size) for e in energies),
            tuple(tuple(self._cosine(i, j, exact) for j in places) for i in places),
            tuple(tuple(self._agreement(i, j, exact) for j in places) for i in places),
            tuple(tuple(self._overlap(i, j) for j in places) for i in places),
            left_out,
            read_bytes,
        )

    @staticmethod
    def _figure(value: float, variance: float, exact: bool) -> Figure | None:
        if math.isnan(value):
            return None
        return Figure(float(value), None if exact or not variance else math.sqrt(variance))

    def _cosine(self, i: int, j: int, exact: bool) -> Figure | None:
        lengths = math.sqrt(max(self.products[i, i], 0.0) * max(self.products[j, j], 0.0))
        if not lengths > 0:  # nothing changed, or nothing is known
            return None
        if i == j:
            return Figure(1.0)
        value = min(max(self.products[i, j] / lengths, -1.0), 1.0)
        return self._figure(value, self.variances[i, j] / lengths**2, exact)

    def _agreement(self, i: int, j: int, exact: bool) -> Figure | None:
        both = self.both[0, i, j]
        if not both > 0:
            return None
        return self._figure(self.agreeing[i, j] / both, self.doubts[i, j] / both**2, exact)

    def _overlap(self, i: int, j: int) -> Overlap | None:
        counts = self.both[:, i, j]
        if np.isnan(counts).any() or not self.elements:
            return None
        return Overlap(*(float(count) / self.elements for count in counts))


def estimate(knowledge: Knowledge, compared: Sequence[Compared], experts: int) -> Sums:
    """What statistics tell. Reads no block."""
    sums = Sums(experts)
    for tensor in compared:
        elements, blocks = tensor.base.elements, len(tensor.base)
        known = [knowledge.change(tensor.base_id, i, elements, blocks) for i in tensor.ids]
        size = knowledge.size(tensor.base_id, elements, blocks)
        sums.elements += elements
        sums.add_base(size.energy if size is not None else None)
        _add_products(sums, known, elements)
        both = _expected_overlap(tensor, known)
        sums.both += both
        _add_agreement(sums, known, both[0], elements)
    return sums


def _sketched(known: Sequence[Known | None]) -> tuple[Doubles, Doubles]:
    """Energies (K) of what was sketched, and sketches (K, 256); NaN and zeros where nothing is
    known."""
    energies = np.array([math.nan if one is None else one.sketched_energy for one in known])
    width = max((one.sketch.size for one in known if one is not None), default=1)
    rows = [np.zeros(width) if one is None else one.sketch for one in known]
    return energies, np.stack(rows)


def _add_products(sums: Sums, known: Sequence[Known | None], elements: int) -> None:
    energies, sketches = _sketched(known)
    u, errors = apart(sketches, np.nan_to_num(energies), elements)
    lengths = np.sqrt(np.maximum(energies, 0.0))
    products = np.outer(lengths, lengths)
    variances = (products * errors) ** 2
    diagonal = [
        0.0 if one is None or one.energy.error is None else one.energy.error**2 for one in known
    ]
    np.fill_diagonal(variances, diagonal)
    products = products * (1.0 - u)
    np.fill_diagonal(products, [math.nan if one is None else one.energy.value for one in known])
    sums.products += products
    sums.variances += variances


def _add_agreement(sums: Sums, known: Sequence[Known | None], both: Doubles, elements: int) -> None:
    energies, sketches = _sketched(known)
    u, errors = apart(sketches, np.nan_to_num(energies), elements)
    cosines = np.clip(1.0 - u, -1.0, 1.0)
    agreeing = 1.0 - np.arccos(cosines) / math.pi
    # The slope of arccos grows where the error of the cosine shrinks.
    sine = np.sqrt(np.maximum(1.0 - cosines**2, 1e-12))
    np.fill_diagonal(agreeing, 1.0)
    np.fill_diagonal(errors, 0.0)
    sums.agreeing += both * agreeing
    sums.doubts += (both * errors / (math.pi * sine)) ** 2


def _expected_overlap(tensor: Compared, known: Sequence[Known | None]) -> Doubles:
    """Elements that both of two experts changed (3, K, K): expected, at least and at most."""
    count, blocks = len(known), len(tensor.base)
    sizes = np.array([block_elements(tensor.base.elements, b) for b in range(blocks)], np.float64)
    changed = np.full((count, blocks), math.nan)
    for k, one in enumerate(known):
        if one is not None and one.nonzero is not None:
            changed[k] = one.nonzero
    mine, other = changed[:, None, :], changed[None, :, :]
    most = np.minimum(mine, other)
    least = np.maximum(mine + other - sizes, 0.0)
    expected = mine * other / np.maximum(sizes, 1.0)
    same = _same_blocks(tensor)
    for values in (expected, least):
        np.copyto(values, most, where=same)
    total: Doubles = np.stack([values.sum(axis=2) for values in (expected, least, most)])
    return total


def _same_blocks(tensor: Compared) -> npt.NDArray[np.bool_]:
    """Where two experts have the very same block (K, K, blocks)."""
    blocks = len(tensor.base)
    keys = [[(t.dtype, t.block(b)) for b in range(blocks)] for t in tensor.tensors]
    numbers = {key: n for n, key in enumerate({key for row in keys for key in row})}
    table = np.array([[numbers[key] for key in row] for row in keys], np.int64).reshape(-1, blocks)
    same: npt.NDArray[np.bool_] = table[:, None, :] == table[None, :, :]
    return same
