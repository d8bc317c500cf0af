"""What WUDI, TSV and Iso-C share: which tensors are matrices, weights, and the same bits always."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from mergegit.errors import NotFinite
from mergegit.kernels.combine import Coefficients
from mergegit.merge.bands import regroup
from mergegit.merge.execute import TensorJob
from mergegit.merge.method import Band, Banded, Rule, Unit, weighted
from mergegit.merge.methods import METHODS
from tests.merge import reference_spectral as reference
from tests.merge.methods.matrices import (
    SHAPES,
    is_whole,
    low_rank,
    near,
    random_matrices,
    rule_of,
)
from tests.merge.reference import Models
from tests.merge.tensors import NAMES, bands_of, context_of, merge_tensor, recipe_of
from tests.merge.test_execute import BLOCK, Blocks
from tests.merge.test_methods import WEIGHTS, same

Reference = Callable[..., torch.Tensor]

REFERENCES: dict[str, Reference] = {
    "wudi": reference.wudi,
    "tsv": reference.tsv,
    "iso_c": reference.iso_c,
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]

every_method = pytest.mark.parametrize("method", REFERENCES)
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=[NAMES[dtype] for dtype in DTYPES])
every_weights = pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())


# -- results -------------------------------------------------------------------------------------


@every_method
@every_shape
@every_dtype
def test_matrices_are_merged_as_the_paper_has_it(
    method: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    base, experts = random_matrices("paper", shape=shape, dtype=dtype)
    got = merge_tensor(method, base, experts)
    want = REFERENCES[method](Models(base, experts, [1.0, 1.0, 1.0]))
    assert near(got, want, base, *experts)
    if dtype.itemsize < 4:
        assert float((got == want).double().mean()) > 0.97 or got.numel() < 50


@every_method
@every_weights
@pytest.mark.parametrize("lam", [1.0, 0.4, -1.5])
def test_weights_scale_the_deltas_and_lambda_what_is_made_of_them(
    method: str, weights: list[float], lam: float
) -> None:
    base, experts = random_matrices("weights", shape=(20, 30))
    got = merge_tensor(method, base, experts, weights=weights, parameters={"lambda": lam})
    want = REFERENCES[method](Models(base, experts, weights), lam=lam)
    assert near(got, want, base, *experts)


@every_method
@pytest.mark.parametrize("count", [2, 4, 7])
def test_any_number_of_experts_is_merged(method: str, count: int) -> None:
    for shape in ((6, 50), (50, 6), (12, 12)):
        base, experts = random_matrices("count", shape=shape, experts=count)
        want = REFERENCES[method](Models(base, experts, [1.0] * count))
        assert near(merge_tensor(method, base, experts), want, base, *experts)


@every_method
def test_deltas_of_low_rank_are_merged(method: str) -> None:
    for shape in ((40, 60), (60, 40)):
        base = torch.zeros(shape)
        for rank in (1, 3):
            experts = [low_rank("low", rank, k, shape=shape, rank=rank) for k in range(3)]
            want = REFERENCES[method](Models(base, experts, [1.0] * 3))
            got = merge_tensor(method, base, experts)
            assert float((got - want).norm() / want.norm()) < 1e-5


@every_method
def test_experts_of_other_dtypes_than_the_base_are_merged(method: str) -> None:
    base, experts = random_matrices("mixed", shape=(16, 24), dtype=torch.bfloat16)
    others = [experts[0].float() + 1e-4, experts[1].half(), experts[2]]
    want = REFERENCES[method](Models(base, others, [1.0] * 3))
    assert near(merge_tensor(method, base, others), want, base, *others)


@every_method
@pytest.mark.parametrize("size", [1e-25, 1e-12, 1e8, 1e25])
def test_the_size_of_deltas_does_not_matter(method: str, size: float) -> None:
    _, experts = random_matrices("size", shape=(10, 30))
    base = torch.zeros(10, 30)
    plain = merge_tensor(method, base, experts)
    scaled = merge_tensor(method, base, [expert * size for expert in experts])
    assert float((scaled / size - plain).norm() / plain.norm()) < 1e-5


@every_method
def test_lines_scale_deeper_layers_more(method: str) -> None:
    base, experts = random_matrices("lines", shape=(8, 12))
    recipe = recipe_of(method, 3, parameters={"lambda": 0.5, "lines": 0.6})
    context = replace(context_of(recipe, base, experts), depth=0.5)
    rule = recipe.method.rule(context)
    assert is_whole(rule)
    (band,) = regroup(bands_of(base, experts), Unit.TENSOR, (8, 12))
    got = torch.from_numpy(rule.apply(band)).reshape(8, 12)  # type: ignore[union-attr]
    assert near(got, merge_tensor(method, base, experts, parameters={"lambda": 0.8}), base)


# -- experts that change nothing -----------------------------------------------------------------


@every_method
@every_dtype
def test_experts_that_are_the_base_change_nothing(method: str, dtype: torch.dtype) -> None:
    base, _ = random_matrices("still", shape=(20, 30), dtype=dtype)
    assert same(merge_tensor(method, base, [base, base]), base)


@every_method
def test_an_expert_that_did_not_change_a_matrix_leaves_it_to_the_others(method: str) -> None:
    base, experts = random_matrices("frozen", shape=(20, 30))
    alone = merge_tensor(method, base, experts[:2])
    assert torch.equal(merge_tensor(method, base, [experts[0], base, experts[1]]), alone)


@every_method
def test_an_expert_of_weight_zero_takes_no_part(method: str) -> None:
    for shape in ((20, 30), (40,)):
        base, experts = random_matrices("unwanted", shape=shape)
        alone = merge_tensor(method, base, experts[:2], weights=[0.5, 1.0])
        with_it = merge_tensor(method, base, experts, weights=[0.5, 1.0, 0.0])
        assert torch.equal(with_it, alone)


@every_method
def test_a_weight_is_the_same_as_a_smaller_delta(method: str) -> None:
    base = torch.zeros(20, 30)
    _, experts = random_matrices("smaller", shape=(20, 30))
    weighted = merge_tensor(method, base, experts, weights=[0.5, -2.0, 1.0])
    scaled = merge_tensor(method, base, [0.5 * experts[0], -2.0 * experts[1], experts[2]])
    assert near(weighted, scaled)


# -- which tensors are matrices ------------------------------------------------------------------


@every_method
@pytest.mark.parametrize(
    "shape", [(40,), (1, 40), (40, 1), (), (0, 5), (6, 3, 2), (8, 4, 2, 2), (3, 1, 20)]
)
def test_tensors_that_are_no_matrices_are_merged_by_the_mean(
    method: str, shape: tuple[int, ...]
) -> None:
    base, experts = random_matrices("vectors", shape=shape)
    assert not is_whole(rule_of(method, base, experts))
    weights = [0.5, -1.0, 0.75]
    got = merge_tensor(method, base, experts, weights=weights, parameters={"lambda": 0.7})
    if base.numel():
        want = reference.mean(Models(base, experts, weights), lam=0.7)
        assert near(got, want, base, *experts)
    assert got.shape == shape


@every_method
def test_embeddings_and_heads_are_merged_by_the_mean(method: str) -> None:
    base, experts = random_matrices("embedding", shape=(50, 12))
    rule = rule_of(method, base, experts, in_layers=False)
    assert isinstance(rule, Coefficients)
    assert rule.amplitudes.tolist() == pytest.approx([1 / 3] * 3)
    assert is_whole(rule_of(method, base, experts))


@every_method
def test_the_matrices_of_a_mixture_are_merged_one_by_one(method: str) -> None:
    base, experts = random_matrices("mixture", shape=(4, 6, 9))
    experts[0][2] = base[2]
    got = merge_tensor(method, base, experts)
    for place in range(4):
        alone = merge_tensor(method, base[place], [expert[place] for expert in experts])
        if method == "tsv" and place == 2:
            # Components are shared out among the experts that changed the tensor.
            assert near(got[place], reference_of_third(base[place], experts, place), base)
        else:
            assert torch.equal(got[place], alone)


def reference_of_third(base: torch.Tensor, experts: list[torch.Tensor], place: int) -> torch.Tensor:
    """Two experts' matrices, with a third of the components of each."""
    cut = []
    for expert in experts[1:]:
        u, s, v = torch.linalg.svd((expert[place] - base).double(), full_matrices=False)
        cut.append((u[:, :2] * s[:2]) @ v[:2])
    want = reference.tsv(Models(torch.zeros(base.shape), [c.float() for c in cut], [1.0, 1.0]))
    return base + want


@every_method
def test_planning_takes_a_matrix_for_the_weighted_sum(method: str) -> None:
    base, experts = random_matrices("plan", shape=(20, 30))
    rule = rule_of(method, base, experts, weights=[0.5, -2.0, 0.0])
    assert not isinstance(rule, Coefficients)
    assert rule.nearest.amplitudes.tolist() == [0.5, -2.0, 0.0]
    assert rule.nearest.keeps_base


# -- the same bits -------------------------------------------------------------------------------


def apply(rule: Rule, base: torch.Tensor, experts: list[torch.Tensor], threads: int) -> np.ndarray:
    assert not isinstance(rule, Coefficients)
    (band,) = regroup(bands_of(base, experts), rule.unit, tuple(base.shape))
    return rule.apply(replace(band, threads=threads))


@every_method
def test_blocks_may_be_cut_anywhere(method: str) -> None:
    base, experts = random_matrices("blocks", shape=(20, 30), dtype=torch.bfloat16)
    whole = merge_tensor(method, base, experts)
    for block in (1, 7, 30, 31, 599):
        assert torch.equal(merge_tensor(method, base, experts, block=block), whole)


@every_method
@pytest.mark.parametrize("shape", [(520, 560), (560, 520), (180, 1030)])
def test_the_number_of_threads_changes_no_bit(method: str, shape: tuple[int, int]) -> None:
    base, experts = random_matrices("threads", shape=shape)
    rule = rule_of(method, base, experts)
    want = apply(rule, base, experts, 1)
    for threads in (2, 5):
        assert np.array_equal(apply(rule, base, experts, threads), want)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 2)
        assert np.array_equal(apply(rule, base, experts, 2), want)
        assert torch.get_num_threads() == before + 2
    finally:
        torch.set_num_threads(before)


@every_method
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_executor_merges_matrices_of_several_blocks(method: str, threads: int) -> None:
    shape = (180, 2920)
    base, experts = random_matrices("executor", shape=shape, dtype=torch.bfloat16)
    assert base.numel() > BLOCK
    blocks = Blocks()
    stored = blocks.put(base)
    recipe = recipe_of(method, 3)
    rule = recipe.method.rule(context_of(recipe, base, experts))
    job = TensorJob(
        name="weight",
        dtype=stored.dtype,
        base=stored,
        experts=[blocks.put(expert) for expert in experts],
        layers=np.ones((3, len(stored)), np.uint8),
        rule=lambda found: rule,
    )
    merged = blocks.run([job], threads=threads)["weight"]
    assert same(blocks.get(merged), merge_tensor(method, base, experts))


@pytest.mark.parametrize(("unit", "seen"), [(Unit.TENSOR, 3), (Unit.ROW, 1), (Unit.ELEMENT, 1)])
def test_a_whole_tensor_is_given_all_threads(unit: Unit, seen: int) -> None:
    base, experts = random_matrices("given", shape=(20, 30))
    blocks = Blocks()
    stored = blocks.put(base)
    given = []

    def note(band: Band) -> np.ndarray:
        given.append(band.threads)
        return band.base

    rule = Banded(note, nearest=weighted([1.0]), unit=unit)
    job = TensorJob(
        name="weight",
        dtype=stored.dtype,
        base=stored,
        experts=[blocks.put(experts[0])],
        layers=np.ones((1, len(stored)), np.uint8),
        rule=lambda found: rule,
    )
    blocks.run([job], threads=3)
    assert given == [seen]


@every_method
def test_bands_are_not_written_to(method: str) -> None:
    base, experts = random_matrices("kept", shape=(20, 30))
    (band,) = regroup(bands_of(base, experts), Unit.TENSOR, (20, 30))
    before = band.base.copy(), band.deltas.copy()
    rule = rule_of(method, base, experts)
    assert not isinstance(rule, Coefficients)
    rule.apply(band)
    assert np.array_equal(band.base, before[0])
    assert np.array_equal(band.deltas, before[1])


# -- what is refused -----------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_refused_with_the_tensors_name(method: str, value: float) -> None:
    base, experts = random_matrices("broken", shape=(20, 30))
    experts[1][3, 4] = value
    with pytest.raises(NotFinite, match=r"tensor layer\.7"):
        merge_tensor(method, base, experts, name="layer.7")


def test_the_list_of_methods_needs_no_torch() -> None:
    code = "import sys, mergegit.merge.methods; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@every_method
def test_they_are_methods_of_whole_tensors_of_deltas(method: str) -> None:
    found = METHODS[method]
    assert found.needs.name == "TENSOR"
    assert found.merges.name == "DELTAS"
    assert not found.additive
