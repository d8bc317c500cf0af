"""Adapters as commits and as experts: what is stored, what is read, and what is merged."""

from __future__ import annotations

import json
import math
import shutil
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mergegit import MergegitError, Repository
from mergegit.errors import BadCheckpoint, BadRecipe, Damaged, Mismatch, NoBase, NotFinite
from mergegit.merge.mergekit_yaml import read_documents
from mergegit.repository.reports import MergeReport, PlanReport
from tests.adapters import CONFIG, PREFIX, WEIGHTS, Tensors, adapted, save_adapter, tuned_tensors
from tests.families import Family, generator, save_checkpoint
from tests.merge import reference, reference_spherical
from tests.merge.examples import needed_parameters
from tests.merge.reference import Models
from tests.repository.conftest import ADAPTERS, AUTHOR
from tests.repository.damage import flip, records
from tests.trees import tree_of

NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
UP = "model.layers.0.mlp.up_proj.weight"
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def shared(lora_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """The same for tests that only plan."""
    path = tmp_path_factory.mktemp("shared") / "lora"
    shutil.copytree(lora_template, path)
    with Repository.open(path, author=AUTHOR, threads=2) as repository:
        yield repository


def plan(
    repository: Repository, experts: Sequence[str], budget: str | None = None, **recipe: Any
) -> PlanReport:
    """A plan that reads all that it lists, whatever merges before it have made."""
    return repository.plan(repository.recipe(experts, **recipe), budget=budget, anew=True)


def merge(
    repository: Repository, experts: Sequence[str], budget: str | None = None, *,
    branch: str = "out", **recipe: Any,
) -> MergeReport:  # fmt: skip
    return repository.merge(plan(repository, experts, budget, **recipe), branch=branch)


def weights_bytes(path: Path) -> int:
    """Bytes of the tensors of an adapter's directory."""
    return sum(tensor.nbytes for tensor in load_file(path / WEIGHTS).values())


def is_rounded(got: torch.Tensor, wanted: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a bf16 tensor is ``wanted`` (float64), rounded once.

    What float32 loses is beside the base's elements: near zero it is many representable numbers.
    """
    assert got.dtype == torch.bfloat16
    half_a_step = wanted.abs() * 2**-8
    slack = 2**-21 * (base.double().abs() + wanted.abs())
    return bool(((got.double() - wanted).abs() <= half_a_step + slack).all())


# -- add -----------------------------------------------------------------------------------------


def test_an_adapter_is_stored_as_it_is_on_its_base(
    repository: Repository, adapters: Path, tmp_path: Path
) -> None:
    below = repository.add(adapters / "base")
    report = repository.add(adapters / "chat", base="base")
    assert (report.branch, report.is_new, report.is_adapter) == ("chat", True, True)
    assert (report.base, report.base_ref) == (below.commit, "base")
    assert repository.commit("chat").parents == (below.commit,)
    size = sum(file.stat().st_size for file in (adapters / "chat").iterdir())
    assert report.new_bytes <= size
    repository.checkout("chat", tmp_path / "out")
    assert tree_of(tmp_path / "out") == tree_of(adapters / "chat")


@pytest.mark.parametrize("named", ["base", "org/base", "../models/base/"])
def test_the_base_is_the_one_that_the_config_names(
    repository: Repository, adapters: Path, base: Tensors, tmp_path: Path, named: str
) -> None:
    repository.add(adapters / "base")
    repository.add(adapters / "math")
    report = repository.add(save_adapter(tmp_path / "chat", base, base_name=named))
    assert report.base_ref == "base"
    assert f"its config names {named} as its base" in report.notes


def test_the_whole_name_goes_before_its_last_part(
    repository: Repository, adapters: Path, base: Tensors, tmp_path: Path
) -> None:
    repository.add(adapters / "base")
    repository.add(adapters / "base", name="org/base", no_base=True)
    report = repository.add(save_adapter(tmp_path / "chat", base, base_name="org/base"))
    assert report.base == repository.resolve("org/base")


@pytest.mark.parametrize("named", ["org/other", None, 7])
def test_without_a_base_an_adapter_is_refused_with_what_to_do(
    repository: Repository, adapters: Path, base: Tensors, tmp_path: Path, named: Any
) -> None:
    repository.add(adapters / "base")
    with pytest.raises(NoBase, match="chat is an adapter") as caught:
        repository.add(save_adapter(tmp_path / "chat", base, base_name=named))
    assert "--base REF" in caught.value.hint
    if named == "org/other":
        assert "org/other" in caught.value.message
    assert list(repository.branches()) == ["base"]


def test_an_adapter_cant_be_a_base_of_its_own(lora: Repository, adapters: Path) -> None:
    with pytest.raises(NoBase, match="nothing without its base"):
        lora.add(adapters / "chat", name="alone", no_base=True)


def test_an_adapter_of_another_base_is_refused_and_nothing_is_stored(
    repository: Repository, tiny_family: Family, adapters: Path
) -> None:
    repository.add(tiny_family.base)
    before = repository.status()
    with pytest.raises(BadCheckpoint, match="chat changes tensor") as caught:
        repository.add(adapters / "chat", base="base")
    assert "base" in caught.value.hint
    assert repository.status() == before


@pytest.mark.parametrize("what", ["adapter", "model"])
def test_an_adapter_is_no_base(
    lora: Repository, adapters: Path, base: Tensors, tmp_path: Path, what: str
) -> None:
    path = adapters / "math"
    if what == "adapter":
        path = save_adapter(tmp_path / "more", base, seed="more")
    with pytest.raises((NoBase, Mismatch), match="adapter") as caught:
        lora.add(path, base="chat")
    assert caught.value.hint
    with pytest.raises(Mismatch, match="the base chat is an adapter"):
        plan(lora, ["math"], base="chat")


def test_adding_an_adapter_again_changes_nothing(lora: Repository, adapters: Path) -> None:
    before = lora.resolve("chat")
    for options in ({}, {"base": "base"}):
        report = lora.add(adapters / "chat", **options)
        assert (report.is_new, report.commit, report.new_bytes) == (False, before, 0)
    other = lora.add(adapters / "chat", name="again")
    assert other.commit == before


def test_on_another_base_an_adapter_is_another_model(
    lora: Repository, adapters: Path, tmp_path: Path
) -> None:
    first = lora.resolve("chat")
    report = lora.add(adapters / "chat", base="math")
    assert report.is_new
    assert lora.commit("chat").parents == (lora.resolve("math"), first)
    # Added once more, it stays on the base that it has.
    again = lora.add(adapters / "chat")
    assert (again.is_new, again.base_ref) == (False, "math")
    elsewhere = lora.add(adapters / "chat", name="third", base="base")
    assert elsewhere.commit == first


def test_a_new_version_of_an_adapter_keeps_its_base(
    lora: Repository, base: Tensors, tmp_path: Path
) -> None:
    before = lora.resolve("chat")
    path = save_adapter(tmp_path / "chat", base, base_name="elsewhere/unknown", seed="new")
    report = lora.add(path)
    assert report.is_new
    assert lora.commit("chat").parents == (lora.resolve("base"), before)


def test_what_lies_below_an_adapter_is_no_part_of_its_model(
    lora: Repository, adapters: Path, tmp_path: Path
) -> None:
    """Trainers leave directories of earlier steps, each an adapter itself."""
    shutil.copytree(adapters / "chat", tmp_path / "run")
    shutil.copytree(adapters / "half", tmp_path / "run" / "checkpoint-10")
    report = lora.add(tmp_path / "run")
    assert report.is_adapter
    merge(lora, ["run"], branch="of-run")
    merge(lora, ["chat"], branch="of-chat")
    assert lora.manifest("of-run").tensors == lora.manifest("of-chat").tensors
    lora.checkout("run", tmp_path / "out")
    assert tree_of(tmp_path / "out") == tree_of(tmp_path / "run")


def test_a_model_with_an_adapter_beside_it_is_a_model(
    lora: Repository, adapters: Path, tmp_path: Path
) -> None:
    path = save_checkpoint(tmp_path / "both", tuned_tensors("both"), shards=1)
    for file in (WEIGHTS, CONFIG):
        shutil.copy(adapters / "chat" / file, path / file)
    assert not lora.add(path).is_adapter
    merge(lora, ["both"])
    with pytest.raises(Mismatch, match="both is no adapter"):
        lora.checkout("both", tmp_path / "out", merged=True)


def test_other_weights_in_an_adapters_directory_are_refused(
    lora: Repository, adapters: Path, tmp_path: Path
) -> None:
    shutil.copytree(adapters / "chat", tmp_path / "chat")
    save_file({"x": torch.zeros(3)}, tmp_path / "chat" / "more.safetensors")
    with pytest.raises(BadCheckpoint, match=r"other weights in more\.safetensors"):
        lora.add(tmp_path / "chat")


def test_quantised_tensors_cant_be_changed(
    repository: Repository, base: Tensors, tmp_path: Path
) -> None:
    path = save_checkpoint(tmp_path / "base", base)
    narrow = {name: t.to(torch.float8_e4m3fn) if name == Q else t for name, t in base.items()}
    shutil.rmtree(path)
    path.mkdir()
    save_file(narrow, path / "model.safetensors")
    repository.add(path)
    with pytest.raises(BadCheckpoint, match=f"{Q}, which is F8_E4M3 in the base: quantised"):
        repository.add(save_adapter(tmp_path / "chat", base))


def test_factors_are_floats(lora: Repository, adapters: Path, tmp_path: Path) -> None:
    shutil.copytree(adapters / "half", tmp_path / "ints")
    tensors = {
        name: (t * 100).to(torch.int8) for name, t in load_file(tmp_path / "ints" / WEIGHTS).items()
    }
    save_file(tensors, tmp_path / "ints" / WEIGHTS)
    with pytest.raises(BadCheckpoint, match="in I8, and factors are floats"):
        lora.add(tmp_path / "ints")


# -- tied embeddings -----------------------------------------------------------------------------


def tied_base(path: Path, base: Tensors, *, head: bool, inside: bool = False) -> Path:
    """A base whose config ties the head to the embedding, with or without a tensor for it."""
    tensors = {name: t for name, t in base.items() if head or name != "lm_head.weight"}
    save_checkpoint(path, tensors)
    config = json.loads((path / "config.json").read_text())
    tie = {"tie_word_embeddings": True}
    config |= {"text_config": tie} if inside else tie
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("how", ["saved", "factored"])
def test_that_a_tied_head_changes_with_the_embedding_is_said(
    repository: Repository, base: Tensors, tmp_path: Path, how: str, inside: bool
) -> None:
    repository.add(tied_base(tmp_path / "base", base, head=False, inside=inside))
    changes: dict[str, Any] = {"saved": [EMBEDDING]}
    if how == "factored":
        changes = {"modules": ["q_proj", "embed_tokens"]}
    report = repository.add(save_adapter(tmp_path / "chat", base, **changes))
    (note,) = [note for note in report.notes if "ties the head" in note]
    assert EMBEDDING in note
    plain = repository.add(save_adapter(tmp_path / "plain", base))
    assert not any("ties" in note for note in plain.notes)


def test_a_change_of_a_tied_head_alone_would_be_lost_and_is_refused(
    repository: Repository, base: Tensors, tmp_path: Path
) -> None:
    repository.add(tied_base(tmp_path / "base", base, head=True))
    path = save_adapter(tmp_path / "chat", base, saved=["lm_head.weight"])
    with pytest.raises(BadCheckpoint, match=r"lm_head\.weight, which the base's config") as caught:
        repository.add(path)
    assert "tie_word_embeddings" in caught.value.hint
    assert list(repository.branches()) == ["base"]


def test_an_adapter_that_keeps_the_head_tied_needs_no_word(
    repository: Repository, base: Tensors, tmp_path: Path
) -> None:
    repository.add(tied_base(tmp_path / "base", base, head=False))
    path = save_adapter(tmp_path / "chat", base, saved=[EMBEDDING], ensure_weight_tying=True)
    tensors = load_file(path / WEIGHTS)
    tensors[f"{PREFIX}lm_head.weight"] = tensors[PREFIX + EMBEDDING].clone()
    save_file(tensors, path / WEIGHTS)
    report = repository.add(path)
    assert not any("ties" in note for note in report.notes)
    merge(repository, ["chat"])
    assert "lm_head.weight" not in repository.manifest("out").tensors


# -- what is planned and read ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_full_merge_reads_all_of_an_adapter_and_no_more(
    lora: Repository, adapters: Path, name: str
) -> None:
    planned = plan(lora, [name])
    (expert,) = planned.plan.experts
    whole = weights_bytes(adapters / name)
    assert expert.raw_bytes == planned.plan.raw_bytes == whole
    stored = sum(
        form.nbytes
        for tensor_id in lora.manifest(name).tensors.values()
        for forms in lora.store.forms(lora.tensor(tensor_id).blocks()).values()
        for form in forms
    )
    assert expert.planned_bytes == stored
    report = lora.merge(planned, branch="out")
    assert report.read_bytes == stored
    assert report.base_read_bytes == planned.plan.base_bytes
    assert planned.plan.predicted_error == 0


BUDGETS = ["0", "1%", "40%", "99.9%", "100%", "5KB"]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("experts", [("chat",), ("dora", "half"), ("math", "chat", "whole")])
def test_a_budget_is_kept_to_the_byte(
    lora: Repository, experts: tuple[str, ...], budget: str
) -> None:
    planned = plan(lora, experts, budget)
    assert planned.plan.budget_bytes is not None
    assert planned.plan.planned_bytes <= planned.plan.budget_bytes
    report = lora.merge(planned, branch="out")
    assert report.read_bytes == planned.plan.planned_bytes
    assert report.base_read_bytes == planned.plan.base_bytes
    if budget == "0":
        assert lora.manifest("out").tensors == lora.manifest("base").tensors
    if budget == "100%":
        full = merge(lora, experts, branch="full")
        assert lora.manifest(full.branch).tensors == lora.manifest("out").tensors


def layers_by_tensor(repository: Repository, planned: PlanReport, expert: int) -> dict[str, Any]:
    layers = np.frombuffer(planned.plan.experts[expert].layers, np.uint8)
    found, at = {}, 0
    for name in planned.plan.tensors:
        count = len(repository.tensor(repository.manifest("base").tensors[name]))
        found[name] = layers[at : at + count]
        at += count
    return found


@settings(deadline=None, max_examples=15)
@given(budget=st.integers(0, 300_000))
def test_a_tensor_is_computed_whole_or_not_at_all(shared: Repository, budget: int) -> None:
    planned = plan(shared, ["half"], str(budget))
    for layers in layers_by_tensor(shared, planned, 0).values():
        assert len(set(layers.tolist())) == 1
    factors = shared.manifest("half").tensors
    for name, layers in layers_by_tensor(shared, planned, 0).items():
        pair = [f"{PREFIX}{name[:-7]}.{kind}.weight" for kind in ("lora_A", "lora_B")]
        if pair[0] in factors and not layers.any():
            # What is not read would not have fitted any more.
            cost = sum(shared.tensor(factors[factor]).nbytes for factor in pair)
            assert planned.plan.planned_bytes + cost > budget


def test_the_same_adapter_twice_is_read_once_and_counts_twice(lora: Repository) -> None:
    once = plan(lora, ["chat"]).plan
    twice = plan(lora, ["chat", "chat"])
    assert twice.plan.planned_bytes == once.planned_bytes
    report = lora.merge(twice, branch="twice")
    assert report.read_bytes == once.planned_bytes
    assert report.base_read_bytes == twice.plan.base_bytes
    merge(lora, ["chat"], branch="doubled", parameters={"weight": 2})
    assert lora.manifest("twice").tensors == lora.manifest("doubled").tensors


def test_the_same_adapter_trimmed_in_two_ways_is_planned_as_it_is_read(lora: Repository) -> None:
    recipe = {"method": "ties", "parameters": {"density": 0.5}}
    lora.create_branch("again", "chat")
    parameters = {"chat.density": 0.5, "again.density": 0.2}
    for budget in ("50%", None):
        planned = plan(lora, ["chat", "again"], budget, method="ties", parameters=parameters)
        report = lora.merge(planned, branch=f"apart-{budget}".rstrip("%"))
        assert report.read_bytes == planned.plan.planned_bytes
        assert report.base_read_bytes == planned.plan.base_bytes
    assert planned.plan.planned_bytes > plan(lora, ["chat", "again"], **recipe).plan.planned_bytes


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "model_stock"])
@pytest.mark.parametrize("budget", [None, "60%"])
def test_what_was_merged_before_is_spared_as_it_was_planned(
    lora: Repository, method: str, budget: str | None
) -> None:
    """Of an adapter that is all of a tensor's factors, or nothing."""
    recipe = lora.recipe(["dora", "chat", "math"], method=method)
    first = lora.merge(lora.plan(recipe, budget=budget), branch="first")
    assert first.read_bytes > 0
    again = lora.plan(recipe, budget=budget)
    second = lora.merge(again, branch="second")
    spared = sum(map(sum, again.spared))
    assert second.read_bytes + spared == again.plan.planned_bytes
    assert second.base_read_bytes + again.spared_base_bytes == again.plan.base_bytes
    assert spared > 0.9 * again.plan.planned_bytes
    assert lora.manifest("first").tensors == lora.manifest("second").tensors


def test_an_adapter_of_weight_zero_costs_nothing_and_changes_nothing(lora: Repository) -> None:
    report = merge(lora, ["chat"], parameters={"weight": 0})
    assert (report.read_bytes, report.base_read_bytes) == (0, 0)
    assert lora.manifest("out").tensors == lora.manifest("base").tensors


@pytest.mark.parametrize(
    ("module", "unchanged", "dora"), [("embed_tokens", EMBEDDING, False), ("up_proj", UP, True)]
)
def test_a_tensor_that_is_saved_as_it_was_costs_nothing(
    lora: Repository, base: Tensors, tmp_path: Path, module: str, unchanged: str, dora: bool
) -> None:
    """PEFT saves the base's embedding beside the factors of a change to it."""
    modules = ["q_proj", module]
    for name, saved in (("bare", []), ("beside", [unchanged])):
        path = save_adapter(
            tmp_path / name, base, modules=modules, dtype=torch.bfloat16, dora=dora,
            unchanged=saved,
        )  # fmt: skip
        lora.add(path)
        report = merge(lora, [name], branch=f"of-{name}")
        assert report.base_read_bytes == report.plan.plan.base_bytes
    costs = [plan(lora, [name]).plan.planned_bytes for name in ("bare", "beside")]
    assert costs[0] == costs[1]
    assert lora.manifest("of-bare").tensors == lora.manifest("of-beside").tensors


@pytest.mark.parametrize("dora", [False, True])
def test_factors_on_a_saved_tensor_read_that_one_too(
    lora: Repository, base: Tensors, tmp_path: Path, dora: bool
) -> None:
    path = save_adapter(
        tmp_path / "both", base, modules=["up_proj"], dtype=torch.bfloat16, dora=dora
    )
    tensors = load_file(path / WEIGHTS)
    whole = base[UP].clone()
    whole[10950:] += torch.randn(50, 48, generator=generator("tail")).bfloat16() * 1e-2
    tensors[f"{PREFIX}{UP[:-7]}.base_layer.weight"] = whole
    save_file(tensors, path / WEIGHTS)
    lora.add(path)
    planned = plan(lora, ["both"])
    report = lora.merge(planned, branch="out")
    assert report.read_bytes == planned.plan.planned_bytes
    assert report.base_read_bytes == planned.plan.base_bytes
    wanted = adapted(path, base)
    assert is_rounded(lora.load("out")[UP], wanted[UP], base[UP])


@pytest.mark.parametrize("budget", ["5%", "60%"])
@pytest.mark.parametrize("experts", [("half",), ("half", "dora"), ("math", "half", "tokens")])
def test_the_predicted_error_is_close_to_the_achieved_one(
    lora: Repository, experts: tuple[str, ...], budget: str
) -> None:
    planned = plan(lora, experts, budget, dtype="F32")
    lora.merge(planned, branch="some")
    merge(lora, experts, branch="full", dtype="F32")
    some, full, below = (lora.load(name) for name in ("some", "full", "base"))
    missed = math.sqrt(sum(float((some[n] - full[n]).double().square().sum()) for n in full))
    whole = math.sqrt(sum(float((full[n] - below[n]).double().square().sum()) for n in full))
    predicted = planned.plan.predicted_error
    assert predicted == pytest.approx(missed / whole, rel=0.05, abs=1e-3)
    assert planned.plan.error_bound is not None
    assert missed <= planned.plan.merged_norm * planned.plan.error_bound * (1 + 1e-4)


# -- what is merged --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_alone_is_its_base_with_the_adapter_on_it(
    lora: Repository, adapters: Path, base: Tensors, name: str
) -> None:
    merge(lora, [name])
    wanted = adapted(adapters / name, base)
    for key, tensor in lora.load("out").items():
        assert is_rounded(tensor, wanted[key], base[key]), key
    unchanged = [key for key in base if torch.equal(wanted[key], base[key].double())]
    assert len(unchanged) < len(base)
    for key in unchanged:
        assert lora.manifest("out").tensors[key] == lora.manifest("base").tensors[key]


def models_of(
    experts: Sequence[Tensors], base: Tensors, name: str, weights: Sequence[float], **more: Any
) -> Models:
    return Models(
        base[name],
        [expert[name] for expert in experts],
        weights,
        precision=torch.float64,
        dtype=torch.float64,
        **more,
    )


@pytest.fixture
def pair(lora: Repository, adapters: Path, base: Tensors) -> list[Tensors]:
    """The models ``math`` and ``chat`` in float64."""
    theirs = {name: tensor.double() for name, tensor in lora.load("math").items()}
    return [theirs, adapted(adapters / "chat", base)]


PAIR = ["math", "chat"]
WEIGHTED = {"math.weight": 0.75, "chat.weight": 0.5}


def assert_near(
    got: Tensors, name: str, wanted: torch.Tensor, base: Tensors, skip: torch.Tensor | None = None
) -> None:
    """Rounded once, but where ``skip`` says that rounding decides what is kept."""
    keep = torch.ones_like(wanted, dtype=torch.bool) if skip is None else ~skip
    assert int((~keep).sum()) <= 3 + 0.03 * keep.numel()
    assert is_rounded(got[name][keep], wanted[keep], base[name][keep]), name


def test_task_arithmetic_with_a_model_is_the_reference(
    lora: Repository, pair: list[Tensors], base: Tensors
) -> None:
    merge(lora, PAIR, parameters=WEIGHTED)
    got = lora.load("out")
    for name in base:
        models = models_of(pair, base, name, [0.75, 0.5])
        assert_near(got, name, reference.task_arithmetic(models), base)


def test_linear_with_a_model_is_the_reference(
    lora: Repository, pair: list[Tensors], base: Tensors
) -> None:
    merge(lora, PAIR, method="linear", parameters=WEIGHTED)
    got = lora.load("out")
    for name in base:
        models = models_of(pair, base, name, [0.75, 0.5])
        assert_near(got, name, reference.linear(models), base)


def test_ties_with_a_model_is_the_reference(
    lora: Repository, pair: list[Tensors], base: Tensors
) -> None:
    parameters = {**WEIGHTED, "math.density": 0.3, "chat.density": 0.6}
    merge(lora, PAIR, method="ties", parameters=parameters)
    got = lora.load("out")
    for name in base:
        models = models_of(pair, base, name, [0.75, 0.5], densities=[0.3, 0.6])
        # A histogram's cell is about 2^-9 wide.
        skip = reference.undecided(models, 2.0**-8) | reference.close_elections(models)
        assert_near(got, name, reference.ties(models), base, skip)


@pytest.mark.slow
def test_dare_with_a_model_is_the_reference(
    lora: Repository, pair: list[Tensors], base: Tensors
) -> None:
    densities = {"math": 0.5, "chat": 0.4}
    masks = []
    for expert in PAIR:
        merge(
            lora, [expert], method="dare_linear", dtype="F32", seed=3, branch=f"only-{expert}",
            parameters={"density": densities[expert], "rescale": False},
        )  # fmt: skip
        alone = lora.load(f"only-{expert}")
        masks.append({name: alone[name] != base[name].float() for name in base})
    shares = {f"{name}.density": density for name, density in densities.items()}
    merge(lora, PAIR, method="dare_linear", seed=3, parameters={**WEIGHTED, **shares})
    got = lora.load("out")
    for name in base:
        models = models_of(
            pair, base, name, [0.75, 0.5],
            densities=[0.5, 0.4], masks=[mask[name] for mask in masks],
        )  # fmt: skip
        assert_near(got, name, reference.dare_linear(models), base)
    assert float(masks[1][UP].float().mean()) == pytest.approx(0.4, abs=0.01)


def test_slerp_with_a_model_is_the_reference(
    lora: Repository, pair: list[Tensors], base: Tensors
) -> None:
    report = merge(lora, PAIR, method="slerp", parameters={"t": 0.4})
    assert report.read_bytes == report.plan.plan.planned_bytes
    got = lora.load("out")
    for name in base:
        wanted = reference_spherical.slerp(pair[0][name], pair[1][name], 0.4)
        assert_near(got, name, wanted, base)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["wudi", "tsv", "iso_c", "model_stock", "consensus", "della"])
def test_other_methods_see_the_model_that_an_adapter_makes(
    lora: Repository, adapters: Path, base: Tensors, tmp_path: Path, method: str
) -> None:
    """The merge is that of the adapter's model, as it was added in float32."""
    full = {name: tensor.float() for name, tensor in adapted(adapters / "chat", base).items()}
    lora.add(save_checkpoint(tmp_path / "full", full, torch.float32), base="base")
    made = {}
    for expert in ("chat", "full"):
        report = merge(
            lora, ["math", expert], method=method, dtype="F32", branch=f"with-{expert}",
            parameters=needed_parameters(method),
        )  # fmt: skip
        assert report.read_bytes == report.plan.plan.planned_bytes
        made[expert] = lora.load(report.branch)
    for name in base:
        apart = (made["chat"][name] - made["full"][name]).double().norm()
        moved = (made["full"][name] - base[name]).double().norm()
        # Draws are keyed by contents, and those of the two differ.
        share = 1.5 if method == "della" else 1e-3
        assert float(apart) <= share * float(moved), name


@pytest.mark.parametrize("name", ["chat", "dora", "whole"])
def test_an_adapter_is_merged_on_another_base_than_its_own(
    lora: Repository, base: Tensors, tmp_path: Path, name: str
) -> None:
    """Its base is a fine-tune of the base of the merge: the expert's delta is both changes."""
    tuned = lora.load("math")
    options: dict[str, Any] = {
        "chat": {"saved": [NORM]},
        "dora": {"dora": True},
        "whole": {"saved": [EMBEDDING], "saved_dtype": torch.float32},
    }[name]
    path = save_adapter(tmp_path / "upon", tuned, seed="upon", **options)
    lora.add(path, base="math")
    planned = plan(lora, ["upon"], base="base")
    (expert,) = planned.plan.experts
    raw = sum(lora.tensor(i).nbytes for i in lora.manifest("math").tensors.values())
    assert expert.raw_bytes == weights_bytes(path) + raw
    report = lora.merge(planned, branch="out")
    assert report.read_bytes == planned.plan.planned_bytes
    assert report.base_read_bytes == planned.plan.base_bytes
    wanted = adapted(path, tuned)
    got = lora.load("out")
    for key in base:
        assert is_rounded(got[key], wanted[key], base[key]), key
    enough = merge(lora, ["upon"], "100%", branch="enough", base="base")
    assert lora.manifest(enough.branch).tensors == lora.manifest("out").tensors
    some = plan(lora, ["upon"], "20%", base="base")
    less = lora.merge(some, branch="some")
    assert less.read_bytes == some.plan.planned_bytes <= (some.plan.budget_bytes or 0)
    assert less.base_read_bytes == some.plan.base_bytes
    # On its own base it is read from the factors alone.
    own = plan(lora, ["upon"])
    assert own.plan.raw_bytes == weights_bytes(path)


GPT2 = {
    "wte.weight": (300, 64),
    "h.0.attn.c_attn.weight": (64, 192),
    "h.0.attn.c_attn.bias": (192,),
    "h.0.attn.c_proj.weight": (64, 64),
    "h.0.attn.c_proj.bias": (64,),
    "h.0.mlp.c_proj.weight": (256, 64),
    "h.0.mlp.c_proj.bias": (64,),
    "ln_f.weight": (64,),
}


@pytest.mark.parametrize("dora", [False, True])
def test_weights_that_are_stored_with_inputs_first(
    repository: Repository, tmp_path: Path, dora: bool
) -> None:
    tensors = {
        name: (torch.randn(shape, generator=generator(name)) * 0.02).bfloat16()
        for name, shape in GPT2.items()
    }
    repository.add(save_checkpoint(tmp_path / "base", tensors, shards=1))
    modules = ["c_attn", "c_proj", *([] if dora else ["wte"])]
    path = save_adapter(tmp_path / "chat", tensors, modules=modules, inputs_first=True, dora=dora)
    repository.add(path)
    merge(repository, ["chat"])
    wanted, got = adapted(path, tensors), repository.load("out")
    for name in tensors:
        assert is_rounded(got[name], wanted[name], tensors[name]), name
    assert not torch.equal(got["h.0.attn.c_proj.weight"], tensors["h.0.attn.c_proj.weight"])


def test_experts_of_two_versions_of_an_adapter_have_its_base(
    lora: Repository, base: Tensors, tmp_path: Path
) -> None:
    """In the history the older version is the ancestor of both."""
    lora.add(save_adapter(tmp_path / "chat", base, seed="newer"))
    recipe = lora.recipe(["chat", "chat@{1}"])
    assert recipe.base == lora.resolve("base")
    report = lora.merge(lora.plan(recipe), branch="both")
    again = lora.recipe([report.branch, "chat"])
    assert again.base == lora.resolve("base")


def test_whole_models_without_a_common_history_are_seen_from_the_adapters_base(
    lora: Repository, tmp_path: Path
) -> None:
    other = tuned_tensors("stranger")
    lora.add(save_checkpoint(tmp_path / "stranger", other), no_base=True)
    recipe = lora.recipe(["chat", "stranger"], method="slerp", parameters={"t": 0.5})
    assert recipe.base == lora.resolve("base")
    report = lora.merge(lora.plan(recipe), branch="out")
    files = lora.manifest(report.branch).files
    assert "config.json" in files
    assert CONFIG not in files


# -- slices and recipes ----------------------------------------------------------------------------


def document(text: str) -> Any:
    (found,) = read_documents(text)
    return found


def recipe_of(method: str, base: str | None, *models: str) -> str:
    """A recipe in mergekit's YAML."""
    asked: dict[str, Any] = {
        "merge_method": method,
        **({"base_model": base} if base else {}),
        "models": [{"model": model, "parameters": {"weight": 1}} for model in models],
    }
    return json.dumps(asked)  # which is YAML as well


STACKED = """
merge_method: passthrough
slices:
  - sources: [{model: chat, layer_range: [0, 2]}]
  - sources: [{model: chat, layer_range: [0, 1]}]
  - sources: [{model: dora, layer_range: [1, 2]}]
"""


def test_slices_of_an_adapter_are_those_of_its_model(
    lora: Repository, adapters: Path, base: Tensors
) -> None:
    """A layer that is there twice is computed for each place, and read as it is planned."""
    planned = lora.plan(lora.recipe_of(document(STACKED)))
    report = lora.merge(planned, branch="stacked")
    assert report.read_bytes == planned.plan.planned_bytes
    assert report.base_read_bytes == planned.plan.base_bytes
    got = lora.load("stacked")
    chat, dora = (adapted(adapters / name, base) for name in ("chat", "dora"))
    places = [(chat, 0), (chat, 1), (chat, 0), (dora, 1)]
    for layer, (model, own) in enumerate(places):
        for part in ("self_attn.q_proj", "mlp.up_proj", "input_layernorm"):
            below = f"model.layers.{own}.{part}.weight"
            made = got[f"model.layers.{layer}.{part}.weight"]
            assert is_rounded(made, model[below], base[below])
    manifest = lora.manifest("stacked")
    assert (
        manifest.tensors["model.layers.0.mlp.up_proj.weight"]
        == (manifest.tensors["model.layers.2.mlp.up_proj.weight"])
    )
    files = manifest.files
    assert CONFIG not in files
    config = json.loads(
        b"".join(map(lora.store.read_block, lora.tensor(files["config.json"]).blocks()))
    )
    assert config["num_hidden_layers"] == 4


def test_a_recipe_may_name_an_adapter_with_its_base(lora: Repository) -> None:
    text = recipe_of("linear", None, "base+chat", "math")
    recipe = lora.recipe_of(document(text))
    assert [expert.commit for expert in recipe.experts] == [
        lora.resolve("chat"),
        lora.resolve("math"),
    ]
    lora.merge(lora.plan(recipe), branch="by-recipe")
    merge(lora, ["chat", "math"], method="linear", branch="by-flags")
    assert lora.manifest("by-recipe").tensors == lora.manifest("by-flags").tensors
    wrong = text.replace("base+chat", "math+chat")
    with pytest.raises(BadRecipe, match="chat was not added as an adapter of math") as caught:
        lora.recipe_of(document(wrong))
    assert "--base math" in caught.value.hint


@pytest.mark.parametrize("base_is_known", [False, True])
def test_paths_of_a_base_and_an_adapter_are_added(
    repository: Repository, adapters: Path, base_is_known: bool
) -> None:
    """Whatever the adapter's config calls its base."""
    named = str(adapters / "base")
    if base_is_known:
        repository.add(adapters / "base", name="known")
        named = "known"
    text = recipe_of("task_arithmetic", named, f"{named}+{adapters / 'chat'}")
    recipe = repository.recipe_of(document(text))
    branch = "known" if base_is_known else "base"
    assert repository.commit("chat").parents == (repository.resolve(branch),)
    assert [expert.commit for expert in recipe.experts] == [repository.resolve("chat")]
    again = repository.recipe_of(document(text))
    assert again.experts == recipe.experts
    report = repository.merge(repository.plan(recipe), branch="out")
    assert report.read_bytes == weights_bytes(adapters / "chat")


def test_a_path_and_a_branch_may_be_joined(lora: Repository, adapters: Path) -> None:
    text = recipe_of("task_arithmetic", "base", f"{adapters / 'base'}+chat")
    recipe = lora.recipe_of(document(text))
    assert [expert.commit for expert in recipe.experts] == [lora.resolve("chat")]


def test_what_is_no_adapter_cant_be_put_on_a_base(lora: Repository, adapters: Path) -> None:
    text = recipe_of("task_arithmetic", "base", f"base+{adapters / 'math'}")
    before = lora.branches()
    with pytest.raises(MergegitError) as caught:
        lora.recipe_of(document(text))
    assert caught.value.hint
    assert lora.branches() == before


# -- many tensors, many threads --------------------------------------------------------------------

MANY = {
    f"model.layers.{layer}.{part}.weight": (24, 16)
    for layer in range(20)
    for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")
}


@pytest.fixture(scope="session")
def many_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of 60 small tensors, and 6 adapters that change all of them, two with lengths."""
    root = tmp_path_factory.mktemp("many")
    tensors = {
        name: (torch.randn(shape, generator=generator(name)) * 0.02).bfloat16()
        for name, shape in MANY.items()
    }
    modules = ["q_proj", "k_proj", "up_proj"]
    with Repository.init(root / "repository", author=AUTHOR) as repository:
        repository.add(save_checkpoint(root / "base", tensors, shards=1))
        for number in range(6):
            path = save_adapter(
                root / f"a{number}", tensors, modules=modules, seed=number, dora=number > 3
            )
            repository.add(path)
    return root / "repository"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "model_stock"])
@pytest.mark.parametrize("threads", [1, 3, 8])
def test_factors_and_lengths_are_read_once_for_each_tensor(
    many_template: Path, tmp_path: Path, method: str, threads: int
) -> None:
    """However many blocks of however many adapters are at work at once."""
    shutil.copytree(many_template, tmp_path / "many")
    experts = [f"a{number}" for number in range(6)]
    with Repository.open(tmp_path / "many", author=AUTHOR, threads=threads) as repository:
        planned = plan(repository, experts, method=method)
        report = repository.merge(planned, branch="out")
        assert report.read_bytes == planned.plan.planned_bytes
        assert report.read_bytes == sum(e.planned_bytes for e in planned.plan.experts)
        base = sum(
            repository.tensor(i).nbytes for i in repository.manifest("base").tensors.values()
        )
        # Once for the merge, and once for the lengths of each of two adapters.
        assert report.base_read_bytes == planned.plan.base_bytes == 3 * base


CROWD = 20


@pytest.fixture(scope="session")
def crowd_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of one tensor of two blocks, and more adapters of it than there are threads."""
    root = tmp_path_factory.mktemp("crowd")
    tensors = {"up_proj.weight": torch.randn(33000, 16, generator=generator("crowd")).bfloat16()}
    with Repository.init(root / "repository", author=AUTHOR) as repository:
        repository.add(save_checkpoint(root / "base", tensors, shards=1))
        for number in range(CROWD):
            path = save_adapter(root / f"a{number}", tensors, rank=1, seed=number)
            repository.add(path)
    return root / "repository"


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("method", ["linear", "model_stock"])
def test_factors_are_held_until_the_last_block_of_their_tensor(
    crowd_template: Path, tmp_path: Path, method: str, threads: int
) -> None:
    shutil.copytree(crowd_template, tmp_path / "crowd")
    experts = [f"a{number}" for number in range(CROWD)]
    with Repository.open(tmp_path / "crowd", author=AUTHOR, threads=threads) as repository:
        planned = plan(repository, experts, method=method)
        report = repository.merge(planned, branch="out")
        assert report.read_bytes == planned.plan.planned_bytes == CROWD * 4 * (33000 + 16)


@pytest.mark.slow
def test_memory_holds_the_factors_of_few_tensors(repository: Repository, tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.up_proj.weight" for layer in range(40)]
    tensors = {name: torch.randn(512, 384, generator=generator(name)).bfloat16() for name in names}
    repository.add(save_checkpoint(tmp_path / "base", tensors, shards=1))
    repository.add(save_adapter(tmp_path / "chat", tensors, rank=128), base="base")
    repository.threads = 2
    planned = plan(repository, ["chat"])
    assert planned.plan.raw_bytes > 18_000_000
    tracemalloc.start()
    try:
        repository.merge(planned, branch="out")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 14_000_000


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "slerp"])
def test_another_number_of_threads_gives_the_same_manifest(
    lora_template: Path, tmp_path: Path, method: str, threads: int
) -> None:
    made = {}
    for count in (threads, 3):
        shutil.copytree(lora_template, tmp_path / str(count))
        with Repository.open(tmp_path / str(count), author=AUTHOR, threads=count) as repository:
            report = merge(
                repository, ["dora", "half"], "70%", method=method,
                parameters=needed_parameters(method),
            )  # fmt: skip
            made[count] = repository.commit(report.branch).manifest, report.plan.id
    assert made[threads] == made[3]


# -- keeping ---------------------------------------------------------------------------------------


def test_a_repository_with_adapters_is_sound_and_can_be_collected(
    lora: Repository, adapters: Path, tmp_path: Path
) -> None:
    planned = plan(lora, ["chat", "dora"])
    lora.create_branch("gone", "half")
    lora.delete_branch("half")
    lora.delete_branch("gone")
    report = lora.gc(expire=0, grace=0)
    assert report.removed
    assert lora.fsck().is_clean
    assert plan(lora, ["chat", "dora"]).id == planned.id
    assert lora.merge(planned, branch="out").read_bytes == planned.plan.planned_bytes
    lora.checkout("chat", tmp_path / "chat")
    assert tree_of(tmp_path / "chat") == tree_of(adapters / "chat")


def test_repacking_leaves_adapters_readable(
    lora: Repository, adapters: Path, tmp_path: Path
) -> None:
    before = plan(lora, ["chat", "whole"])
    lora.repack(encoding="raw")
    lora.repack(["chat"], base="half")
    lora.repack()
    after = plan(lora, ["chat", "whole"])
    report = lora.merge(after, branch="out")
    assert report.read_bytes == after.plan.planned_bytes
    assert report.base_read_bytes == after.plan.base_bytes
    assert before.plan.tensors == after.plan.tensors
    lora.checkout("chat", tmp_path / "chat")
    assert tree_of(tmp_path / "chat") == tree_of(adapters / "chat")
    assert lora.fsck().is_clean


def test_a_catalog_made_anew_plans_the_same(lora: Repository) -> None:
    planned = plan(lora, ["chat", "dora"])
    root = lora.store.location.root
    lora.close()
    Repository.rebuild_catalog(root.parent)
    with Repository.open(root.parent, author=AUTHOR) as again:
        assert plan(again, ["chat", "dora"]).id == planned.id


def test_statistics_that_are_not_there_are_taken_again(lora: Repository) -> None:
    planned = plan(lora, ["chat", "dora"])
    catalog = lora.store.catalog
    made = {tensor for tensor, _ in catalog.all_statistics()} - {
        object_id for object_id, _ in catalog.objects()
    }
    assert made
    _forget_statistics(lora, made)
    told: list[str] = []
    recipe = lora.recipe(["chat", "dora"])
    again = lora.plan(recipe, progress=lambda what, done, total: told.append(what))
    assert "taking statistics" in told
    assert again.id == planned.id


def _forget_statistics(repository: Repository, tensors: set[bytes]) -> None:
    """Put packs in place of those with these statistics that lack them, as an old `gc` does."""
    from mergegit.repository.rewriting import copy_records, records_of
    from mergegit.storage.pack import Header, Kind

    store = repository.store
    with store.transaction() as transaction:
        drop = {}
        for number in store.catalog.packs():
            found = list(records_of(store, number))
            if any(h.kind is Kind.STATISTICS and h.key in tensors for h, _ in found):

                def is_needed(header: Header, _offset: int) -> bool:
                    return header.kind is not Kind.STATISTICS or header.key not in tensors

                for _ in copy_records(store, transaction, number, found, is_needed):
                    pass
                drop[number] = [header for header, _ in found]
        transaction.publish(drop=drop)


def test_a_branch_of_an_adapter_can_be_reset(
    lora: Repository, base: Tensors, tmp_path: Path
) -> None:
    before = plan(lora, ["chat"]).plan.planned_bytes
    lora.add(save_adapter(tmp_path / "chat", base, rank=2, seed="newer"))
    assert plan(lora, ["chat"]).plan.planned_bytes != before
    lora.reset_branch("chat", "chat@{1}")
    assert plan(lora, ["chat"]).plan.planned_bytes == before


@pytest.mark.parametrize("do", ["merge", "checkout"])
def test_a_damaged_factor_is_named(lora: Repository, tmp_path: Path, do: str) -> None:
    name = f"{PREFIX}{UP[:-7]}.lora_B.weight"
    block = lora.tensor(lora.manifest("chat").tensors[name]).block(0)
    planned = plan(lora, ["chat"])
    (record,) = [r for r in records(lora) if r.header.key == block]
    flip(record.pack, record.offset + 5)
    lora.store.forget()
    with pytest.raises(Damaged) as caught:  # noqa: PT012
        if do == "merge":
            lora.merge(planned, branch="out")
        else:
            lora.checkout("chat", tmp_path / "out", merged=True)
    assert name in caught.value.message
    assert "chat" in caught.value.message
    assert "out" not in lora.branches()
    assert not (tmp_path / "out").exists()


def test_a_saved_plan_is_carried_out_later(lora: Repository, base: Tensors, tmp_path: Path) -> None:
    planned = lora.plan(lora.recipe(["math", "chat"]), budget="30%", keep=True)
    lora.add(save_adapter(tmp_path / "chat", base, seed="newer"))
    report = lora.merge(lora.saved_plan(planned.id.hex()), branch="out")
    assert report.read_bytes == planned.plan.planned_bytes
    assert plan(lora, ["math", "chat"], "30%").id != planned.id


def test_factors_that_are_not_finite_are_refused_by_name(
    lora: Repository, adapters: Path, tmp_path: Path
) -> None:
    shutil.copytree(adapters / "half", tmp_path / "broken")
    tensors = load_file(tmp_path / "broken" / WEIGHTS)
    name = f"{PREFIX}{UP[:-7]}.lora_B.weight"
    tensors[name][3, 1] = math.nan
    save_file(tensors, tmp_path / "broken" / WEIGHTS)
    report = lora.add(tmp_path / "broken")
    assert any(name in note and "NaN" in note for note in report.notes)
    with pytest.raises(NotFinite, match=f"tensor {UP} of expert broken holds 48 elements"):
        plan(lora, ["broken"])
    planned = plan(lora, ["broken"], allow_nonfinite=True)
    lora.merge(planned, branch="out")
    got = lora.load("out")[UP]
    assert bool(got[3].isnan().all())
    assert bool(got[4].isfinite().all())
