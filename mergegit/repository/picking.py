"""Task vectors as Git has commits: `cherry-pick`, `revert` and `rebase`, as recipes.

What an expert changed is its commit minus its first parent. Added to another commit, that is task
arithmetic (arXiv 2212.04089) on that commit, with the expert seen from its own base.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mergegit.errors import BadRecipe, NoBase
from mergegit.history import is_ancestor
from mergegit.merge.recipe import Recipe, make_recipe
from mergegit.merge.settings import Setting
from mergegit.objects import Commit, CommitId
from mergegit.repository import lineage
from mergegit.repository.naming import ResolvedRef, short
from mergegit.repository.reports import MergeReport, PlanReport
from mergegit.repository.subsets import recipe_without
from mergegit.storage.store import Store


@dataclass(frozen=True, slots=True)
class Errand:
    """What one of these verbs is to merge, and where to.

    ``without`` are the places of experts that a merge is made again without; ``of`` is that merge.
    ``moves`` is the ref that the result goes to, if it is a branch, ``replaces`` the commit that
    the branch may leave though the result does not descend from it.
    """

    verb: str
    recipe: Recipe
    moves: str
    message: str
    notes: tuple[str, ...] = ()
    of: Commit | None = None
    without: tuple[int, ...] = ()
    replaces: CommitId | None = None

    @property
    def is_exact(self) -> bool:
        """Whether what is taken out leaves no trace."""
        return self.of is not None


@dataclass(frozen=True, slots=True)
class Allowances:
    """What is let pass: tensors that the base lacks, and NaN and infinity."""

    ignore_extra: bool = False
    allow_nonfinite: bool = False


def cherry_pick(
    store: Store, expert: ResolvedRef, onto: ResolvedRef, scale: float, allowed: Allowances
) -> Errand:
    """Add what an expert changed to another commit. Raises ``NoBase`` and ``BadRecipe``."""
    notes = []
    if is_ancestor(expert.commit, onto.commit, store.commit):
        notes.append(
            f"{onto.name} is made of {expert.name} already: what it changed is added once more"
        )
    times = f" times {scale:g}" if scale != 1.0 else ""
    return Errand(
        verb="cherry-pick",
        recipe=_added(store, expert, onto, scale, allowed),
        moves=onto.name,
        message=f"cherry-pick {expert.name} onto {onto.name}{times}",
        notes=tuple(notes),
    )


def rebase(store: Store, expert: ResolvedRef, onto: ResolvedRef, allowed: Allowances) -> Errand:
    """Carry an expert to another base. Raises ``NoBase`` and ``BadRecipe``."""
    own = own_base(store, expert)
    if own.commit == onto.commit:
        raise BadRecipe(
            f"{expert.name} stands on {onto.name} already",
            hint="name the base that it is to be carried to",
        )
    return Errand(
        verb="rebase",
        recipe=_added(store, expert, onto, 1.0, allowed),
        moves=expert.name,
        message=f"rebase {expert.name} onto {onto.name}",
    )


def revert(
    store: Store, expert: ResolvedRef, out_of: ResolvedRef, scale: float, allowed: Allowances
) -> Errand:
    """Take out of a commit what an expert changed.

    Of a merge whose method adds experts up, it is made again without the expert; out of anything
    else what the expert changed is subtracted, ``scale`` times. Raises ``NoBase`` and
    ``BadRecipe``.
    """
    commit = store.commit(out_of.commit)
    message = f"revert {expert.name} from {out_of.name}"
    recipe = Recipe.from_json(commit.recipe) if commit.recipe is not None else None
    if recipe is not None and recipe.method.additive:
        places = tuple(k for k, e in enumerate(recipe.experts) if e.commit == expert.commit)
        if places:
            return _merged_without(out_of, commit, recipe, places, message, allowed)
        _refuse_other_version(recipe, expert, out_of)
    if recipe is not None and any(e.commit == expert.commit for e in recipe.experts):
        why = f"{out_of.name} was merged by {recipe.method.name}, which does not add experts up"
    elif is_ancestor(expert.commit, out_of.commit, store.commit):
        why = f"{out_of.name} is no merge of {expert.name} itself"
    else:
        why = f"{out_of.name} is not made of {expert.name}"
    return Errand(
        verb="revert",
        recipe=_added(store, expert, out_of, -scale, allowed),
        moves=out_of.name,
        message=message,
        notes=(f"{why}: what {expert.name} changed is subtracted, which is approximate",),
    )


def _merged_without(
    out_of: ResolvedRef,
    commit: Commit,
    recipe: Recipe,
    places: tuple[int, ...],
    message: str,
    allowed: Allowances,
) -> Errand:
    if len(places) == len(recipe.experts):
        raise BadRecipe(
            f"without {recipe.experts[places[0]].ref} nothing is left of {out_of.name} but its "
            f"base, commit {short(recipe.base)}",
            hint=f"move the branch there with `mergegit reset {out_of.name} {short(recipe.base)}`",
        )
    rest = recipe_without(recipe, places)
    return Errand(
        verb="revert",
        recipe=replace(
            rest,
            ignore_extra=rest.ignore_extra or allowed.ignore_extra,
            allow_nonfinite=rest.allow_nonfinite or allowed.allow_nonfinite,
        ),
        moves=out_of.name,
        message=message,
        notes=(f"{out_of.name} is merged again without {recipe.experts[places[0]].ref}: exact",),
        of=commit,
        without=places,
        replaces=out_of.commit,
    )


def _refuse_other_version(recipe: Recipe, expert: ResolvedRef, out_of: ResolvedRef) -> None:
    """Raise ``BadRecipe`` where a merge holds an expert of that name, but as it was before."""
    for other in recipe.experts:
        if other.ref == expert.name:
            raise BadRecipe(
                f"{out_of.name} was merged of {expert.name} as it was at {short(other.commit)}",
                hint=f"name that commit: `mergegit revert {short(other.commit)} --from "
                f"{out_of.name}`",
            )


def own_base(store: Store, expert: ResolvedRef) -> ResolvedRef:
    """What an expert's change is taken from: its first parent. Raises ``NoBase``."""
    parents = store.commit(expert.commit).parents
    if not parents:
        raise NoBase(
            f"{expert.name} was added without a base: what it changed is not known",
            hint=f"add it again with `mergegit add CHECKPOINT --name {expert.name} --base REF`",
        )
    return ResolvedRef(lineage.name_of(store, parents[0]), parents[0])


def _added(
    store: Store, expert: ResolvedRef, onto: ResolvedRef, scale: float, allowed: Allowances
) -> Recipe:
    own = own_base(store, expert)
    return make_recipe(
        method_name="task_arithmetic",
        base=(onto.name, onto.commit),
        experts=[(expert.name, expert.commit)],
        parameters={},
        expert_parameters=[{"weight": Setting.constant(scale)}],
        ignore_extra=allowed.ignore_extra,
        allow_nonfinite=allowed.allow_nonfinite,
        expert_bases=[(own.name, own.commit)],
    )


@dataclass(frozen=True, slots=True)
class ErrandReport:
    """What `cherry-pick`, `revert` or `rebase` did or, after a dry run, would do.

    ``merge`` is None after a dry run. ``is_exact`` where `revert` made a merge again without the
    expert. ``notes`` are for whoever asked.
    """

    verb: str
    plan: PlanReport
    merge: MergeReport | None
    is_exact: bool
    notes: tuple[str, ...]
