from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegit.merge.method import Doubles, Survey, TensorContext
from mergegit.merge.surveys import ColumnGram, Gram, RowGram
from tests.merge.tensors import bands_of, context_of, random_models, recipe_of

SURVEYS = {"whole": Gram, "rows": RowGram, "columns": ColumnGram}
Models = tuple[torch.Tensor, list[torch.Tensor]]


def models(shape: Sequence[int], experts: int = 2) -> Models:
    base, moved = random_models(
        "surveys", *shape, n=int(np.prod(shape)), experts=experts, dtype=torch.float32
    )
    return base.reshape(*shape), [expert.reshape(*shape) for expert in moved]


def context(made: Models) -> TensorContext:
    base, experts = made
    return context_of(recipe_of("task_arithmetic", len(experts)), base, experts)


def surveyed(survey: Survey, made: Models, block: int, order: Sequence[int] = ()) -> Doubles:
    """What a survey finds where bands are measured in any order and added in theirs."""
    bands = bands_of(*made, block)
    measured = {place: survey.measure(bands[place]) for place in order or range(len(bands))}
    for place in range(len(bands)):
        survey.add(measured[place])
    found: Doubles = survey.finish()
    return found


def expected(kind: str, made: Models) -> Doubles:
    base, experts = made
    reference = base.float().numpy()
    rows = [reference, *(expert.float().numpy() - reference for expert in experts)]
    stacked = np.stack([row.reshape(base.shape[0], -1) for row in rows]).astype(np.float64)
    how = {"whole": "irc,jrc->ij", "rows": "irc,jrc->rij", "columns": "irc,jrc->cij"}[kind]
    products: Doubles = np.einsum(how, stacked, stacked)
    return products


@pytest.mark.parametrize("kind", SURVEYS)
@settings(deadline=None)
@given(rows=st.integers(1, 6), columns=st.integers(1, 7), block=st.integers(1, 20))
def test_products_are_those_of_the_tensor_however_it_is_cut(
    kind: str, rows: int, columns: int, block: int
) -> None:
    made = models((rows, columns))
    got = surveyed(SURVEYS[kind](context(made)), made, block)
    want = expected(kind, made)
    assert got.shape == want.shape
    assert np.allclose(got, want, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("kind", SURVEYS)
def test_the_order_in_which_bands_are_measured_changes_no_bit(kind: str) -> None:
    made = models((7, 9), experts=3)
    there = surveyed(SURVEYS[kind](context(made)), made, 5)
    order = list(reversed(range(len(bands_of(*made, 5)))))
    back = surveyed(SURVEYS[kind](context(made)), made, 5, order)
    assert (there == back).all()


@pytest.mark.parametrize(("kind", "groups"), [("whole", ()), ("rows", (4,)), ("columns", (6,))])
def test_a_tensor_of_which_nothing_is_read_has_no_products(
    kind: str, groups: tuple[int, ...]
) -> None:
    survey = SURVEYS[kind](context(models((4, 6), experts=2)))
    assert (survey.finish() == np.zeros((*groups, 3, 3))).all()


def test_a_vector_is_one_row() -> None:
    made = models((11,))
    got = surveyed(RowGram(context(made)), made, 4)
    whole = surveyed(Gram(context(made)), made, 4)
    assert got.shape == (1, 3, 3)
    assert np.allclose(got[0], whole, rtol=1e-12, atol=1e-16)


def test_rows_run_along_the_last_axis() -> None:
    made = models((2, 3, 4))
    flat = made[0].reshape(6, 4), [expert.reshape(6, 4) for expert in made[1]]
    got = surveyed(RowGram(context(made)), made, 5)
    assert np.allclose(got, expected("rows", flat), rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("kind", SURVEYS)
def test_empty_tensors_are_surveyed(kind: str) -> None:
    made = torch.zeros(0, 3), [torch.zeros(0, 3)]
    found = SURVEYS[kind](context(made)).finish()
    assert not found.any()
