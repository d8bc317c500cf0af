"""WUDI: what its least squares mean, beside that they are the reference's (test_by_matrix)."""

from __future__ import annotations

import pytest
import torch

from mergegit.errors import BadRecipe
from mergegit.merge.methods import METHODS
from tests.merge import reference_spectral as reference
from tests.merge.methods.matrices import SHAPES, low_rank, near, random_matrices
from tests.merge.reference import Models
from tests.merge.tensors import merge_tensor

every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def merged(experts: list[torch.Tensor], ridge: float = 0.1) -> torch.Tensor:
    base = torch.zeros(experts[0].shape)
    return merge_tensor("wudi", base, experts, parameters={"ridge": ridge}).double()


def test_the_defaults_are_those_of_the_documentation() -> None:
    assert {p.name: p.default for p in METHODS["wudi"].parameters} == {
        "weight": 1.0, "lambda": 1.0, "lines": 0.0, "ridge": 0.1, "inputs_first": False,
    }  # fmt: skip


@every_shape
@pytest.mark.parametrize("ridge", [1e-6, 1e-3, 1.0, 100.0])
def test_the_ridge_is_beside_the_mean_eigenvalue(shape: tuple[int, int], ridge: float) -> None:
    base, experts = random_matrices("ridge", shape=shape)
    got = merge_tensor("wudi", base, experts, parameters={"ridge": ridge})
    want = reference.wudi(Models(base, experts, [1.0] * 3), ridge=ridge)
    assert near(got, want, base, *experts)


@pytest.mark.parametrize("experts", [1, 2, 3, 9])
def test_few_rows_and_many_are_the_same_formula(experts: int) -> None:
    """Below 90 / 10 experts another, cheaper system is solved."""
    base, models = random_matrices("rows", shape=(10, 90), experts=experts)
    weights = [1.0 - 0.3 * k for k in range(experts)]
    got = merge_tensor("wudi", base, models, weights=weights)
    assert near(got, reference.wudi(Models(base, models, weights)), base, *models)


@every_shape
def test_one_expert_is_shrunk_by_the_ridge(shape: tuple[int, int]) -> None:
    """s becomes s^3 / (s^2 + ridge |D|^2 / n) for each singular value s of the one delta."""
    _, (delta,) = random_matrices("alone", shape=shape, experts=1)
    u, s, v = torch.linalg.svd(delta.double(), full_matrices=False)
    epsilon = 0.1 * s.square().sum() / shape[1]
    want = u @ torch.diag(s**3 / (s**2 + epsilon)) @ v
    assert near(merged([delta]).float(), want.float(), delta)


@every_shape
def test_with_hardly_a_ridge_one_expert_is_itself(shape: tuple[int, int]) -> None:
    _, (delta,) = random_matrices("itself", shape=shape, experts=1)
    assert float((merged([delta], 1e-6) - delta).norm() / delta.norm()) < 2e-3


@every_shape
def test_the_same_expert_several_times_counts_once(shape: tuple[int, int]) -> None:
    _, (delta,) = random_matrices("twins", shape=shape, experts=1)
    assert near(merged([delta] * 4).float(), merged([delta]).float(), delta)
    base = torch.zeros(shape)
    got = merge_tensor("wudi", base, [delta] * 2, weights=[0.4, 1.0])
    assert near(got, merge_tensor("wudi", base, [delta], weights=[0.7]), delta)


def test_experts_of_different_inputs_do_not_disturb_each_other() -> None:
    _, (a, b) = random_matrices("inputs", shape=(20, 30), experts=2)
    a[:, 10:] = 0.0
    b[:, :12] = 0.0
    both = merged([a, b], 1e-6)
    assert float((both - (a + b)).norm() / (a + b).norm()) < 1e-3
    # Where they share inputs, neither is kept.
    b[:, :10] = a.flip(0)[:, :10]
    both = merged([a, b], 1e-6)
    assert float((both - (a + b)).norm() / (a + b).norm()) > 0.1


def test_experts_of_different_outputs_on_the_same_inputs_do() -> None:
    """It is about inputs, and not symmetric."""
    _, (a, b) = random_matrices("outputs", shape=(20, 30), experts=2)
    a[10:], b[:10] = 0.0, 0.0
    both = merged([a, b], 1e-6)
    assert float((both - (a + b)).norm() / (a + b).norm()) > 0.1


def test_no_other_matrix_interferes_less() -> None:
    _, experts = random_matrices("least", shape=(16, 24))
    deltas = [expert.double() for expert in experts]
    least = reference.interference(merged(experts, 1e-6), deltas)
    total = sum(deltas)
    for other in (total, total / 3, total / 2, deltas[0], torch.zeros_like(total)):
        assert least < 0.9 * reference.interference(other, deltas)
    for k in range(3):
        nudge = low_rank("nudge", k, shape=(16, 24), rank=2).double() * 1e-3
        assert least < reference.interference(merged(experts, 1e-6) + nudge, deltas)


def test_an_expert_with_small_deltas_has_as_much_say_as_one_with_large() -> None:
    """Where both act, the merge lies half way, as w_e has it."""
    direction = low_rank("say", shape=(12, 12), rank=12)
    small, large = 1e-3 * direction, direction
    both = merged([small, large], 1e-6)
    want = (small + large) / 2
    assert float((both - want).norm() / want.norm()) < 1e-2


@every_shape
def test_matrices_that_are_stored_with_inputs_first_are_transposed(shape: tuple[int, int]) -> None:
    base, experts = random_matrices("first", shape=shape)
    turned = merge_tensor(
        "wudi", base.T.contiguous(), [expert.T.contiguous() for expert in experts],
        parameters={"inputs_first": True},
    )  # fmt: skip
    assert near(turned.T.contiguous(), merge_tensor("wudi", base, experts), base)


def test_matrices_of_a_mixture_may_have_their_inputs_first() -> None:
    base, experts = random_matrices("mixed first", shape=(3, 8, 5))
    turned = merge_tensor(
        "wudi", base.transpose(1, 2).contiguous(),
        [expert.transpose(1, 2).contiguous() for expert in experts],
        parameters={"inputs_first": True},
    )  # fmt: skip
    want = merge_tensor("wudi", base, experts)
    assert near(turned.transpose(1, 2).contiguous(), want, base)


@pytest.mark.parametrize("value", [0.0, -0.1, 1e-7])
def test_a_ridge_that_could_not_be_inverted_is_refused(value: float) -> None:
    with pytest.raises(BadRecipe, match="at least 1e-06"):
        METHODS["wudi"].parameter("ridge").check(value, "ridge")  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [1, 2])
def test_the_least_ridge_can_be_inverted(rank: int) -> None:
    for shape in ((200, 300), (300, 200), (20, 300)):
        experts = [low_rank("invert", k, shape=shape, rank=rank) for k in range(3)]
        total = sum(experts)
        assert float((merged(experts, 1e-6) - total).norm() / total.norm()) < 0.3
