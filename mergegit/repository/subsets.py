"""A merge without some of its experts: its recipe, and the plan that reads the same of the rest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from mergegit.errors import BadRecipe
from mergegit.merge.plan import Planner
from mergegit.merge.recipe import ModelIndex, Recipe, VocabularyRequest, make_recipe
from mergegit.objects import Plan
from mergegit.repository.replaying import fitted, layers_of


def recipe_without(recipe: Recipe, left_out: Collection[int]) -> Recipe:
    """The same recipe without the experts at these places.

    Raises ``BadRecipe`` where that can't be: where the method needs more models, where layers or
    the vocabulary are those of an expert that is left out.
    """
    kept = [k for k in range(len(recipe.experts)) if k not in left_out]
    names = ", ".join(recipe.experts[k].ref for k in sorted(left_out))
    if recipe.slices:
        raise BadRecipe(
            f"{names} can't be left out of a merge of slices: its layers would be missing",
            hint="write the recipe that you mean (`mergegit show --recipe`), and merge that",
        )
    experts = [recipe.experts[k] for k in kept]
    files_from = recipe.files_from
    if files_from is not None:
        # Without the model whose files it took, a merge takes those of the first that is left.
        files_from = kept.index(files_from) if files_from in kept else 0
    return make_recipe(
        method_name=recipe.method.name,
        base=(recipe.base_ref, recipe.base),
        experts=[(expert.ref, expert.commit) for expert in experts],
        parameters=recipe.parameters,
        expert_parameters=[expert.parameters for expert in experts],
        seed=recipe.seed,
        dtype=recipe.dtype,
        ignore_extra=recipe.ignore_extra,
        allow_nonfinite=recipe.allow_nonfinite,
        files_from=files_from,
        vocabulary=_vocabulary_without(recipe.vocabulary, kept, names),
        chat_template=recipe.chat_template,
        expert_bases=[
            (expert.base_ref or "", expert.base) if expert.base is not None else None
            for expert in experts
        ],
    )


def _vocabulary_without(
    vocabulary: VocabularyRequest | None, kept: Sequence[int], names: str
) -> VocabularyRequest | None:
    if vocabulary is None:
        return None

    def place(model: ModelIndex) -> ModelIndex:
        if not isinstance(model, int):
            return model
        if model not in kept:
            raise BadRecipe(
                f"{names} can't be left out: the merged model has its tokens",
                hint="write the recipe that you mean (`mergegit show --recipe`), and merge that",
            )
        return kept.index(model)

    source = vocabulary.source
    return replace(
        vocabulary,
        source=place(source) if isinstance(source, int) else source,
        tokens={
            name: token if token.model is None else replace(token, model=place(token.model))
            for name, token in vocabulary.tokens.items()
        },
    )


def plan_without(
    plan: Plan, planner: Planner, others: Planner, left_out: Collection[int]
) -> Plan | None:
    """The plan of ``others``, a recipe without some experts, that reads the same of the rest.

    ``planner`` is that of ``plan``'s own recipe. None where its layers can't be read any more, or
    other tensors are merged without those experts.
    """
    now = fitted(plan, planner)
    if now is None or plan.tensors != others.problem.tensors:
        return None
    kept = [k for k in range(len(plan.experts)) if k not in left_out]
    return others.state_if_possible(np.ascontiguousarray(layers_of(now)[kept]), plan.budget_bytes)
