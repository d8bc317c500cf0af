"""From a recipe to a planning problem: what the catalog and the statistics say, and no weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from mergegit.dtypes import DTYPES, byte_length
from mergegit.errors import BadRecipe, NotFinite
from mergegit.history import is_ancestor
from mergegit.kernels.combine import Coefficients
from mergegit.merge.layers import Place, Stack, places
from mergegit.merge.match import Matching, Model, match
from mergegit.merge.method import ExpertTensor, Method, TensorContext
from mergegit.merge.plan import Ladders, Problem, tiny_tensors
from mergegit.merge.recipe import Expert, Recipe, Settings, resolved
from mergegit.merge.slices import slice_models
from mergegit.objects import ID_BYTES, BlockId, Manifest, Tensor, TensorId, block_elements
from mergegit.pipeline import ordered_map
from mergegit.repository.adapters import (
    Computed,
    ComputedBlock,
    ComputedTensor,
    LowRankReader,
    adapted_model,
    placed,
    reading_cost,
)
from mergegit.repository.aligning import Aligned, align_models
from mergegit.repository.lineage import check_base
from mergegit.repository.measuring import (
    Comparison,
    StatisticsBuilder,
    compare,
    measure_delta,
)
from mergegit.repository.moving import MovedBlock, Pair, moved_model
from mergegit.statistics import PLANES, TensorStatistics
from mergegit.storage.store import Store
from mergegit.storage.transaction import Transaction

Progress = Callable[[int, int], None]

LAYERS: Final = PLANES + 1
TRIMMED_LAYERS: Final = 2
"""Methods that trim read at least so many layers of what they touch: with one, all magnitudes of
a group are one number, and trimming by it is worthless."""


@dataclass(frozen=True, slots=True)
class Part:
    """A slice of the merged model, or the whole: the experts in it, their parameters, and those
    for all."""

    experts: tuple[int, ...]
    own: Sequence[Settings]
    shared: Settings


@dataclass(frozen=True, slots=True)
class Inputs:
    """A recipe with all that its models' objects say; no weights.

    ``base`` and ``experts`` are seen as the merged model names its tensors, and ``stack`` are its
    layers where slices number them anew. ``places`` tells where each tensor lies, ``parts`` which
    experts take part in each slice, and ``copied`` names the tensors that are an expert's own,
    unread. ``computed`` are the blocks that adapters make from their factors. ``aligned`` is what
    was done where the recipe asks for a vocabulary. ``moved`` is what stands behind the blocks of
    experts that are seen from bases of their own, and ``own_pairs`` behind their tensors.
    """

    recipe: Recipe
    base: Model
    experts: Sequence[Model]
    matching: Matching
    base_manifest: Manifest
    keys: Sequence[bytes]
    places: Mapping[str, Place]
    parts: Sequence[Part]
    copied: Mapping[str, TensorId]
    computed: Computed
    stack: Stack | None = None
    aligned: Aligned | None = None
    moved: Mapping[BlockId, MovedBlock] = field(default_factory=dict)
    own_pairs: Sequence[Mapping[str, Pair]] = ()

    def pair(self, k: int, name: str) -> Pair:
        """An expert's tensor, as it is read, and what its delta is taken from."""
        own = self.own_pairs[k].get(name) if self.own_pairs else None
        expert = self.experts[k]
        return own or Pair(
            expert.ids[name], expert.tensors[name], self.base.ids[name], self.base.tensors[name]
        )

    def part(self, name: str) -> Part:
        """What is merged into a tensor. Some of the experts may lack it, and count as the base."""
        return self.parts[self.places[name].slice]


def _silent(done: int, total: int) -> None:
    """The progress of who does not ask."""


def gather(
    store: Store, recipe: Recipe, *, threads: int = 1, progress: Progress = _silent
) -> Inputs:
    """Load the models' objects and match them. Raises ``Mismatch`` and ``BadRecipe``.

    Where the recipe asks for a vocabulary, embeddings that have another one are aligned, if that
    was not done before: the one thing here that reads weights. ``progress`` is told of it. Raises
    ``BadCheckpoint`` where tokens can't be told.
    """
    base_manifest = store.manifest(store.commit(recipe.base).manifest)
    check_base(recipe.base_ref, base_manifest)
    base = _model(store, recipe.base_ref, base_manifest)
    experts: list[Model] = []
    keys: list[bytes] = []
    made: dict[TensorId, ComputedTensor] = {}
    for expert in recipe.experts:
        manifest_id = store.commit(expert.commit).manifest
        on = store.commit(expert.base or recipe.base).manifest
        adapted = adapted_model(store, expert.ref, expert.commit, on)
        if adapted is not None:
            experts.append(adapted.model)
            made.update(adapted.made)
        else:
            experts.append(_model(store, expert.ref, store.manifest(manifest_id)))
        # The same expert listed twice draws twice.
        keys.append(manifest_id + b"%d" % sum(key.startswith(manifest_id) for key in keys))
    stack = aligned = None
    if recipe.vocabulary is not None:
        aligned = align_models(
            store, recipe, base, experts, made, threads=threads, progress=progress
        )
        base, experts = aligned.base, list(aligned.experts)
    if recipe.slices:
        sliced = slice_models(recipe, base, experts)
        base, experts, stack = sliced.base, list(sliced.experts), sliced.stack
    computed: dict[BlockId, ComputedBlock] = {}
    for k, model in enumerate(experts if made else ()):
        experts[k], blocks = placed(model, made)
        computed.update(blocks)
    moved: dict[BlockId, MovedBlock] = {}
    own_pairs: list[Mapping[str, Pair]] = []
    for k, expert in enumerate(recipe.experts if recipe.has_own_bases else ()):
        own_pairs.append({})
        if expert.base is not None:
            below = _own_base(store, expert)
            seen = moved_model(experts[k], below, base)
            experts[k], own_pairs[k] = seen.model, seen.pairs
            moved.update(seen.blocks)
    lengths = tuple(part.base_layers[1] - part.base_layers[0] for part in recipe.slices)
    where = places(base.tensors, lengths, stack)
    if not any(place.in_layers for place in where.values()):
        recipe.refuse_gradients()
    parts = [Part(*part) for part in recipe.parts()]
    copied = _copied(recipe, base, experts, where, parts, computed)
    matching = match(
        _without(base, copied),
        [_without(expert, copied) for expert in experts],
        ignore_extra=recipe.ignore_extra,
        converts=recipe.dtype is not None,
        participants=lambda name: parts[where[name].slice].experts,
    )
    return Inputs(
        recipe, base, experts, matching, base_manifest, keys, where, parts, copied, computed,
        stack, aligned, moved, own_pairs,
    )  # fmt: skip


def _own_base(store: Store, expert: Expert) -> Model:
    """The base that an expert's delta is taken from. Raises ``BadRecipe``."""
    assert expert.base is not None
    assert expert.base_ref is not None
    if not is_ancestor(expert.base, expert.commit, store.commit):
        raise BadRecipe(
            f"{expert.ref} does not descend from {expert.base_ref}, the base that it is seen from",
            hint="name the base that it was trained from",
        )
    manifest = store.manifest(store.commit(expert.base).manifest)
    check_base(expert.base_ref, manifest)
    return _model(store, expert.base_ref, manifest)


def _without(model: Model, names: Mapping[str, TensorId]) -> Model:
    return replace(
        model, tensors={name: t for name, t in model.tensors.items() if name not in names}
    )


def _copied(
    recipe: Recipe,
    base: Model,
    experts: Sequence[Model],
    where: Mapping[str, Place],
    parts: Sequence[Part],
    computed: Computed,
) -> dict[str, TensorId]:
    """Tensors that are taken from one expert as they are: nothing of them is read."""
    copied: dict[str, TensorId] = {}
    if recipe.method.copies is None:
        return copied
    for name in base.tensors:
        part = parts[where[name].slice]
        expert = experts[part.experts[0]]
        tensor = expert.tensors.get(name)
        if tensor is None or any(block in computed for block in tensor.blocks()):
            continue
        is_float = DTYPES[tensor.dtype].is_float
        if is_float and recipe.dtype not in (None, tensor.dtype):
            continue
        position = where[name].position
        own = [resolved(settings, expert.own_name(name), position) for settings in part.own]
        if not is_float or recipe.method.copies(own, resolved(part.shared, name, position)):
            copied[name] = expert.ids[name]
    return copied


def missing_statistics(store: Store, inputs: Inputs) -> list[Pair]:
    """Pairs of tensors that statistics were never taken of.

    There are none where experts were added with the base that they are merged on.
    """
    pairs: dict[tuple[TensorId, TensorId], Pair] = {}
    for name in inputs.matching.merged:
        base_id = inputs.base.ids[name]
        for k in inputs.part(name).experts:
            tensor_id = inputs.experts[k].ids.get(name)
            if tensor_id in (None, base_id) or (tensor_id, base_id) in pairs:
                continue
            pair = inputs.pair(k, name)
            if store.catalog.statistics(pair.tensor_id, pair.base_id) is None:
                pairs[pair.tensor_id, pair.base_id] = pair
    return list(pairs.values())


def take_statistics(
    store: Store,
    transaction: Transaction,
    pairs: Sequence[Pair],
    computed: Computed,
    *,
    threads: int,
    progress: Progress,
) -> None:
    """Read tensors once beside their base tensors and store the statistics."""
    total = sum(pair.tensor.nbytes for pair in pairs)
    done = 0
    low_rank = LowRankReader(store, computed, held=1)
    for pair in pairs:
        tensor, base = pair.tensor, pair.base

        def read(index: int, tensor: Tensor = tensor, base: Tensor = base) -> Comparison:
            block = tensor.block(index)
            elements = block_elements(tensor.elements, index)
            if block in low_rank:
                below = base.block(index)
                delta = low_rank.delta(block, below, store.read_block(below), base.dtype)
                return measure_delta(delta, index)
            data = store.read_block(block)
            return compare(store, tensor.dtype, data, block, base, index, elements)

        builder = StatisticsBuilder()
        comparisons = ordered_map(read, range(len(tensor)), threads=threads)
        for index, comparison in enumerate(comparisons):
            builder.add(comparison)
            done += tensor.block_nbytes(index)
            progress(done, total)
        transaction.write_statistics(pair.tensor_id, pair.base_id, builder.finish().to_bytes())


Known = Sequence[TensorStatistics | None]
"""Statistics of one tensor, for each participant; None where it lacks it or has the base's."""


def known_of(store: Store, inputs: Inputs, name: str) -> Known:
    """The statistics of every participant's tensor of a name against the base's."""
    base = inputs.base.ids[name]
    known: list[TensorStatistics | None] = []
    for k in inputs.part(name).experts:
        tensor = inputs.experts[k].ids.get(name)
        if tensor is None or tensor == base:
            known.append(None)
            continue
        pair = inputs.pair(k, name)
        data = store.read_statistics(pair.tensor_id, pair.base_id)
        assert data is not None, "statistics are taken before planning"
        known.append(TensorStatistics.from_bytes(data))
    return known


def context_of(inputs: Inputs, name: str, known: Known) -> TensorContext:
    """What the recipe's method may know of one tensor, before it is surveyed."""
    place, part = inputs.places[name], inputs.part(name)
    experts = [
        ExpertTensor(
            resolved(settings, inputs.experts[k].own_name(name), place.position),
            statistics.histogram if statistics else None,
            inputs.keys[k],
            float(statistics.energy.sum()) if statistics else 0.0,
        )
        for k, settings, statistics in zip(part.experts, part.own, known, strict=True)
    ]
    return TensorContext(
        name=name,
        shape=inputs.base.tensors[name].shape,
        parameters=resolved(part.shared, name, place.position),
        seed=inputs.recipe.seed,
        experts=experts,
        gram=_estimated_gram(known),
        depth=place.depth,
        in_layers=place.in_layers,
    )


_LARGE_BASE: Final = 1e6
"""The base's energy, as estimated Gram matrices have it, in units of the largest delta's."""


def _estimated_gram(known: Known) -> npt.NDArray[np.float64]:
    """Inner products of base and deltas: exact squares, sketched products, and a large base."""
    gram = np.zeros((len(known) + 1, len(known) + 1))
    present = [(k, statistics) for k, statistics in enumerate(known) if statistics is not None]
    if present:
        rows = [k + 1 for k, _ in present]
        sketches = np.stack([statistics.sketch.astype(np.float64) for _, statistics in present])
        gram[np.ix_(rows, rows)] = sketches @ sketches.T
        for k, statistics in present:
            gram[k + 1, k + 1] = statistics.energy.sum()
    gram[0, 0] = _LARGE_BASE * (gram.diagonal().max() or 1.0)
    return gram


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
    together = np.full(blocks, -1, np.int64)
    energy = 0.0
    are_tiny = tiny_tensors([inputs.base.tensors[name].elements for name in names])
    for name, is_tiny, start, stop in zip(names, are_tiny, offsets[:-1], offsets[1:], strict=True):
        base = inputs.base.tensors[name]
        here = slice(int(start), int(stop))
        tiny[here] = is_tiny
        out_dtype = recipe.dtype or base.dtype
        known, participants = known_of(store, inputs, name), inputs.part(name).experts
        context = context_of(inputs, name, known)
        rule = recipe.method.rule(context)
        coefficients = rule if isinstance(rule, Coefficients) else rule.nearest
        if recipe.method.survey or not isinstance(rule, Coefficients):
            together[here] = here.start
        always[here] = out_dtype != base.dtype or not _unread(recipe.method, context).keeps_base
        for index in range(len(base)):
            elements = block_elements(base.elements, index)
            write_bytes[start + index] = byte_length(out_dtype, elements)
        base_bytes[here] = _plain_bytes(store, base)
        spreads, limits = coefficients.spreads, coefficients.limits
        for at, (k, statistics) in enumerate(zip(participants, known, strict=True)):
            if statistics is not None:
                _refuse_nonfinite(recipe, inputs.experts[k].ref, name, statistics)
                pair = inputs.pair(k, name)
                tensor, below = pair.tensor, pair.base
                ladders[k].weights[here] = spreads[at]
                ladders[k].limits[here] = limits[at]
                if limits[at] > 0 and tensor.block_ids[:ID_BYTES] in inputs.computed:
                    made = inputs.computed[tensor.block(0)].tensor
                    ladders[k].fill_computed(store, here, made, below, statistics)
                elif limits[at] > 0:
                    ladders[k].fill(store, here, tensor, below, statistics)
                if limits[at] > 0 and below is not base:
                    ladders[k].base_costs[here] += _other_bytes(store, below, base)
                if limits[at] > 0:
                    _share(ladders, at, participants, inputs, name, here, coefficients)
        energy += _merged_energy(context, coefficients)
    return Problem(
        recipe=recipe.to_json(),
        base=recipe.base,
        tensors=names,
        kept=inputs.matching.kept,
        experts=[
            Ladders(
                ref=expert.ref,
                commit=expert.commit,
                raw_bytes=inputs.experts[k].nbytes,
                weights=ladder.weights,
                limits=ladder.limits,
                costs=ladder.costs,
                remaining=ladder.remaining,
                depths=ladder.depths,
                leaders=ladder.leaders,
                base_costs=ladder.base_costs,
                units=ladder.units,
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
        together=together,
    )


def _unread(method: Method, context: TensorContext) -> Coefficients:
    """What a tensor of which nothing is read is merged by."""
    survey = method.survey(context) if method.survey else None
    found = survey.finish() if survey is not None else None
    return method.coefficients(replace(context, surveyed=found))


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
    units: npt.NDArray[np.int64] | None = None

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

    def fill_computed(
        self,
        store: Store,
        here: slice,
        made: ComputedTensor,
        base: Tensor,
        statistics: TensorStatistics,
    ) -> None:
        """A tensor that an adapter makes: its factors are read for all of its blocks or none."""
        if self.units is None:
            self.units = np.arange(self.depths.size)
        self.units[here] = here.start
        self.depths[here] = 1
        self.remaining[here, 0] = statistics.energy
        cost = reading_cost(made, base, lambda part: _plain_bytes(store, part))
        self.costs[here.start, 0] = cost.expert
        self.base_costs[here] = cost.below


def _share(
    ladders: Sequence[_Ladder],
    at: int,
    participants: Sequence[int],
    inputs: Inputs,
    name: str,
    here: slice,
    coefficients: Coefficients,
) -> None:
    """Mark the blocks of a participant whose stored bytes an earlier one needs as well."""
    k = participants[at]
    tensor = inputs.experts[k].tensors[name]
    for earlier_at, earlier in enumerate(participants[:at]):
        other = inputs.experts[earlier].tensors.get(name)
        if other is None or other.dtype != tensor.dtype:
            continue
        if coefficients.thresholds[earlier_at] != coefficients.thresholds[at]:
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


def _other_bytes(store: Store, tensor: Tensor, base: Tensor) -> npt.NDArray[np.int64]:
    """Stored bytes of each block of an expert's own base that is not the merge's base's."""
    return np.where(_differ(tensor, base), np.array(_plain_bytes(store, tensor), np.int64), 0)


def _refuse_nonfinite(recipe: Recipe, ref: str, name: str, statistics: TensorStatistics) -> None:
    if not recipe.allow_nonfinite and statistics.nonfinite.any():
        raise NotFinite(
            f"tensor {name} of expert {ref} holds "
            f"{int(statistics.nonfinite.sum())} elements that are NaN or infinite",
            hint="leave the expert out, or merge it all the same with --allow-nonfinite",
        )


def _merged_energy(context: TensorContext, coefficients: Coefficients) -> float:
    """Expected energy of one tensor's merged delta."""
    products = context.gram[1:, 1:].copy()
    squares = products.diagonal().copy()
    np.fill_diagonal(products, 0.0)
    amplitudes, spreads = coefficients.amplitudes, coefficients.spreads
    # A sketch's noise can't make the sum smaller than nothing.
    return max(float(amplitudes @ products @ amplitudes + spreads**2 @ squares), 0.0)


def _model(store: Store, ref: str, manifest: Manifest) -> Model:
    tensors = {name: store.tensor(tensor_id) for name, tensor_id in manifest.tensors.items()}
    return Model(ref, tensors, manifest.tensors)
