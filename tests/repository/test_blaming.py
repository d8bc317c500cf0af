"""What tensors were made of: weights through chains of merges, what was read, and shares.

The small family's members move every weight by a step of their own, so that what is said of a
merged tensor can be added up and compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mergegit import Repository
from mergegit.errors import UnknownRef
from mergegit.merge.mergekit_yaml import read_documents
from mergegit.repository.blaming import BlameReport, Contribution, TensorBlame
from mergegit.repository.spots import UnknownTensor
from tests.families import generator
from tests.layered import LAYERS, STEPS, layer_of, make_family, save, weights
from tests.repository.lineages import ReadPlaces
from tests.vocabularies import EMBED, PROJ, make_chat_family

UP = "model.layers.2.mlp.up_proj.weight"
Merge = Callable[..., str]


@pytest.fixture(scope="module")
def steps_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("steps")
    with Repository.init(root / "repository", author="Ada <ada@example.org>") as repository:
        for checkpoint in make_family(root):
            repository.add(checkpoint)
        later = save(root / "later", {n: t + 4096.0 for n, t in weights(STEPS["math"]).items()})
        repository.add(later, base="math")
    return root / "repository"


@pytest.fixture
def steps(steps_path: Path) -> Iterator[Repository]:
    """Base, math, code and prose, and ``later``, trained further from math."""
    with Repository.open(steps_path) as repository:
        yield repository


STEP = {**STEPS, "later": STEPS["math"] + 4096.0}
"""By how much each model's weights are more than the base's."""


@pytest.fixture
def merge(steps: Repository) -> Merge:
    """Merge on a new branch; returns its name."""

    def make(experts: list[str], *, budget: str | None = None, **recipe: object) -> str:
        name = f"merge-{len(steps.branches())}"
        asked = steps.recipe(experts, **recipe)  # type: ignore[arg-type]
        return steps.merge(steps.plan(asked, budget=budget), branch=name).branch

    return make


def of(report: BlameReport, name: str) -> TensorBlame:
    return next(tensor for tensor in report.tensors if tensor.name == name)


def found(tensor: TensorBlame) -> dict[str, Contribution]:
    return {one.ref: one for one in tensor.contributions}


def weights_of(tensor: TensorBlame) -> dict[str, float]:
    return {one.ref: round(one.weight, 5) for one in tensor.contributions}


def check_sum(repository: Repository, branch: str, below: dict[str, float] | None = None) -> None:
    """That every tensor is the base and its contributions' deltas by their weights.

    ``below`` tells of contributors whose deltas are not from the base by how much their own base
    is more than it.
    """
    base, merged = repository.load("base"), repository.load(branch)
    for tensor in repository.blame(branch).tensors:
        total = base[tensor.name].double()
        for one in tensor.contributions:
            assert not one.caveats
            total = total + one.weight * (STEP[one.ref] - (below or {}).get(one.ref, 0.0))
        assert torch.allclose(merged[tensor.name].double(), total, atol=2e-3), tensor.name


def test_experts_have_the_weights_that_their_deltas_were_multiplied_by(
    steps: Repository, merge: Merge
) -> None:
    branch = merge(["math", "code"], parameters={"weight": 0.5, "code.weight": 0.25, "lambda": 2.0})
    report = steps.blame(branch)
    assert (report.method, report.base.name, report.base_is_merge) == (  # type: ignore[union-attr]
        "task_arithmetic", "base", False,
    )  # fmt: skip
    assert [expert.name for expert in report.experts] == ["math", "code"]
    assert all(weights_of(tensor) == {"math": 1.0, "code": 0.5} for tensor in report.tensors)
    check_sum(steps, branch)


def test_normalised_weights_are_divided(steps: Repository, merge: Merge) -> None:
    branch = merge(["math", "code"], method="linear", parameters={"math.weight": 3.0})
    assert weights_of(of(steps.blame(branch), UP)) == {"math": 0.75, "code": 0.25}
    check_sum(steps, branch)


def test_parameters_are_those_of_the_tensor(steps: Repository, merge: Merge) -> None:
    rules = [{"filter": "mlp", "value": [0.0, 3.0]}, {"value": 0.5}]
    branch = merge(["math", "code"], parameters={"math.weight": rules})
    report = steps.blame(branch)
    for tensor in report.tensors:
        layer = layer_of(tensor.name)
        expected = float(layer) if "mlp" in tensor.name and layer is not None else 0.5
        math_ = found(tensor).get("math")
        if expected == 0.0:
            assert math_ is not None
            assert math_.weight == 0.0
            assert math_.ways[0].reads[0].free == 1
        else:
            assert math_ is not None
            assert math_.ways[0].parameters == {"weight": expected}
            assert math_.weight == pytest.approx(expected)
    check_sum(steps, branch)


def test_shares_are_of_energies_times_weights_squared(steps: Repository, merge: Merge) -> None:
    branch = merge(["code", "prose"], parameters={"code.weight": 2.0, "prose.weight": 0.25})
    energies = {"code": (2.0 * 16) ** 2, "prose": (0.25 * 256) ** 2}
    for tensor in steps.blame(branch).tensors:
        elements = steps.tensor(steps.manifest("base").tensors[tensor.name]).elements
        for ref, one in found(tensor).items():
            assert one.share == pytest.approx(energies[ref] / sum(energies.values()))
            assert one.energy == pytest.approx(energies[ref] * elements)
        assert [one.ref for one in tensor.contributions] == ["prose", "code"]


def test_a_merge_is_followed_to_what_was_added_and_weights_are_multiplied(
    steps: Repository, merge: Merge
) -> None:
    inner = merge(["math", "code"], parameters={"weight": 0.5})
    middle = merge([inner, "code"], base="base", parameters={f"{inner}.weight": 0.5})
    outer = merge([middle, "prose"], base="base", parameters={f"{middle}.weight": 0.8})
    tensor = of(steps.blame(outer), UP)
    assert weights_of(tensor) == {"prose": 1.0, "code": 1.0, "math": 0.2}
    ways = {way.merges: round(way.weight, 5) for way in found(tensor)["code"].ways}
    assert ways == {(middle, inner): 0.2, (middle,): 0.8}
    assert found(tensor)["math"].ways[0].merges == (middle, inner)
    assert len(found(tensor)["math"].ways[0].reads) == 3
    assert sum(one.share for one in tensor.contributions) == pytest.approx(1.0)  # type: ignore[misc]
    check_sum(steps, outer)


def test_a_merge_on_another_base_brings_that_base_along(steps: Repository, merge: Merge) -> None:
    inner = merge(["later"], parameters={"weight": 0.5})  # on math
    outer = merge(
        [inner, "math"], base="base", parameters={f"{inner}.weight": 0.5, "math.weight": 0.25}
    )
    tensor = of(steps.blame(outer), UP)
    assert weights_of(tensor) == {"later": 0.25, "math": 0.75}
    assert {way.merges for way in found(tensor)["math"].ways} == {(inner,), ()}
    check_sum(steps, outer, {"later": STEP["math"]})


def test_where_a_merge_is_no_sum_the_weights_are_not_called_exact(
    steps: Repository, merge: Merge
) -> None:
    voted = merge(["math", "code"], method="ties", parameters={"density": 0.5})
    outer = merge([voted, "prose"], base="base", parameters={f"{voted}.weight": 0.5})
    contributions = found(of(steps.blame(outer), UP))
    assert contributions["prose"].caveats == ()
    assert contributions["code"].caveats == ("ties is more than a weighted sum",)
    assert contributions["code"].weight == pytest.approx(0.5)
    assert contributions["code"].ways[0].parameters["density"] == 0.5
    assert found(of(steps.blame(voted), UP))["math"].caveats


def test_random_dropping_is_exact_on_average_alone(steps: Repository, merge: Merge) -> None:
    branch = merge(
        ["math", "code"], method="dare_linear", parameters={"density": 0.5, "code.weight": 0.5}
    )
    code = found(of(steps.blame(branch), UP))["code"]
    assert code.weight == pytest.approx(0.5)  # kept by half, and doubled
    assert "on average" in code.caveats[0]


def test_a_base_that_is_scaled_is_said_to_be(steps: Repository, merge: Merge) -> None:
    branch = merge(
        ["math", "code"], method="linear", parameters={"normalize": False, "weight": 0.75}
    )
    assert found(of(steps.blame(branch), UP))["math"].caveats == (
        "the base counts with 1.5 and not with 1",
    )


def test_a_base_that_is_a_merge_is_named_as_one(steps: Repository, merge: Merge) -> None:
    inner = merge(["math", "code"])
    report = steps.blame(merge(["prose"], base=inner))
    assert report.base is not None
    assert (report.base.name, report.base_is_merge) == (inner, True)


def test_stacked_layers_name_where_they_are_from(steps: Repository) -> None:
    text = f"""
merge_method: passthrough
slices:
  - sources: [{{model: math, layer_range: [0, 2]}}]
  - sources: [{{model: code, layer_range: [1, {LAYERS}]}}]
name: stacked
"""
    (document,) = read_documents(text)
    steps.merge(steps.plan(steps.recipe_of(document)), branch="stacked")
    merged = steps.load("stacked")
    report = steps.blame("stacked")
    assert len(report.tensors) == len(merged)
    for tensor in report.tensors:
        (one,) = tensor.contributions
        assert tensor.origin == "copied"
        layer = layer_of(tensor.name)
        if layer is not None:
            ref, source = ("math", layer) if layer < 2 else ("code", layer - 1)
            assert one.ref == ref
            assert layer_of(one.tensor) == source
        assert torch.equal(merged[tensor.name], steps.load(one.ref)[one.tensor])


def test_copies_of_copies_name_where_they_were_made(steps: Repository) -> None:
    for name, model, layers in (("once", "prose", "[1, 4]"), ("twice", "once", "[1, 3]")):
        source = f"{{model: {model}, layer_range: {layers}}}"
        text = f"{{merge_method: passthrough, slices: [{{sources: [{source}]}}]}}"
        (document,) = read_documents(text)
        steps.merge(steps.plan(steps.recipe_of(document)), branch=name)
    for tensor in steps.blame("twice").tensors:
        (one,) = tensor.contributions
        assert one.ref == "prose"
        assert one.ways[0].merges == ("once",)
        layer = layer_of(tensor.name)
        assert layer_of(one.tensor) == (layer + 2 if layer is not None else None)


def test_merged_slices_name_each_experts_layer(steps: Repository) -> None:
    text = """
merge_method: task_arithmetic
base_model: base
slices:
  - sources: [{model: math, layer_range: [2, 4]}, {model: code, layer_range: [0, 2]}]
parameters: {weight: 0.5}
"""
    (document,) = read_documents(text)
    steps.merge(steps.plan(steps.recipe_of(document)), branch="sliced")
    tensor = of(steps.blame("sliced"), "model.layers.1.mlp.up_proj.weight")
    sources = {one.ref: layer_of(one.tensor) for one in tensor.contributions}
    assert sources == {"math": 3, "code": 1}


def test_tensors_that_were_not_merged_say_why(repository: Repository, tmp_path: Path) -> None:
    for name, step in (("base", 0.0), ("one", 1.0), ("two", 2.0)):
        tensors = {"w": torch.arange(300.0) + step, "ids": torch.arange(4), "own": torch.ones(2)}
        if name == "two":
            del tensors["own"]
        save_file(tensors, tmp_path / f"{name}.safetensors")
        repository.add(tmp_path / f"{name}.safetensors", base=None if name == "base" else "base")
    repository.merge(repository.plan(repository.recipe(["one", "two"])), branch="merged")
    report = repository.blame("merged")
    ids, own = of(report, "ids"), of(report, "own")
    assert (ids.origin, ids.contributions) == ("base", ())
    assert ids.note == "I64 can't be merged: the base's"
    assert own.note == "two lack it and count with the base's"
    assert weights_of(of(report, "w")) == {"one": 1.0, "two": 1.0}


def test_of_a_commit_that_is_no_merge_tensors_are_its_own_or_its_bases(
    lineages: Repository,
) -> None:
    report = lineages.blame("sparse")
    assert (report.method, report.experts) == (None, ())
    origins = {tensor.name: tensor.origin for tensor in report.tensors}
    assert [name for name, origin in origins.items() if origin == "own"] == [
        "model.layers.0.mlp.up_proj.weight"
    ]
    moved = of(report, "model.layers.0.mlp.up_proj.weight")
    assert (moved.blocks, moved.at_base) == (2, (1,))
    assert weights_of(moved) == {"sparse": 1.0}
    assert {t.origin for t in lineages.blame("grown").tensors} == {"own"}
    assert lineages.blame("grown").base is None


def test_what_was_read_adds_up_to_the_plan(lineages: Repository) -> None:
    commit = lineages.commit("both")
    assert commit.plan is not None
    plan = lineages.store.plan(commit.plan)
    report = lineages.blame("both")
    for expert in plan.experts:
        reads = [
            found(tensor)[expert.ref].ways[0].reads[0]
            for tensor in report.tensors
            if expert.ref in found(tensor)
        ]
        read = sum(one.whole + sum(one.partly.values()) for one in reads)
        assert read == expert.blocks_read
        assert sum(one.unread for one in reads) == expert.blocks_skipped
        layers = sum(layer * count for one in reads for layer, count in one.partly.items())
        whole = sum(one.whole for one in reads)
        # Whole blocks have five layers, or one where that was the smaller form.
        assert sum(expert.layers) - layers <= 5 * whole
        assert any(one.partly for one in reads)


def test_blocks_as_in_the_base_are_those_that_are(lineages: Repository) -> None:
    for tensor in lineages.blame("both").tensors:
        merged, base = (
            lineages.tensor(lineages.manifest(ref).tensors[tensor.name]) for ref in ("both", "base")
        )
        same = [n for n in range(len(base)) if merged.block(n) == base.block(n)]
        assert list(tensor.at_base) == same


def test_what_a_budget_left_unread_counts_for_nothing(lineages: Repository) -> None:
    """Shares are of the energy that was read: with less of one expert its share is smaller."""
    commit = lineages.commit("both")
    assert commit.plan is not None
    tensor = of(lineages.blame("both"), "model.layers.1.mlp.up_proj.weight")
    delta = (
        lineages.load("both")[tensor.name].double() - lineages.load("base")[tensor.name].double()
    )
    energy = sum(one.energy or 0.0 for one in tensor.contributions)
    # The experts' deltas are nearly at right angles: their energies add up to the merged one's.
    assert energy == pytest.approx(float(delta.square().sum()), rel=0.05)
    name, base = tensor.name, lineages.load("base")[tensor.name].double()
    whole = sum(
        0.16 * float((lineages.load(ref)[name].double() - base).square().sum())
        for ref in ("math", "code")
    )
    assert energy < 0.95 * whole


def test_no_block_is_read(lineages: Repository, read_places: ReadPlaces) -> None:
    lineages.blame("all")
    assert read_places.blocks(lineages) == []


def test_an_adapter_is_an_expert_like_another(repository: Repository, tmp_path: Path) -> None:
    module = "model.layers.0.self_attn.q_proj"
    base = torch.randn((32, 32), generator=generator("blame")) * 0.02
    save(tmp_path / "base", {f"{module}.weight": base, "model.norm.weight": torch.ones(4)})
    repository.add(tmp_path / "base")
    a, b = (torch.randn(shape, generator=generator(shape)) * 0.1 for shape in ((2, 32), (32, 2)))
    (tmp_path / "lora").mkdir()
    save_file(
        {
            f"base_model.model.{module}.lora_A.weight": a,
            f"base_model.model.{module}.lora_B.weight": b,
        },
        tmp_path / "lora" / "adapter_model.safetensors",
    )
    (tmp_path / "lora" / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}'
    )
    repository.add(tmp_path / "lora", base="base")
    recipe = repository.recipe(["lora"], parameters={"weight": 0.5})
    repository.merge(repository.plan(recipe), branch="merged")
    one = found(of(repository.blame("merged"), f"{module}.weight"))["lora"]
    assert one.weight == pytest.approx(0.5)
    assert one.energy == pytest.approx(
        0.25 * float((b.double() @ a.double()).square().sum()), rel=1e-4
    )
    own = repository.blame("lora")
    assert of(own, f"{module}.weight").origin == "own"
    assert of(own, "model.norm.weight").origin == "base"


def test_names_restrict_what_is_blamed(lineages: Repository) -> None:
    report = lineages.blame("all", patterns=["*.mlp.*"])
    assert [tensor.name for tensor in report.tensors] == [
        f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)
    ]


def test_what_is_not_there_is_refused(lineages: Repository) -> None:
    with pytest.raises(UnknownRef, match="nothing"):
        lineages.blame("nothing")
    with pytest.raises(UnknownTensor, match="no tensor is called like 'zzz'"):
        lineages.blame("all", patterns=["zzz"])


def test_shares_of_nothing_are_nothing(steps: Repository, merge: Merge) -> None:
    branch = merge(["math", "code"], parameters={"weight": 0.0})
    tensor = of(steps.blame(branch), UP)
    assert [one.share for one in tensor.contributions] == [0.0, 0.0]
    assert math.isclose(sum(one.weight for one in tensor.contributions), 0.0)


def test_merges_of_merges_of_merges_are_followed_in_a_moment(
    steps: Repository, merge: Merge
) -> None:
    """Each is made of the two before it: ways double from one to the next, work does not."""
    older, newer = merge(["math"]), merge(["code"])
    for _ in range(12):
        half = {f"{ref}.weight": 0.5 for ref in (older, newer)}
        older, newer = newer, merge([older, newer], base="base", parameters=half)
    for tensor in steps.blame(newer).tensors:
        assert sum(weights_of(tensor).values()) == pytest.approx(1.0, abs=1e-4)
        assert all(len(one.ways) <= 16 for one in tensor.contributions)
    check_sum(steps, newer)


def test_models_of_other_vocabularies_are_followed_as_far_as_rows_are_theirs(
    repository: Repository, tmp_path: Path
) -> None:
    models = make_chat_family(tmp_path / "models")
    for name, path in models.items():
        repository.add(path, base=None if name == "base" else "base", no_base=name == "base")

    def merge(experts: list[str], branch: str) -> None:
        recipe = repository.recipe(experts, base="base", tokenizer_source="union")
        repository.merge(repository.plan(recipe), branch=branch)

    merge(["math", "chat"], "first")
    merge(["first", "code"], "second")
    report = repository.blame("second")
    assert weights_of(of(report, PROJ)) == {"math": 1.0, "chat": 1.0, "code": 1.0}
    assert not any(one.caveats for one in of(report, PROJ).contributions)
    embedding = found(of(report, EMBED))
    assert embedding.keys() == {"first", "code"}
    assert embedding["first"].caveats == (
        "first was brought to another vocabulary, and is not followed further",
    )
    assert sum(one.share for one in embedding.values()) == pytest.approx(1.0)  # type: ignore[misc]
    told = repository.diff("base", "second", weights=True)
    assert {c.status for c in told.tensors if c.name == EMBED} == {"reshaped"}
