"""What holds for every method, whatever it computes."""

from __future__ import annotations

import math

import pytest
import torch

from mergegit.merge.methods import METHODS
from tests.merge.examples import experts_for, needed_parameters
from tests.merge.tensors import merge_tensor, random_models

Tensor = torch.Tensor
every_method = pytest.mark.parametrize("method", METHODS)


def merge(method: str, base: Tensor, experts: list[Tensor], block: int | None = None) -> Tensor:
    """As many of ``experts`` as the method takes, with its defaults."""
    places = [int(place) for place in experts_for(method, [str(k) for k in range(len(experts))])]
    return merge_tensor(
        method, base, [experts[place] for place in places], block=block,
        parameters=needed_parameters(method), seed=3,
    )  # fmt: skip


def family(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    base, experts = random_models("every", shape, n=math.prod(shape), experts=3, dtype=dtype)
    return base.reshape(shape), [expert.reshape(shape) for expert in experts]


@every_method
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3,), (5, 1), (2, 3, 4)])
def test_tensors_of_any_shape(method: str, shape: tuple[int, ...]) -> None:
    base, experts = family(shape, torch.bfloat16)
    got = merge(method, base, experts)
    assert got.shape == base.shape
    assert got.dtype == base.dtype
    assert bool(got.isfinite().all())


@every_method
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_empty_tensors(method: str, shape: tuple[int, ...]) -> None:
    base, experts = family(shape, torch.bfloat16)
    assert merge(method, base, experts).shape == shape


@every_method
@pytest.mark.parametrize("shape", [(), (30,), (12, 25)])
def test_where_no_expert_moved_nothing_is_changed(method: str, shape: tuple[int, ...]) -> None:
    base, _ = family(shape, torch.bfloat16)
    assert torch.equal(merge(method, base, [base] * 3), base)


@every_method
@pytest.mark.parametrize("block", [1, 13, 25, 100])
def test_blocks_may_be_cut_anywhere(method: str, block: int) -> None:
    base, experts = family((12, 25), torch.bfloat16)
    whole = merge(method, base, experts)
    assert torch.equal(merge(method, base, experts, block), whole)
    assert torch.equal(merge(method, base, experts), whole), "the same again"


@every_method
def test_one_expert_that_did_not_move_leaves_numbers(method: str) -> None:
    base, experts = family((12, 25), torch.float32)
    for place in range(3):
        some = [base if k == place else expert for k, expert in enumerate(experts)]
        assert bool(merge(method, base, some).isfinite().all())
