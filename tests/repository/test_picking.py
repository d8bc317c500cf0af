"""`cherry-pick`, `revert` and `rebase`: what experts changed, on other commits than their base."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergegit import Repository
from mergegit.errors import BadRecipe, Mismatch, NoBase, NotFinite, RefConflict
from mergegit.merge.mergekit_yaml import read_documents, write_documents
from mergegit.merge.method import Merges
from mergegit.merge.methods import METHODS
from mergegit.merge.recipe import Recipe
from mergegit.repository.picking import ErrandReport
from mergegit.repository.recipes import document_of
from tests.adapters import adapted, save_adapter
from tests.families import EXPERTS, Family, base_tensors, expert_tensors, save_checkpoint
from tests.merge.examples import experts_for, needed_parameters
from tests.repository.conftest import AUTHOR

Tensors = dict[str, torch.Tensor]
UP = "model.layers.0.mlp.up_proj.weight"
EMBED = "model.embed_tokens.weight"
DELTA_METHODS = [name for name, method in METHODS.items() if method.merges is Merges.DELTAS]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, family: Family) -> Path:
    """The family, ``next`` (another base), ``pair`` (math and code, merged at 20%)."""
    root = tmp_path_factory.mktemp("picking")
    path = root / "repository"
    with Repository.init(path, author=AUTHOR) as repository:
        repository.add(family.base)
        for expert in family.experts:
            repository.add(expert)
        repository.add(save_checkpoint(root / "next", base_tensors(5)), no_base=True)
        recipe = repository.recipe(["math", "code"])
        repository.merge(repository.plan(recipe, budget="20%"), branch="pair")
    return path


@pytest.fixture
def zoo(template: Path, tmp_path: Path) -> Iterator[Repository]:
    shutil.copytree(template, tmp_path / "zoo")
    with Repository.open(tmp_path / "zoo", author=AUTHOR) as repository:
        yield repository


def added(
    onto: Mapping[str, torch.Tensor], expert: Mapping[str, torch.Tensor],
    base: Mapping[str, torch.Tensor], scale: float = 1.0,
) -> Tensors:  # fmt: skip
    """onto + scale (expert - base), in float32, rounded once to the dtype of ``onto``."""
    return {
        name: (
            tensor.float() + scale * (expert[name].float() - base[name].float())
        ).to(tensor.dtype)
        for name, tensor in onto.items()
    }  # fmt: skip


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[n].view(torch.uint8), other[n].view(torch.uint8)) for n in one
    )


def norm(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    squares = [(one[name].double() - other[name].double()).square().sum() for name in one]
    return float(torch.stack(squares).sum().sqrt())


def obeys_its_plan(report: ErrandReport) -> bool:
    """Whether what was read is what was planned."""
    merge, plan = report.merge, report.plan.plan
    assert merge is not None
    read = (merge.read_bytes, merge.base_read_bytes)
    return read == (report.plan.read_bytes, plan.base_bytes)


# -- cherry-pick ---------------------------------------------------------------------------------


def test_what_an_expert_changed_is_added_to_another_commit(zoo: Repository) -> None:
    before = zoo.resolve("pair")
    onto, expert, base = (zoo.load(ref) for ref in ("pair", "prose", "base"))
    report = zoo.cherry_pick("prose", onto="pair")
    assert same(zoo.load("pair"), added(onto, expert, base))
    assert obeys_its_plan(report)
    commit = zoo.commit("pair")
    assert commit.parents == (before, zoo.resolve("prose"))
    assert commit.message == "cherry-pick prose onto pair"
    assert zoo.reflog("pair")[0].reason == "cherry-pick prose onto pair"
    assert report.notes == ()


def test_it_is_added_as_often_as_one_likes(zoo: Repository) -> None:
    onto, expert, base = (zoo.load(ref) for ref in ("pair", "prose", "base"))
    zoo.cherry_pick("prose", onto="pair", scale=-0.75)
    assert same(zoo.load("pair"), added(onto, expert, base, -0.75))
    assert zoo.commit("pair").message == "cherry-pick prose onto pair times -0.75"


def test_on_its_own_base_it_is_the_merge_of_one(zoo: Repository) -> None:
    report = zoo.cherry_pick("prose", onto="base", branch="picked")
    merged = zoo.merge(zoo.plan(zoo.recipe(["prose"])), branch="merged")
    assert zoo.manifest("picked").tensors == zoo.manifest("merged").tensors
    assert report.plan.id == merged.plan.id


def test_blocks_that_it_did_not_change_are_neither_read_nor_written(
    zoo: Repository, tmp_path: Path
) -> None:
    tensors = {**base_tensors(), UP: expert_tensors(base_tensors(), "sparse")[UP]}
    zoo.add(save_checkpoint(tmp_path / "sparse", tensors), base="base")
    before = zoo.manifest("pair").tensors
    report = zoo.cherry_pick("sparse", onto="pair")
    after = zoo.manifest("pair").tensors
    assert {name for name in before if before[name] != after[name]} == {UP}
    assert obeys_its_plan(report)
    assert report.plan.plan.write_bytes == zoo.tensor(after[UP]).nbytes


def test_a_block_is_the_unit_of_what_is_not_changed(zoo: Repository, tmp_path: Path) -> None:
    base = base_tensors()
    moved = base[UP].clone()
    moved[-1] += 0.01  # in the last of its blocks
    zoo.add(save_checkpoint(tmp_path / "dotted", {**base, UP: moved}), base="base")
    before = zoo.tensor(zoo.manifest("pair").tensors[UP])
    report = zoo.cherry_pick("dotted", onto="pair")
    after = zoo.tensor(zoo.manifest("pair").tensors[UP])
    assert [before.block(i) == after.block(i) for i in range(len(before))] == [True, False]
    assert obeys_its_plan(report)


@pytest.mark.parametrize("budget", ["0", "3%", "10%", "25%"])
def test_a_budget_is_spent_on_the_expert_alone(zoo: Repository, budget: str) -> None:
    onto, expert, base = (zoo.load(ref) for ref in ("pair", "prose", "base"))
    report = zoo.cherry_pick("prose", onto="pair", budget=budget)
    plan = report.plan.plan
    assert plan.raw_bytes == sum(tensor.nbytes for tensor in expert.values())
    assert plan.budget_bytes is not None
    assert plan.planned_bytes <= plan.budget_bytes
    assert obeys_its_plan(report)
    full = added(onto, expert, base)
    error = norm(zoo.load("pair"), full) / norm(full, onto)
    assert error == pytest.approx(plan.predicted_error, rel=0.1)
    suffix = f" under {budget}"
    assert zoo.commit("pair").message == f"cherry-pick prose onto pair{suffix}"


def test_a_budget_of_everything_is_the_full_one_bit_for_bit(zoo: Repository) -> None:
    zoo.cherry_pick("prose", onto="pair", branch="full")
    zoo.cherry_pick("prose", onto="pair", budget="100%", branch="enough")
    assert zoo.commit("full").manifest == zoo.commit("enough").manifest


def test_it_can_be_made_again_and_verified(zoo: Repository) -> None:
    zoo.cherry_pick("prose", onto="pair", budget="10%")
    assert zoo.replay("pair").is_same
    assert zoo.verify("pair", replay=True).is_sound
    assert zoo.distance("pair").error == pytest.approx(
        zoo.saved_plan("pair").plan.predicted_error, rel=0.1
    )
    zoo.repack(["prose"], encoding="raw")
    with pytest.raises(BadRecipe, match="can't be read any more"):
        zoo.replay("pair")


def test_a_dry_run_changes_nothing(zoo: Repository) -> None:
    refs, objects = zoo.branches(), zoo.status().objects
    report = zoo.cherry_pick("prose", onto="pair", budget="10%", dry_run=True)
    assert report.merge is None
    assert report.plan.plan.planned_bytes > 0
    assert (zoo.branches(), zoo.status().objects) == (refs, objects)


def test_what_is_no_branch_does_not_move(zoo: Repository) -> None:
    with pytest.raises(RefConflict, match="pair~1 is no branch"):
        zoo.cherry_pick("prose", onto="pair~1")
    report = zoo.cherry_pick("prose", onto="pair~1", branch="other", message="so be it")
    assert report.merge is not None
    assert report.merge.branch == "other"
    assert zoo.commit("other").message == "so be it"


def test_a_merge_is_picked_as_what_it_changed_of_its_base(zoo: Repository) -> None:
    onto, expert, base = (zoo.load(ref) for ref in ("prose", "pair", "base"))
    zoo.cherry_pick("pair", onto="prose", branch="all")
    assert same(zoo.load("all"), added(onto, expert, base))


def test_what_is_picked_can_be_picked_on(zoo: Repository) -> None:
    """The first parent is what it was picked onto, and the change is the expert's."""
    zoo.cherry_pick("prose", onto="pair")
    onto, expert, base = (zoo.load(ref) for ref in ("next", "pair", "pair~1"))
    zoo.cherry_pick("pair", onto="next")
    assert same(zoo.load("next"), added(onto, expert, base))


def test_to_add_it_once_more_is_worth_a_note(zoo: Repository) -> None:
    report = zoo.cherry_pick("math", onto="pair")
    assert report.notes == ("pair is made of math already: what it changed is added once more",)


def test_the_result_has_the_dtypes_and_files_of_what_it_is_added_to(
    zoo: Repository, tmp_path: Path
) -> None:
    base = base_tensors()
    wide = {name: tensor * 1.5 for name, tensor in base.items()}
    path = save_checkpoint(tmp_path / "wide", wide, torch.float32, shards=1)
    counter = torch.arange(7)
    save_file(
        {**load_file(path / "model.safetensors"), "counter": counter, "more": wide[EMBED][:3]},
        path / "model.safetensors",
    )
    zoo.add(path, no_base=True)
    onto, expert, own = (zoo.load(ref) for ref in ("wide", "math", "base"))
    report = zoo.cherry_pick("math", onto="wide")
    result = zoo.load("wide")
    assert obeys_its_plan(report)
    assert torch.equal(result["counter"], counter)
    assert torch.equal(result["more"], onto["more"])
    picked = {name: onto[name] for name in expert}
    assert same({name: result[name] for name in expert}, added(picked, expert, own))
    assert {t.dtype for t in result.values()} == {torch.float32, torch.int64}
    assert zoo.manifest("wide").files["config.json"] == zoo.manifest("wide~1").files["config.json"]


def test_an_expert_of_other_dtypes_than_its_base(zoo: Repository, tmp_path: Path) -> None:
    base = {name: tensor.bfloat16().float() for name, tensor in base_tensors().items()}
    half = save_checkpoint(tmp_path / "half", expert_tensors(base, "half"), torch.float16)
    zoo.add(half, base="base")
    onto, expert, own = (zoo.load(ref) for ref in ("next", "half", "base"))
    report = zoo.cherry_pick("half", onto="next")
    assert obeys_its_plan(report)
    assert same(zoo.load("next"), added(onto, expert, own))


# -- adapters ------------------------------------------------------------------------------------


@pytest.fixture
def lora(zoo: Repository, tmp_path: Path) -> Repository:
    base = {name: tensor.bfloat16() for name, tensor in base_tensors().items()}
    save_adapter(tmp_path / "chat", base, saved=["model.norm.weight"], seed="chat")
    save_adapter(tmp_path / "dora", base, dora=True, seed="dora")
    for name in ("chat", "dora"):
        zoo.add(tmp_path / name, base="base")
    return zoo


@pytest.mark.parametrize("name", ["chat", "dora"])
def test_an_adapter_is_carried_to_another_base(lora: Repository, tmp_path: Path, name: str) -> None:
    onto, own = lora.load("next"), lora.load("base")
    report = lora.rebase(name, onto="next")
    assert obeys_its_plan(report)
    wanted = {
        key: onto[key].double() + (tensor - own[key].double())
        for key, tensor in adapted(tmp_path / name, own).items()
    }
    got = lora.load(name)
    delta = norm(wanted, onto)
    assert norm(got, wanted) < 0.2 * delta  # what is left is bf16's rounding
    rounded = {key: tensor.to(got[key].dtype) for key, tensor in wanted.items()}
    assert norm(got, rounded) < 0.02 * delta
    changed = {n for n, i in lora.manifest(name).tensors.items()
               if i != lora.manifest("next").tensors[n]}  # fmt: skip
    assert all("layernorm" not in key and "embed" not in key for key in changed)


@pytest.mark.parametrize("budget", ["0", "30%", "60%"])
def test_an_adapter_is_read_within_a_budget(lora: Repository, budget: str) -> None:
    report = lora.cherry_pick("chat", onto="pair", budget=budget)
    plan = report.plan.plan
    assert plan.budget_bytes is not None
    assert plan.planned_bytes <= plan.budget_bytes < plan.raw_bytes < 1_000_000
    assert obeys_its_plan(report)
    assert lora.replay("pair").is_same


# -- rebase --------------------------------------------------------------------------------------


def test_an_expert_is_carried_to_another_base(zoo: Repository) -> None:
    before = zoo.resolve("math")
    onto, expert, base = (zoo.load(ref) for ref in ("next", "math", "base"))
    report = zoo.rebase("math", onto="next")
    assert same(zoo.load("math"), added(onto, expert, base))
    assert obeys_its_plan(report)
    commit = zoo.commit("math")
    assert commit.parents == (zoo.resolve("next"), before)
    assert commit.message == "rebase math onto next"


def test_later_merges_take_the_new_base_for_theirs(zoo: Repository) -> None:
    """Though the old one is an ancestor of all of them too, and the two have nothing in common."""
    for expert in EXPERTS[:2]:
        zoo.rebase(expert, onto="next")
    assert zoo.recipe(EXPERTS[:2]).base == zoo.resolve("next")
    assert zoo.recipe(["math"]).base == zoo.resolve("next")
    with pytest.raises(NoBase):
        zoo.recipe(["math", "next", "base"])
    assert zoo.recipe(["math", "prose"]).base == zoo.resolve("base")


def test_on_its_base_there_is_nothing_to_do(zoo: Repository) -> None:
    with pytest.raises(BadRecipe, match="math stands on base already"):
        zoo.rebase("math", onto="base")


def test_what_it_did_not_change_may_have_another_shape_there(
    zoo: Repository, tmp_path: Path
) -> None:
    base = base_tensors()
    frozen = expert_tensors(base, "frozen") | {n: base[n] for n in (EMBED, "lm_head.weight")}
    zoo.add(save_checkpoint(tmp_path / "frozen", frozen), base="base")
    grown = base_tensors(5)
    for name in (EMBED, "lm_head.weight"):
        grown[name] = torch.cat([grown[name], grown[name][:20]])
    zoo.add(save_checkpoint(tmp_path / "grown", grown), no_base=True)
    report = zoo.rebase("frozen", onto="grown")
    assert obeys_its_plan(report)
    assert zoo.manifest("frozen").tensors[EMBED] == zoo.manifest("grown").tensors[EMBED]
    with pytest.raises(Mismatch, match=r"math changed tensor .* \[700, 96\] .* \[720, 96\]"):
        zoo.rebase("math", onto="grown")


def test_what_was_added_without_a_base_changed_nothing_that_is_known(zoo: Repository) -> None:
    with pytest.raises(NoBase, match="next was added without a base"):
        zoo.rebase("next", onto="base")


def test_what_its_base_lacks_can_not_be_carried(zoo: Repository, tmp_path: Path) -> None:
    base = base_tensors()
    less = {name: tensor for name, tensor in base.items() if name != UP}
    zoo.add(save_checkpoint(tmp_path / "less", less), no_base=True)
    zoo.add(save_checkpoint(tmp_path / "odd", expert_tensors(base, "odd")), base="less")
    with pytest.raises(Mismatch, match=r"odd has tensor .*, which its base less lacks"):
        zoo.rebase("odd", onto="base")


def test_what_the_new_base_lacks_is_left_out_where_that_is_allowed(
    zoo: Repository, tmp_path: Path
) -> None:
    less = {name: tensor for name, tensor in base_tensors(5).items() if name != UP}
    zoo.add(save_checkpoint(tmp_path / "less", less), no_base=True)
    with pytest.raises(Mismatch, match="which base less lacks"):
        zoo.rebase("math", onto="less")
    report = zoo.rebase("math", onto="less", ignore_extra=True)
    assert obeys_its_plan(report)
    assert UP not in zoo.manifest("math").tensors


def test_infinite_weights_go_on_where_that_is_allowed(zoo: Repository, tmp_path: Path) -> None:
    broken = expert_tensors(base_tensors(), "broken")
    broken[UP][0, 0] = float("inf")
    zoo.add(save_checkpoint(tmp_path / "broken", broken), base="base")
    with pytest.raises(NotFinite):
        zoo.rebase("broken", onto="next")
    zoo.rebase("broken", onto="next", allow_nonfinite=True)
    assert float(zoo.load("broken")[UP][0, 0]) == float("inf")


# -- revert --------------------------------------------------------------------------------------


def test_an_additive_merge_is_made_again_without_the_expert(zoo: Repository) -> None:
    old, layers = zoo.resolve("pair"), zoo.saved_plan("pair").plan.experts[0].layers
    report = zoo.revert("code", out_of="pair")
    assert report.is_exact
    assert report.notes == ("pair is merged again without code: exact",)
    commit = zoo.commit("pair")
    assert commit.parents == (zoo.resolve("base"), zoo.resolve("math"))
    assert zoo.resolve("code") not in {commit_id for commit_id, _ in zoo.log("pair")}
    assert report.plan.plan.experts[0].layers == layers
    assert zoo.resolve("pair@{1}") == old
    assert zoo.reflog("pair")[0].reason == "revert code from pair"
    assert zoo.verify("pair", replay=True).is_sound


def test_with_a_budget_the_others_are_read_by_that(zoo: Repository) -> None:
    report = zoo.revert("code", out_of="pair", budget="100%")
    assert report.plan.plan.predicted_error == 0.0
    zoo.merge(zoo.plan(zoo.recipe(["math"])), branch="alone")
    assert zoo.manifest("pair").tensors == zoo.manifest("alone").tensors


def test_a_mean_is_that_of_the_others(zoo: Repository) -> None:
    recipe = zoo.recipe(EXPERTS, method="linear")
    zoo.merge(zoo.plan(recipe), branch="mean")
    report = zoo.revert("code", out_of="mean")
    assert report.is_exact
    zoo.merge(zoo.plan(zoo.recipe(["math", "prose"], method="linear")), branch="two")
    assert zoo.manifest("mean").tensors == zoo.manifest("two").tensors


def test_what_was_left_is_not_lost(zoo: Repository) -> None:
    recipe = zoo.recipe(EXPERTS)
    zoo.merge(zoo.plan(recipe), branch="three")
    zoo.revert("code", out_of="three", branch="two")
    assert len(zoo.commit("three").parents) == 4
    with pytest.raises(RefConflict, match="would not move forward"):
        zoo.revert("code", out_of="three", branch="code")


def test_stored_otherwise_the_others_are_read_in_full(zoo: Repository) -> None:
    zoo.repack(["math"], encoding="raw")
    report = zoo.revert("code", out_of="pair")
    assert report.is_exact
    assert any("they are read in full" in note for note in report.notes)
    assert report.plan.plan.predicted_error == 0.0


def test_of_the_last_expert_only_the_base_is_left(zoo: Repository) -> None:
    zoo.revert("code", out_of="pair")
    with pytest.raises(BadRecipe, match="nothing is left") as error:
        zoo.revert("math", out_of="pair")
    assert f"mergegit reset pair {zoo.resolve('base').hex()[:10]}" in error.value.hint


def test_a_version_that_was_not_merged_is_not_mistaken(zoo: Repository, family: Family) -> None:
    old = zoo.resolve("code").hex()[:10]
    zoo.add(family.experts[2], name="code", base="base")
    with pytest.raises(BadRecipe, match=f"code as it was at {old}"):
        zoo.revert("code", out_of="pair")
    assert zoo.revert(old, out_of="pair").is_exact


@pytest.mark.parametrize(
    ("method", "why"), [("ties", "was merged by ties"), ("della", "was merged by della")]
)
def test_out_of_other_merges_it_is_subtracted(zoo: Repository, method: str, why: str) -> None:
    zoo.merge(
        zoo.plan(zoo.recipe(EXPERTS, method=method, parameters={"density": 0.5})), branch="voted"
    )
    before = zoo.resolve("voted")
    onto, expert, base = (zoo.load(ref) for ref in ("voted", "code", "base"))
    report = zoo.revert("code", out_of="voted", scale=0.5)
    assert not report.is_exact
    assert why in report.notes[0]
    assert "approximate" in report.notes[0]
    assert same(zoo.load("voted"), added(onto, expert, base, -0.5))
    assert zoo.commit("voted").parents == (before, zoo.resolve("code"))


def test_what_was_picked_before_is_subtracted_nearly_to_nothing(zoo: Repository) -> None:
    zoo.cherry_pick("prose", onto="pair")
    zoo.cherry_pick("math", onto="pair")
    report = zoo.revert("prose", out_of="pair")
    assert "is no merge of prose itself" in report.notes[0]
    assert not report.is_exact
    onto, expert, base = (zoo.load(ref) for ref in ("pair~3", "math", "base"))
    delta = norm(zoo.load("prose"), base)
    assert norm(zoo.load("pair"), added(onto, expert, base)) < 0.1 * delta


def test_what_was_never_in_it_is_said(zoo: Repository) -> None:
    assert "pair is not made of prose" in zoo.revert("prose", out_of="pair").notes[0]


# -- recipes in which experts have their own bases -----------------------------------------------


def test_its_recipe_can_be_written_and_read(zoo: Repository) -> None:
    zoo.cherry_pick("prose", onto="pair", scale=0.5)
    recipe = Recipe.from_json(zoo.commit("pair").recipe or {})
    text = write_documents([document_of(recipe)])
    assert "base_model: base@" in text
    read = zoo.recipe_of(read_documents(text)[0])
    assert read.to_json() | {"base": 0, "experts": 0} == recipe.to_json() | {
        "base": 0,
        "experts": 0,
    }
    assert (read.base, read.experts[0].base) == (recipe.base, recipe.experts[0].base)
    zoo.merge(zoo.plan(read), branch="again")
    assert zoo.manifest("again").tensors == zoo.manifest("pair").tensors


def carried(repository: Repository, method: str, **recipe: Any) -> Recipe:
    """A recipe of the experts, seen from their base, on ``next``."""
    experts = experts_for(method, EXPERTS)
    parameters = needed_parameters(method)
    lines = [f"- {{model: {expert}, base_model: base}}" for expert in experts]
    given = ", ".join(f"{key}: {value}" for key, value in parameters.items())
    text = "\n".join(
        [f"merge_method: {method}", "base_model: next", "models:", *lines,
         f"parameters: {{{given}}}"]
    )  # fmt: skip
    return repository.recipe_of(read_documents(text)[0])


@pytest.mark.parametrize("method", DELTA_METHODS)
def test_every_method_of_deltas_reads_what_it_plans_on_another_base(
    zoo: Repository, method: str
) -> None:
    recipe = carried(zoo, method)
    for budget in ("20%", None):
        plan = zoo.plan(recipe, budget=budget)
        report = zoo.merge(plan, branch=f"{method}-{budget}".rstrip("%"))
        assert report.read_bytes == plan.plan.planned_bytes
        assert report.base_read_bytes == plan.plan.base_bytes
    assert zoo.replay(report.branch).is_same


@pytest.mark.parametrize("method", ["ties", "dare_ties", "breadcrumbs", "task_arithmetic"])
@pytest.mark.parametrize("budget", ["15%", "100%"])
def test_what_is_merged_is_the_same_change_as_on_their_own_base(
    zoo: Repository, method: str, budget: str
) -> None:
    own = zoo.recipe(
        experts_for(method, EXPERTS), method=method, parameters=needed_parameters(method),
        dtype="F32",
    )  # fmt: skip
    zoo.merge(zoo.plan(own, budget=budget, anew=True), branch="own")
    moved = carried(zoo, method).to_json() | {"dtype": "F32"}
    zoo.merge(zoo.plan(Recipe.from_json(moved), budget=budget), branch="moved")
    result, there = zoo.load("own"), zoo.load("moved")
    base, other = zoo.load("base"), zoo.load("next")
    changes = [{n: one[n].double() - two[n].double() for n in one}
               for one, two in ((result, base), (there, other))]  # fmt: skip
    assert norm(*changes) < 1e-4 * norm(result, base)


def test_an_expert_is_seen_from_an_ancestor_alone(zoo: Repository) -> None:
    text = "merge_method: ties\nbase_model: next\nmodels: [{model: math, base_model: code}]\n"
    with pytest.raises(BadRecipe, match="math does not descend from code"):
        zoo.plan(zoo.recipe_of(read_documents(text)[0]))


def test_whole_models_have_no_bases_of_their_own(zoo: Repository) -> None:
    text = "merge_method: linear\nmodels: [{model: math, base_model: base}, {model: next}]\n"
    with pytest.raises(BadRecipe, match="linear merges whole models"):
        zoo.recipe_of(read_documents(text)[0])


def test_the_card_says_what_was_added(zoo: Repository) -> None:
    zoo.cherry_pick("prose", onto="pair")
    card = zoo.manifest("pair").files["README.md"]
    text = b"".join(map(zoo.store.read_block, zoo.tensor(card).blocks())).decode()
    assert "| prose (what it changed of base) |" in text


def test_what_was_carried_is_blamed_on_who_changed_it(zoo: Repository) -> None:
    math = zoo.resolve("math")
    zoo.cherry_pick("prose", onto="pair", scale=0.5, budget="10%")
    (one,) = next(t for t in zoo.blame("pair").tensors if t.name == UP).contributions
    assert (one.ref, one.weight, one.share) == ("prose", 0.5, 1.0)
    assert one.ways[0].reads[0].partly
    zoo.rebase("math", onto="next")
    zoo.merge(zoo.plan(zoo.recipe(["math"], parameters={"weight": 0.5})), branch="half")
    (one,) = next(t for t in zoo.blame("half").tensors if t.name == UP).contributions
    assert (one.commit, one.weight, one.share) == (math, 0.5, 1.0)


def test_what_was_carried_is_compared_without_reading(zoo: Repository) -> None:
    zoo.rebase("math", onto="next")
    told, read = (
        {change.name: change.norm for change in zoo.diff("next", "math", exact=exact).tensors}
        for exact in (False, True)
    )
    assert read[UP] is not None
    assert told[UP] is not None
    assert told[UP].value == pytest.approx(read[UP].value, rel=0.02)
