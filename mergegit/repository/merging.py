"""`plan` and `merge`: from a recipe to a planning problem, and from a plan to a merged model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mergegit.checkpoint.header import build_header, metadata_of
from mergegit.dtypes import byte_length
from mergegit.encoding import hash_block
from mergegit.errors import BadRecipe, NotFinite
from mergegit.merge.execute import TensorJob, execute
from mergegit.merge.match import Matching, Model, match
from mergegit.merge.methods import ExpertTensor, TensorContext
from mergegit.merge.plan import TINY_ELEMENTS, Ladders, Problem
from mergegit.merge.recipe import Recipe
from mergegit.objects import (
    BLOCK_ELEMENTS,
    ID_BYTES,
    BlockId,
    Manifest,
    Plan,
    Shard,
    Tensor,
    TensorId,
    block_elements,
)
from mergegit.pipeline import ordered_map
from mergegit.repository.companions import (
    CARD,
    CONFIG,
    INDEX,
    WEIGHT_SUFFIXES,
    config_with_dtype,
    index_with_size,
    license_line,
    model_card,
)
from mergegit.repository.measuring import StatisticsBuilder, measure_block
from mergegit.statistics import TensorStatistics
from mergegit.storage.reader import ByteCount
from mergegit.storage.store import Store, Transaction

Progress = Callable[[int, int], None]


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
    matching = match(base, experts, ignore_extra=recipe.ignore_extra)
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

        def measure(index: int, tensor: Tensor = tensor, base: Tensor = base) -> tuple[int, object]:
            block = tensor.block(index)
            data = store.read_block(block)
            elements = block_elements(tensor.elements, index)
            return len(data), measure_block(store, tensor.dtype, data, block, base, index, elements)

        builder = StatisticsBuilder()
        for length, measures in ordered_map(measure, range(len(tensor)), threads=threads):
            builder.add(measures)  # type: ignore[arg-type]
            done += length
            progress(done, total)
        transaction.write_statistics(tensor_id, base_id, builder.finish().to_bytes())


class Knowledge:
    """The statistics of every expert's tensors against the base's, read once."""

    def __init__(self, store: Store, inputs: Inputs) -> None:
        self._store = store
        self._inputs = inputs

    def of(self, expert: int, name: str) -> TensorStatistics | None:
        """None where the expert lacks the tensor or has the base's."""
        tensor = self._inputs.experts[expert].ids.get(name)
        base = self._inputs.base.ids[name]
        if tensor is None or tensor == base:
            return None
        data = self._store.read_statistics(tensor, base)
        assert data is not None, "statistics are taken before planning"
        return TensorStatistics.from_bytes(data)


def context_of(inputs: Inputs, knowledge: Knowledge, name: str) -> TensorContext:
    """What the recipe's method may know of one tensor."""
    experts = []
    for k, expert in enumerate(inputs.recipe.experts):
        statistics = knowledge.of(k, name)
        histogram = statistics.histogram if statistics else None
        experts.append(ExpertTensor(expert.parameters, histogram, inputs.keys[k]))
    return TensorContext(
        name,
        inputs.base.tensors[name].elements,
        inputs.recipe.parameters,
        inputs.recipe.seed,
        experts,
    )


def problem_of(store: Store, inputs: Inputs) -> Problem:
    """The planning problem of a recipe, from objects and statistics alone.

    Raises ``NotFinite`` where an expert holds NaN or infinity and the recipe does not allow it.
    """
    knowledge = Knowledge(store, inputs)
    recipe, names = inputs.recipe, inputs.matching.merged
    sizes = [len(inputs.base.tensors[name]) for name in names]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    blocks = int(offsets[-1])
    ladders = [
        _Ladder(np.zeros(blocks), np.zeros((blocks, 2)), np.zeros((blocks, 1), np.int64),
                np.zeros(blocks, np.uint8), np.full(blocks, k, np.int16))
        for k in range(len(inputs.experts))
    ]  # fmt: skip
    tiny, always = np.zeros(blocks, np.bool_), np.zeros(blocks, np.bool_)
    base_bytes, write_bytes = np.zeros(blocks, np.int64), np.zeros(blocks, np.int64)
    energy = 0.0
    for name, start, stop in zip(names, offsets[:-1], offsets[1:], strict=True):
        base = inputs.base.tensors[name]
        here = slice(int(start), int(stop))
        tiny[here] = base.elements <= TINY_ELEMENTS
        out_dtype = recipe.dtype or base.dtype
        keeps = recipe.method.keeps_base(context_of(inputs, knowledge, name))
        always[here] = not keeps or out_dtype != base.dtype
        for index in range(len(base)):
            elements = block_elements(base.elements, index)
            write_bytes[start + index] = byte_length(out_dtype, elements)
        base_bytes[here] = _stored_bytes(store, base)
        sketches, weights, energies = [], [], []
        for k, expert in enumerate(inputs.experts):
            statistics = knowledge.of(k, name)
            if statistics is None:
                continue
            if not recipe.allow_nonfinite and statistics.nonfinite.any():
                raise NotFinite(
                    f"tensor {name} of expert {expert.ref} holds "
                    f"{int(statistics.nonfinite.sum())} elements that are NaN or infinite",
                    hint="leave the expert out, or merge it all the same with --allow-nonfinite",
                )
            weight = abs(float(recipe.experts[k].parameters["weight"]))
            _fill_ladder(store, ladders, k, inputs, name, here, statistics, weight)
            sketches.append(statistics.sketch.astype(np.float64))
            weights.append(float(recipe.experts[k].parameters["weight"]))
            energies.append(float(statistics.energy.sum()))
        energy += _merged_energy(sketches, weights, energies)
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
                costs=ladder.costs,
                remaining=ladder.remaining,
                depths=ladder.depths,
                leaders=ladder.leaders,
            )
            for k, (expert, ladder) in enumerate(zip(recipe.experts, ladders, strict=True))
        ],
        tiny=tiny,
        always=always,
        base_bytes=base_bytes,
        write_bytes=write_bytes,
        merged_energy=energy,
        additive=recipe.method.additive,
    )


@dataclass(slots=True)
class _Ladder:
    weights: np.ndarray
    remaining: np.ndarray
    costs: np.ndarray
    depths: np.ndarray
    leaders: np.ndarray


def _fill_ladder(
    store: Store,
    ladders: Sequence[_Ladder],
    k: int,
    inputs: Inputs,
    name: str,
    here: slice,
    statistics: TensorStatistics,
    weight: float,
) -> None:
    """One expert's blocks of one tensor: what they cost, what they bring, who shares them."""
    ladder = ladders[k]
    base, tensor = inputs.base.tensors[name], inputs.experts[k].tensors[name]
    ids = _ids(tensor)
    differs = (ids != _ids(base)).any(axis=1) | (tensor.dtype != base.dtype)
    ladder.weights[here] = weight
    ladder.remaining[here, 0] = statistics.energy
    ladder.costs[here, 0] = _stored_bytes(store, tensor)
    ladder.depths[here] = differs & (weight > 0)
    for earlier in range(k):
        other = inputs.experts[earlier].tensors.get(name)
        if other is not None and other.dtype == tensor.dtype:
            same = (ids == _ids(other)).all(axis=1) & (ladders[earlier].depths[here] > 0)
            leaders = ladder.leaders[here]
            leaders[same & (leaders == k)] = ladders[earlier].leaders[here][same & (leaders == k)]


def _ids(tensor: Tensor) -> np.ndarray:
    return np.frombuffer(tensor.block_ids, np.uint8).reshape(-1, ID_BYTES)


def _stored_bytes(store: Store, tensor: Tensor) -> list[int]:
    forms = store.forms(tensor.blocks())
    return [forms[block].nbytes for block in tensor.blocks()]


def _merged_energy(
    sketches: Sequence[np.ndarray], weights: Sequence[float], energies: Sequence[float]
) -> float:
    """Energy of the weighted sum of one tensor's deltas: exact squares, sketched products."""
    if not sketches:
        return 0.0
    w = np.array(weights)
    gram = np.stack(sketches) @ np.stack(sketches).T
    np.fill_diagonal(gram, energies)
    # A sketch's noise can't make the sum smaller than nothing.
    return max(float(w @ gram @ w), 0.0)


def merge_blocks(
    store: Store,
    transaction: Transaction,
    inputs: Inputs,
    plan: Plan,
    *,
    threads: int,
    expert_count: ByteCount,
    base_count: ByteCount,
    progress: Progress,
) -> dict[str, Tensor]:
    """Carry out a plan: the merged tensors by name. Raises ``BadRecipe`` where the plan does not
    fit its commits any more."""
    if plan.tensors != inputs.matching.merged:
        raise BadRecipe("the plan does not fit its models", hint="make the plan again")
    total = sum(inputs.base.tensors[name].nbytes for name in plan.tensors)
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    merged = execute(
        _jobs(store, inputs, plan),
        read_base=lambda block: store.read_block(block, count=base_count),
        read_expert=lambda block, _layers: store.read_block(block, count=expert_count),
        write_block=transaction.write_block,
        threads=threads,
        progress=advance,
    )
    return dict(merged)


def _jobs(store: Store, inputs: Inputs, plan: Plan) -> Iterator[TensorJob]:
    knowledge = Knowledge(store, inputs)
    recipe = inputs.recipe
    layers = np.stack([np.frombuffer(expert.layers, np.uint8) for expert in plan.experts])
    blocks = sum(len(inputs.base.tensors[name]) for name in plan.tensors)
    if layers.shape[1] != blocks:
        raise BadRecipe("the plan does not fit its models", hint="make the plan again")
    at = 0
    for name in plan.tensors:
        base = inputs.base.tensors[name]
        coefficients = recipe.method.coefficients(context_of(inputs, knowledge, name))
        yield TensorJob(
            name=name,
            dtype=recipe.dtype or base.dtype,
            base=base,
            experts=[expert.tensors.get(name) for expert in inputs.experts],
            layers=layers[:, at : at + len(base)],
            coefficients=coefficients,
            keeps_base=coefficients.base_scale == 1.0,
        )
        at += len(base)


def merged_manifest(
    store: Store,
    transaction: Transaction,
    inputs: Inputs,
    plan: Plan,
    merged: Mapping[str, Tensor],
) -> Manifest:
    """The manifest of a merged model: the base's layout and files, with the merged tensors.

    Second files of weights beside the base's model are left out: they would hold its weights. The
    card is written anew, config and index where the dtype changes.
    """
    base = inputs.base_manifest
    tensors = dict(base.tensors)
    for name, tensor in merged.items():
        tensors[name] = transaction.write_tensor(tensor)
    changed = {name for name, t in merged.items() if t.dtype != inputs.base.tensors[name].dtype}
    shards = tuple(
        Shard(
            shard.path,
            _new_header(store, transaction, shard, inputs, merged)
            if changed & set(shard.names)
            else shard.header,
            shard.names,
        )
        for shard in base.shards
        if shard.belongs_to_model
    )
    files = {
        path: tensor_id
        for path, tensor_id in base.files.items()
        if not path.endswith(WEIGHT_SUFFIXES)
    }

    def replace_file(path: str, change: Callable[[bytes], bytes]) -> None:
        if path in files:
            files[path] = write_bytes(transaction, change(read_bytes(store, files[path])))

    if changed and inputs.recipe.dtype:
        dtype = inputs.recipe.dtype
        sizes = (merged.get(name) or inputs.base.tensors[name] for name in base.tensors)
        total = sum(tensor.nbytes for tensor in sizes)
        replace_file(CONFIG, lambda data: config_with_dtype(data, dtype))
        replace_file(INDEX, lambda data: index_with_size(data, total))
    license = license_line(read_bytes(store, files[CARD])) if CARD in files else None
    names = [expert.ref for expert in plan.experts]
    card = model_card(plan, names, inputs.recipe.base_ref, license)
    files[CARD] = write_bytes(transaction, card)
    return replace(base, tensors=tensors, shards=shards, files=dict(sorted(files.items())))


def _new_header(
    store: Store,
    transaction: Transaction,
    shard: Shard,
    inputs: Inputs,
    merged: Mapping[str, Tensor],
) -> TensorId:
    """The shard's header with the merged tensors' dtypes; order and metadata stay."""
    tensors = [(name, merged.get(name) or inputs.base.tensors[name]) for name in shard.names]
    old = read_bytes(store, shard.header)
    text = build_header([(n, t.dtype, t.shape) for n, t in tensors], metadata_of(old))
    return write_bytes(transaction, text)


def read_bytes(store: Store, tensor_id: TensorId) -> bytes:
    """The contents of a tensor of bytes."""
    return b"".join(store.read_block(block) for block in store.tensor(tensor_id).blocks())


def write_bytes(transaction: Transaction, data: bytes) -> TensorId:
    """Store bytes as a tensor of bytes."""
    blocks: list[BlockId] = []
    for start in range(0, len(data), BLOCK_ELEMENTS):
        part = data[start : start + BLOCK_ELEMENTS]
        block = hash_block(part)
        transaction.write_block(block, "U8", part)
        blocks.append(block)
    return transaction.write_tensor(Tensor("U8", (len(data),), b"".join(blocks)))


def _model(store: Store, ref: str, manifest: Manifest) -> Model:
    tensors = {name: store.tensor(tensor_id) for name, tensor_id in manifest.tensors.items()}
    return Model(ref, tensors, manifest.tensors)
