"""From a recipe to a planning problem: what the catalog and the statistics say, and no weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from mergegit.dtypes import byte_length
from mergegit.errors import NotFinite
from mergegit.kernels.combine import Coefficients
from mergegit.merge.match import Matching, Model, match
from mergegit.merge.methods import ExpertTensor, TensorContext
from mergegit.merge.plan import Ladders, Problem, tiny_tensors
from mergegit.merge.recipe import Recipe
from mergegit.objects import ID_BYTES, Manifest, Tensor, TensorId, block_elements
from mergegit.pipeline import ordered_map
from mergegit.repository.measuring import Comparison, StatisticsBuilder, compare
from mergegit.statistics import PLANES, TensorStatistics
from mergegit.storage.store import Store
from mergegit.storage.transaction import Transaction

Progress = Callable[[int, int], None]

LAYERS: Final = PLANES + 1
TRIMMED_LAYERS: Final = 2
"""Methods that trim read at least so many layers of what they touch: with one, all magnitudes of
a group are one number, and trimming by it is worthless."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """A recipe with all that its models' objects say; no weights."""

    recipe: Recipe
    base: Model
    experts: Sequence[Model]
    matching: Matching
    base_manifest: Manifest
    keys: Sequence[bytes]


def gather(store: Store, recipe: Recipe) -> Inputs:
    """Load the models' objects and match them. Raises ``Mismatch``."""
    base_manifest = store.manifest(store.commit(recipe.base).manifest)
    base = _model(store, recipe.base_ref, base_manifest)
    experts: list[Model] = []
    keys: list[bytes] = []
    for expert in recipe.experts:
        manifest_id = store.commit(expert.commit).manifest
        experts.append(_model(store, expert.ref, store.manifest(manifest_id)))
        # The same expert listed twice draws twice.
        keys.append(manifest_id + b"%d" % sum(key.startswith(manifest_id) for key in keys))
    matching = match(
        base, experts, ignore_extra=recipe.ignore_extra, converts=recipe.dtype is not None
    )
    return Inputs(recipe, base, experts, matching, base_manifest, keys)


def missing_statistics(store: Store, inputs: Inputs) -> list[tuple[TensorId, TensorId]]:
    """Pairs of (expert's tensor, base's tensor) that statistics were never taken of.

    There are none where experts were added with the base that they are merged on.
    """
    pairs: dict[tuple[TensorId, TensorId], None] = {}
    for expert in inputs.experts:
        for name in inputs.matching.merged:
            tensor, base = expert.ids.get(name), inputs.base.ids[name]
            if tensor and tensor != base and store.catalog.statistics(tensor, base) is None:
                pairs[tensor, base] = None
    return list(pairs)


def take_statistics(
    store: Store,
    transaction: Transaction,
    pairs: Sequence[tuple[TensorId, TensorId]],
    *,
    threads: int,
    progress: Progress,
) -> None:
    """Read tensors once beside their base tensors and store the statistics."""
    total = sum(store.tensor(tensor_id).nbytes for tensor_id, _ in pairs)
    done = 0
    for tensor_id, base_id in pairs:
        tensor, base = store.tensor(tensor_id), store.tensor(base_id)

        def read(index: int, tensor: Tensor = tensor, base: Tensor = base) -> Comparison:
            block = tensor.block(index)
            elements = block_elements(tensor.elements, index)
            data = store.read_block(block)
            return compare(store, tensor.dtype, data, block, base, index, elements)

        builder = StatisticsBuilder()
        comparisons = ordered_map(read, range(len(tensor)), threads=threads)
        for index, comparison in enumerate(comparisons):
            builder.add(comparison)
            done += tensor.block_nbytes(index)
            progress(done, total)
        transaction.write_statistics(tensor_id, base_id, builder.finish().to_bytes())


Known = Sequence[TensorStatistics | None]
"""Statistics of one tensor, for each expert; None where it lacks the tensor or has the base's."""


def known_of(store: Store, inputs: Inputs, name: str) -> Known:
    """The statistics of every expert's tensor of a name against the base's."""
    base = inputs.base.ids[name]
    known: list[TensorStatistics | None] = []
    for expert in inputs.experts:
        tensor = expert.ids.get(name)
        if tensor is None or tensor == base:
            known.append(None)
            continue
        data = store.read_statistics(tensor, base)
        assert data is not None, "statistics are taken before planning"
        known.append(TensorStatistics.from_bytes(data))
    return known


def coefficients_of(inputs: Inputs, name: str, known: Known) -> Coefficients:
    """The coefficients of the recipe's method for one tensor."""
    recipe = inputs.recipe
    experts = [
        ExpertTensor(expert.parameters, statistics.histogram if statistics else None, key)
        for expert, statistics, key in zip(recipe.experts, known, inputs.keys, strict=True)
    ]
    elements = inputs.base.tensors[name].elements
    return recipe.method.coefficients(
        TensorContext(name, elements, recipe.parameters, recipe.seed, experts)
    )


def problem_of(store: Store, inputs: Inputs) -> Problem:
    """The planning problem of a recipe, from objects and statistics alone.

    Raises ``NotFinite`` where an expert holds NaN or infinity and the recipe does not allow it.
    """
    recipe, names = inputs.recipe, inputs.matching.merged
    sizes = [len(inputs.base.tensors[name]) for name in names]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    blocks = int(offsets[-1])
    ladders = [_Ladder.empty(blocks, k) for k in range(len(inputs.experts))]
    tiny, always = np.zeros(blocks, np.bool_), np.zeros(blocks, np.bool_)
    base_bytes, write_bytes = np.zeros(blocks, np.int64), np.zeros(blocks, np.int64)
    energy = 0.0
    are_tiny = tiny_tensors([inputs.base.tensors[name].elements for name in names])
    for name, is_tiny, start, stop in zip(names, are_tiny, offsets[:-1], offsets[1:], strict=True):
        base = inputs.base.tensors[name]
        here = slice(int(start), int(stop))
        tiny[here] = is_tiny
        out_dtype = recipe.dtype or base.dtype
        known = known_of(store, inputs, name)
        coefficients = coefficients_of(inputs, name, known)
        always[here] = not coefficients.keeps_base or out_dtype != base.dtype
        for index in range(len(base)):
            elements = block_elements(base.elements, index)
            write_bytes[start + index] = byte_length(out_dtype, elements)
        base_bytes[here] = _plain_bytes(store, base)
        spreads, limits = coefficients.spreads, coefficients.limits
        for k, statistics in enumerate(known):
            if statistics is not None:
                _refuse_nonfinite(recipe, inputs.experts[k].ref, name, statistics)
                tensor = inputs.experts[k].tensors[name]
                ladders[k].weights[here] = spreads[k]
                ladders[k].limits[here] = limits[k]
                if limits[k] > 0:
                    ladders[k].fill(store, here, tensor, base, statistics)
                    _share(ladders, k, inputs, name, here, coefficients)
        energy += _merged_energy(known, coefficients)
    return Problem(
        recipe=recipe.to_json(),
        base=recipe.base,
        tensors=names,
        kept=inputs.matching.kept,
        experts=[
            Ladders(
                ref=expert.ref,
                commit=expert.commit,
                raw_bytes=sum(tensor.nbytes for tensor in inputs.experts[k].tensors.values()),
                weights=ladder.weights,
                limits=ladder.limits,
                costs=ladder.costs,
                remaining=ladder.remaining,
                depths=ladder.depths,
                leaders=ladder.leaders,
                base_costs=ladder.base_costs,
            )
            for k, (expert, ladder) in enumerate(zip(recipe.experts, ladders, strict=True))
        ],
        tiny=tiny,
        always=always,
        base_bytes=base_bytes,
        write_bytes=write_bytes,
        merged_energy=energy,
        additive=recipe.method.additive,
        first_step=TRIMMED_LAYERS if recipe.method.trims else 1,
        flips=recipe.method.flips,
    )


@dataclass(slots=True)
class _Ladder:
    """One expert's arrays of a problem, filled tensor by tensor; see ``Ladders``."""

    weights: npt.NDArray[np.float64]
    limits: npt.NDArray[np.float64]
    costs: npt.NDArray[np.int64]
    remaining: npt.NDArray[np.float64]
    depths: npt.NDArray[np.uint8]
    leaders: npt.NDArray[np.int16]
    base_costs: npt.NDArray[np.int64]

    @classmethod
    def empty(cls, blocks: int, expert: int) -> _Ladder:
        return cls(
            weights=np.zeros(blocks),
            limits=np.zeros(blocks),
            costs=np.zeros((blocks, LAYERS), np.int64),
            remaining=np.zeros((blocks, LAYERS + 1)),
            depths=np.zeros(blocks, np.uint8),
            leaders=np.full(blocks, expert, np.int16),
            base_costs=np.zeros(blocks, np.int64),
        )

    def fill(
        self,
        store: Store,
        here: slice,
        tensor: Tensor,
        base: Tensor,
        statistics: TensorStatistics,
    ) -> None:
        """What the blocks of one tensor cost layer by layer, and what each layer leaves."""
        forms = store.forms(tensor.blocks())
        for index in map(int, np.flatnonzero(_differ(tensor, base))):
            stored, below = forms[tensor.block(index)], base.block(index)
            costs = store.layer_costs(stored, below)
            row = here.start + index
            self.base_costs[row] = store.other_base_cost(stored, below)
            self.depths[row] = len(costs)
            self.costs[row, : len(costs)] = costs
            self.remaining[row, 0] = statistics.energy[index]
            if len(costs) == LAYERS:
                self.remaining[row, 1:LAYERS] = statistics.remaining[index]


def _share(
    ladders: Sequence[_Ladder],
    k: int,
    inputs: Inputs,
    name: str,
    here: slice,
    coefficients: Coefficients,
) -> None:
    """Mark the blocks of expert ``k`` whose stored bytes an earlier expert needs as well."""
    tensor = inputs.experts[k].tensors[name]
    for earlier in range(k):
        other = inputs.experts[earlier].tensors.get(name)
        if other is None or other.dtype != tensor.dtype:
            continue
        if coefficients.thresholds[earlier] != coefficients.thresholds[k]:
            continue
        leaders = ladders[k].leaders[here]
        same = ~_differ(tensor, other) & (ladders[earlier].depths[here] > 0) & (leaders == k)
        leaders[same] = ladders[earlier].leaders[here][same]


def _differ(tensor: Tensor, other: Tensor) -> npt.NDArray[np.bool_]:
    """Where two tensors of one shape have different blocks."""
    if tensor.dtype != other.dtype:
        return np.ones(len(tensor), np.bool_)
    ids, others = (
        np.frombuffer(t.block_ids, np.uint8).reshape(-1, ID_BYTES) for t in (tensor, other)
    )
    different: npt.NDArray[np.bool_] = (ids != others).any(axis=1)
    return different


def _plain_bytes(store: Store, tensor: Tensor) -> list[int]:
    """Stored bytes of each block of a base's tensor."""
    forms = store.forms(tensor.blocks())
    return [store.whole_cost(forms[block]) for block in tensor.blocks()]


def _refuse_nonfinite(recipe: Recipe, ref: str, name: str, statistics: TensorStatistics) -> None:
    if not recipe.allow_nonfinite and statistics.nonfinite.any():
        raise NotFinite(
            f"tensor {name} of expert {ref} holds "
            f"{int(statistics.nonfinite.sum())} elements that are NaN or infinite",
            hint="leave the expert out, or merge it all the same with --allow-nonfinite",
        )


def _merged_energy(known: Known, coefficients: Coefficients) -> float:
    """Expected energy of one tensor's merged delta: exact squares, sketched products."""
    present = [(k, statistics) for k, statistics in enumerate(known) if statistics is not None]
    if not present:
        return 0.0
    experts = [k for k, _ in present]
    sketches = np.stack([statistics.sketch.astype(np.float64) for _, statistics in present])
    amplitudes, spreads = coefficients.amplitudes[experts], coefficients.spreads[experts]
    products = sketches @ sketches.T
    np.fill_diagonal(products, 0.0)
    squares = np.array([statistics.energy.sum() for _, statistics in present])
    # A sketch's noise can't make the sum smaller than nothing.
    return max(float(amplitudes @ products @ amplitudes + spreads**2 @ squares), 0.0)


def _model(store: Store, ref: str, manifest: Manifest) -> Model:
    tensors = {name: store.tensor(tensor_id) for name, tensor_id in manifest.tensors.items()}
    return Model(ref, tensors, manifest.tensors)
