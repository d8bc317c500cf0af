"""TSV and Iso-C: what their singular values are, beside that they are the reference's
(test_by_matrix)."""

from __future__ import annotations

import pytest
import torch

from mergegit.merge.methods import METHODS
from tests.merge.methods.matrices import SHAPES, low_rank, near, random_matrices
from tests.merge.tensors import merge_tensor

every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
RANK = 1e-4


def sizes(matrix: torch.Tensor) -> torch.Tensor:
    return torch.linalg.svdvals(matrix.double())


def truncated(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    return ((u[:, :rank] * s[:rank]) @ v[:rank]).float()


def merged(
    method: str, experts: list[torch.Tensor], weights: list[float] | None = None
) -> torch.Tensor:
    return merge_tensor(method, torch.zeros(experts[0].shape), experts, weights=weights)


@pytest.mark.parametrize("method", ["tsv", "iso_c"])
def test_the_defaults_are_those_of_the_documentation(method: str) -> None:
    defaults = {p.name: p.default for p in METHODS[method].parameters}
    assert defaults == {"weight": 1.0, "lambda": 1.0, "lines": 0.0}


@pytest.mark.parametrize("method", ["tsv", "iso_c"])
@every_shape
def test_inputs_and_outputs_are_alike(method: str, shape: tuple[int, int]) -> None:
    _, experts = random_matrices("turned", shape=shape)
    turned = merged(method, [expert.T.contiguous() for expert in experts])
    assert near(turned.T.contiguous(), merged(method, experts), *experts)


# -- tsv -----------------------------------------------------------------------------------------


@every_shape
def test_one_expert_is_itself(shape: tuple[int, int]) -> None:
    _, (delta,) = random_matrices("alone", shape=shape, experts=1)
    assert torch.equal(merged("tsv", [delta]), delta)
    assert torch.equal(merged("tsv", [delta], [0.5]), 0.5 * delta)


@every_shape
@pytest.mark.parametrize("count", [2, 3])
def test_twins_are_the_leading_components_of_one(shape: tuple[int, int], count: int) -> None:
    """Each is cut to rank / K, and the directions that all share are shared out."""
    _, (delta,) = random_matrices("twins", shape=shape, experts=1)
    want = truncated(delta, max(min(shape) // count, 1))
    assert near(merged("tsv", [delta] * count), want, delta)


def test_experts_of_low_rank_that_have_nothing_in_common_add_up() -> None:
    a, b = torch.zeros(20, 30), torch.zeros(20, 30)
    a[:9, :14] = low_rank("a", shape=(9, 14), rank=4)
    b[9:, 14:] = low_rank("b", shape=(11, 16), rank=7)
    assert near(merged("tsv", [a, b]), a + b, a, b)


def test_vectors_are_set_apart() -> None:
    """The sum's singular values are those of the experts' leading components, and no others."""
    _, experts = random_matrices("apart", shape=(30, 40), experts=3)
    found = sizes(merged("tsv", experts))
    want = torch.cat([sizes(expert)[:10] for expert in experts]).sort(descending=True).values
    assert torch.allclose(found, want, rtol=1e-5)
    # Without that, directions that experts share pile up.
    plain = sizes(torch.stack([truncated(expert, 10) for expert in experts]).sum(0))
    assert float(plain[0]) > 1.1 * float(found[0])


def test_the_share_of_each_is_the_rank_by_the_number_of_experts_that_moved() -> None:
    _, experts = random_matrices("share", shape=(12, 40), experts=4)
    still = torch.zeros(12, 40)
    assert int((sizes(merged("tsv", experts)) > RANK).sum()) == 12
    three = merged("tsv", [*experts[:3], still])
    assert torch.equal(three, merged("tsv", experts[:3]))
    assert torch.allclose(sizes(three)[0], max(sizes(expert)[0] for expert in experts[:3]))


def test_more_experts_than_directions_keep_one_component_each() -> None:
    _, experts = random_matrices("many", shape=(3, 10), experts=5)
    found = merged("tsv", experts)
    assert bool(found.isfinite().all())
    assert 0 < float(found.norm()) < sum(float(expert.norm()) for expert in experts)


def test_components_of_size_zero_do_not_take_part() -> None:
    """Their vectors could be any, and would bend those of the other experts."""
    narrow = low_rank("narrow", shape=(20, 30), rank=1)
    _, (full,) = random_matrices("full", shape=(20, 30), experts=1)
    found = sizes(merged("tsv", [narrow, full]))
    want = torch.cat([sizes(narrow)[:1], sizes(full)[:10]]).sort(descending=True).values
    assert torch.allclose(found[:11], want, rtol=1e-5)
    assert float(found[11]) < 1e-6


# -- iso_c ---------------------------------------------------------------------------------------


@every_shape
def test_all_singular_values_become_their_mean(shape: tuple[int, int]) -> None:
    _, experts = random_matrices("equal", shape=shape)
    before, after = sizes(sum(experts)), sizes(merged("iso_c", experts))
    assert torch.allclose(after, before.mean().expand_as(after), rtol=1e-5)


def test_singular_vectors_stay() -> None:
    _, experts = random_matrices("vectors", shape=(20, 30))
    u, s, v = torch.linalg.svd(sum(experts).double(), full_matrices=False)
    inside = u.T @ merged("iso_c", experts).double() @ v.T
    assert torch.allclose(inside, s.mean() * torch.eye(20, dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize("rank", [1, 4])
def test_values_of_zero_stay_zero_and_do_not_count(rank: int) -> None:
    for shape in ((20, 30), (30, 20)):
        delta = low_rank("zeros", shape=shape, rank=rank)
        before, after = sizes(delta), sizes(merged("iso_c", [delta]))
        assert torch.allclose(after[:rank], before[:rank].mean().expand(rank), rtol=1e-4)
        assert float(after[rank]) < 1e-5 * float(after[0])


def test_rows_and_columns_that_nobody_changed_stay_the_bases() -> None:
    _, experts = random_matrices("rows", shape=(20, 30))
    for expert in experts:
        expert[4], expert[:, 7:9] = 0.0, 0.0
    got = merged("iso_c", experts)
    assert float(got[4].abs().max()) < 1e-7
    assert float(got[:, 7:9].abs().max()) < 1e-7
    assert float(got.abs().max()) > 1e-3


def test_deltas_that_cancel_leave_the_base() -> None:
    base, (expert,) = random_matrices("cancel", shape=(20, 30), experts=1)
    got = merge_tensor("iso_c", base, [expert, expert], weights=[1.0, -1.0])
    assert torch.equal(got, base)
