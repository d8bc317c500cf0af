"""Recipes in mergekit's YAML: what they mean for a repository's models, and what comes out."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from mergegit import Repository
from mergegit.errors import BadRecipe, Mismatch, NoBase, UnknownRef
from mergegit.merge.mergekit_yaml import Document, read_documents, write_documents
from mergegit.merge.method import Merges
from mergegit.merge.methods import METHODS
from mergegit.merge.recipe import Recipe
from mergegit.repository import manifests
from mergegit.repository.recipes import document_of, in_order, models_of
from mergegit.repository.reports import MergeReport
from tests.layered import LAYERS, STEPS, Tensors, layer_of, make_family, save, weights
from tests.merge.examples import experts_for, needed_parameters
from tests.merge.reference import ulps

EXPERTS = ("math", "code", "prose")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories base, math, code and prose."""
    root = tmp_path_factory.mktemp("models")
    make_family(root)
    return root


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Repository]:
    """A repository with the family in it. Tests make branches of their own in it."""
    with Repository.init(tmp_path_factory.mktemp("family"), author="Ada <a@b>") as repository:
        for name in STEPS:
            repository.add(models / name)
        yield repository


def read(text: str) -> Document:
    (document,) = read_documents(textwrap.dedent(text))
    return document


def recipe(repository: Repository, text: str) -> Recipe:
    return repository.recipe_of(read(text))


_branches = iter(range(10**6))


def merge(repository: Repository, recipe_: Recipe | str, budget: str | None = None) -> MergeReport:
    """A merge on a branch of its own."""
    if isinstance(recipe_, str):
        recipe_ = recipe(repository, recipe_)
    plan = repository.plan(recipe_, budget=budget)
    return repository.merge(plan, branch=f"merged/{next(_branches)}")


def merged(repository: Repository, text: str) -> Tensors:
    return repository.load(merge(repository, text).branch)


def moved(repository: Repository, text: str) -> dict[str, float]:
    """How far each tensor of a merge lies from the base; all of its elements must agree."""
    found, base = merged(repository, text), repository.load("base")
    assert found.keys() == base.keys()
    out = {}
    for name, tensor in found.items():
        steps = set((tensor - base[name]).flatten().tolist())
        assert len(steps) == 1, name
        out[name] = steps.pop()
    return out


def by_layer(steps: dict[str, float], part: str = "mlp.up_proj") -> list[float]:
    return [steps[f"model.layers.{layer}.{part}.weight"] for layer in range(LAYERS)]


OUTSIDE = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


# -- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [[0, 1.5], [1, 0, 1], [3, 0.5, 0.25, 8, -1], [2, 2]])
def test_a_gradient_runs_evenly_over_the_layers(family: Repository, points: list[float]) -> None:
    steps = moved(
        family,
        f"""
        merge_method: task_arithmetic
        base_model: base
        models:
          - model: math
            parameters: {{weight: {points}}}
        """,
    )
    depth = np.linspace(0, 1, len(points))
    for part in ("mlp.up_proj", "self_attn.q_proj", "input_layernorm"):
        for layer, step in enumerate(by_layer(steps, part)):
            want = np.interp(layer / (LAYERS - 1), depth, points)
            assert step == pytest.approx(want, abs=1e-3)  # weights of 5,000 in float32
    assert [steps[name] for name in OUTSIDE] == [points[0]] * 3


def test_the_first_filter_that_matches_counts_and_the_rest_gets_the_default(
    family: Repository,
) -> None:
    steps = moved(
        family,
        """
        merge_method: task_arithmetic
        base_model: base
        models:
          - model: math
            parameters:
              weight:
                - filter: layers.2
                  value: 5
                - filter: mlp
                  value: [0, 3]
                - filter: "*.self_attn.*"
                  value: 7
          - model: code
            parameters: {weight: 0}
        """,
    )
    assert by_layer(steps) == [0, 1, 5, 3]
    assert by_layer(steps, "self_attn.q_proj") == [7, 7, 5, 7]
    assert by_layer(steps, "input_layernorm") == [1, 1, 5, 1]
    assert [steps[name] for name in OUTSIDE] == [1, 1, 1]


PRECEDENCE = """
merge_method: task_arithmetic
base_model: base
slices:
  - sources:
      - model: math
        layer_range: [0, 4]
        parameters:
          weight:
            - filter: q_proj
              value: 1
      - model: code
        layer_range: [0, 4]
    parameters:
      weight:
        - filter: proj
          value: 2
parameters:
  weight: 3
"""


def test_a_sources_value_goes_before_its_slices_and_that_before_the_recipes(
    family: Repository,
) -> None:
    steps = moved(family, PRECEDENCE)
    assert by_layer(steps, "self_attn.q_proj") == [1 + 2 * 16] * 4
    assert by_layer(steps, "mlp.up_proj") == [2 + 2 * 16] * 4
    assert by_layer(steps, "input_layernorm") == [3 + 3 * 16] * 4
    assert [steps[name] for name in OUTSIDE] == [3 + 3 * 16] * 3


def test_a_gradient_begins_anew_in_every_slice(family: Repository) -> None:
    steps = moved(
        family,
        """
        merge_method: task_arithmetic
        base_model: base
        slices:
          - sources:
              - {model: math, layer_range: [0, 1]}
          - sources:
              - {model: math, layer_range: [1, 4]}
        parameters: {weight: [0, 2]}
        """,
    )
    assert by_layer(steps) == [2, 0, 1, 2]
    assert [steps[name] for name in OUTSIDE] == [0, 0, 0]


def test_a_sources_filters_are_for_the_names_in_its_model(family: Repository) -> None:
    """And those for all are for the names in the merged one."""
    text = """
    merge_method: task_arithmetic
    base_model: base
    slices:
      - sources:
          - model: base
            layer_range: [0, 2]
          - model: math
            layer_range: [2, 4]
            parameters:
              weight:
                - filter: layers.3.
                  value: 2
                - value: 0
    parameters:
      lambda:
        - filter: layers.1.
          value: 4
    """
    found, base, expert = (
        tensors[f"model.layers.{n}.mlp.up_proj.weight"]
        for tensors, n in (
            (merged(family, text), 1), (family.load("base"), 1), (family.load("math"), 3),
        )
    )  # fmt: skip
    assert torch.equal(found, base + 4 * 2 * (expert - base))


def test_parameters_of_a_module_go_before_the_recipes(family: Repository) -> None:
    steps = moved(
        family,
        """
        merge_method: task_arithmetic
        base_model: base
        modules:
          text_decoder:
            models:
              - model: math
            parameters: {weight: {filter: mlp, value: 2}}
        parameters: {weight: 5}
        """,
    )
    assert by_layer(steps) == [2] * 4
    assert by_layer(steps, "input_layernorm") == [5] * 4


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("{wieght: 1}", "method ties has no parameter 'wieght'"),
        ("{t: 0.5}", "method ties has no parameter 't'"),
        ("{normalize: [0, 1]}", "normalize is 0.0, not true or false"),
        ("{normalize: [true, false]}", r"normalize\[0\] is true, not a number"),
        ("{normalize: 2}", "normalize is 2.0, not true or false"),
        ("{density: 1.5}", r"^density is 1\.5; it must be at least 0 and at most 1"),
        ("{density: [0.1, 2]}", "^density is 2; it must be"),
        ("{density: {filter: mlp, value: some}}", "^density is 'some', not a number"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(
    family: Repository, parameters: str, message: str
) -> None:
    with pytest.raises(BadRecipe, match=message):
        recipe(
            family,
            f"""
            merge_method: ties
            base_model: base
            models: [{{model: math}}]
            parameters: {parameters}
            """,
        )


def test_parameters_of_a_listed_base_are_checked_though_they_have_no_effect(
    family: Repository,
) -> None:
    text = """
    merge_method: ties
    base_model: base
    models:
      - model: base
        parameters: {weight: 0.5, %s: 0.5}
      - model: math
    """
    assert len(recipe(family, text % "density").experts) == 1
    with pytest.raises(BadRecipe, match="no parameter 'densty'"):
        recipe(family, text % "densty")


def test_one_and_zero_are_true_and_false_for_a_switch(family: Repository) -> None:
    text = """
    merge_method: ties
    base_model: base
    models: [{{model: math}}, {{model: code}}]
    parameters: {{normalize: {}}}
    """
    for number, word in ((0, "false"), (1, "true"), ("1.0", "true")):
        assert recipe(family, text.format(number)) == recipe(family, text.format(word))
    by_part = recipe(family, text.format("[{filter: mlp, value: 0}, {value: 1}]"))
    assert by_part.parameters["normalize"].values == (False, True)


def test_how_masks_are_stored_is_not_for_a_recipe_to_say(family: Repository) -> None:
    text = """
    merge_method: ties
    base_model: base
    models: [{model: math}]
    parameters: {lambda: 1%s}
    """
    assert recipe(family, text % ", int8_mask: true") == recipe(family, text % "")


def test_a_gradient_over_models_without_layers_is_refused(
    repository: Repository, tmp_path: Path
) -> None:
    flat = {"embedding.weight": torch.ones(4, 4), "head.weight": torch.ones(4, 4)}
    repository.add(save(tmp_path / "base", flat))
    repository.add(save(tmp_path / "math", {name: t + 1 for name, t in flat.items()}))
    with pytest.raises(BadRecipe, match=r"math\.weight is a gradient over layers, and the"):
        repository.plan(repository.recipe(["math"], parameters={"weight": [0, 1]}))


# -- models --------------------------------------------------------------------------------------


def test_deltas_are_taken_from_the_base_that_is_named(family: Repository) -> None:
    asked = recipe(
        family,
        """
        merge_method: task_arithmetic
        base_model: math
        models: [{model: code, parameters: {weight: 0.5}}]
        """,
    )
    assert (asked.base_ref, asked.files_from) == ("math", None)
    report = merge(family, asked)
    assert family.commit(report.branch).parents == (
        family.resolve("math"), family.resolve("code"),
    )  # fmt: skip
    found = family.load(report.branch)
    assert torch.equal(found["lm_head.weight"], weights(1 + 0.5 * 15)["lm_head.weight"])


def test_without_a_name_the_base_is_found(family: Repository) -> None:
    asked = recipe(family, "merge_method: ties\nmodels: [{model: math}, {model: code}]\n")
    assert asked.base == family.resolve("base")


def test_a_base_among_the_models_has_no_delta_and_is_dropped(family: Repository) -> None:
    text = """
    merge_method: dare_linear
    base_model: base
    models:
      - {model: math, parameters: {weight: 2}}
      - {model: base, parameters: {weight: 7}}
    parameters: {normalize: true}
    """
    assert [expert.ref for expert in recipe(family, text).experts] == ["math"]
    assert set(moved(family, text).values()) == {1.0}
    with pytest.raises(BadRecipe, match="names no model but its base base"):
        recipe(family, "merge_method: ties\nbase_model: base\nmodels: [{model: base}]\n")


def test_an_average_has_the_base_as_one_more_model(family: Repository) -> None:
    text = """
    merge_method: linear
    base_model: base
    models:
      - {model: math, parameters: {weight: 3}}%s
    """
    asked = recipe(family, text % "")
    assert [expert.ref for expert in asked.experts] == ["math", "base"]
    assert set(moved(family, text % "").values()) == {0.75}
    assert recipe(family, text % "\n      - {model: base}") == asked


def test_an_average_in_slices_has_no_model_but_those_of_the_slice(family: Repository) -> None:
    text = """
    merge_method: linear
    base_model: code
    slices:
      - sources:
          - {model: math, layer_range: [0, 4]}
          - {model: base, layer_range: [0, 4], parameters: {weight: 3}}
    """
    assert set(moved(family, text).values()) == {0.25}
    report = merge(family, text)
    assert called(family, report) == "code"


def test_a_path_from_the_first_model_begins_at_the_base(family: Repository) -> None:
    text = """
    merge_method: nearswap
    base_model: code
    models: [{model: math}, {model: code}]
    parameters: {t: 5}
    """
    asked = recipe(family, text)
    assert [expert.ref for expert in asked.experts] == ["code", "math"]
    assert recipe(family, text.replace(", {model: code}", "")) == asked
    sliced = """
    merge_method: nearswap
    base_model: code
    slices: [{sources: [{model: math, layer_range: [1, 3]}]}]
    parameters: {t: 5}
    """
    (part,) = recipe(family, sliced).slices
    assert [(source.expert, source.layers) for source in part.sources] == [
        (0, (1, 3)), (1, (1, 3)),
    ]  # fmt: skip
    assert [expert.ref for expert in recipe(family, sliced).experts] == ["code", "math"]


def test_a_base_lets_models_be_seen_by_their_deltas(family: Repository) -> None:
    text = "merge_method: nuslerp\nmodels: [{model: math}, {model: code}]\n"
    whole, deltas = recipe(family, text), recipe(family, f"{text}base_model: base\n")
    assert whole.parameters["deltas"].values == (False,)
    assert deltas.parameters["deltas"].values == (True,)
    assert (whole.files_from, deltas.files_from) == (0, None)
    with_base = text.replace("[", "[{model: base}, ") + "base_model: base\n"
    assert recipe(family, with_base) == deltas
    with pytest.raises(BadRecipe, match="deltas from it are not to be taken"):
        recipe(family, f"{text}base_model: base\nparameters: {{deltas: false}}\n")


def test_whole_models_need_no_common_base(repository: Repository, tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "two")):
        repository.add(save(tmp_path / name, weights(seed=seed)), no_base=True)
    text = "merge_method: {}\nmodels: [{{model: two}}, {{model: one}}]\n"
    found = merged(repository, text.format("linear"))
    assert torch.equal(found["lm_head.weight"], weights(16384)["lm_head.weight"])
    assert recipe(repository, text.format("linear")).base_ref == "two"
    with pytest.raises(NoBase):
        recipe(repository, text.format("ties"))


def called(repository: Repository, report: MergeReport) -> str:
    """Whose config a merged model has."""
    return str(config_of(repository, report)["called"])


def config_of(repository: Repository, report: MergeReport) -> dict[str, Any]:
    tensor_id = repository.manifest(report.branch).files["config.json"]
    settings_: dict[str, Any] = json.loads(manifests.read_bytes(repository.store, tensor_id))
    return settings_


@pytest.mark.parametrize(
    ("text", "whose"),
    [
        ("merge_method: ties\nmodels: [{model: math}, {model: code}]", "base"),
        ("merge_method: ties\nbase_model: code\nmodels: [{model: math}]", "code"),
        ("merge_method: linear\nmodels: [{model: math}, {model: code}]", "math"),
        ("merge_method: linear\nbase_model: code\nmodels: [{model: math}, {model: code}]", "code"),
        ("merge_method: linear\nbase_model: prose\nmodels: [{model: math}]", "prose"),
        ("merge_method: linear\nreference: base\nmodels: [{model: math}]", "base"),
        ("merge_method: nuslerp\nmodels: [{model: math}, {model: code}]", "math"),
        (
            "merge_method: nuslerp\nbase_model: base\nmodels: [{model: math}, {model: code}]",
            "base",
        ),
        (
            "merge_method: slerp\nbase_model: code\nmodels: [{model: math}]\nparameters: {t: 0.5}",
            "code",
        ),
        ("merge_method: passthrough\nmodels: [{model: prose}]", "prose"),
        ("merge_method: passthrough\nbase_model: code\nmodels: [{model: prose}]", "code"),
    ],
)
def test_files_are_the_named_bases_else_the_first_models(
    family: Repository, text: str, whose: str
) -> None:
    assert called(family, merge(family, text + "\n")) == whose


def test_the_same_model_may_stand_twice(family: Repository) -> None:
    steps = moved(
        family,
        """
        merge_method: task_arithmetic
        base_model: base
        models:
          - {model: math, parameters: {weight: 0.25}}
          - {model: math, parameters: {weight: [0, 1.5]}}
        """,
    )
    assert by_layer(steps) == [0.25, 0.75, 1.25, 1.75]


def test_a_ref_may_be_pinned_to_a_revision(repository: Repository, models: Path) -> None:
    repository.add(models / "base")
    repository.add(models / "math")
    first = repository.resolve("math")
    repository.add(models / "code", name="math")
    repository.create_tag("v2", "math")
    for text, commit in {
        f"math@{first.hex()[:8]}": first,
        "math@math^2": first,
        "math@v2": repository.resolve("math"),
        "math@{1}": first,
        "math^2": first,
    }.items():
        text = f"merge_method: linear\nmodels: [{{model: '{text}'}}]\n"
        (expert,) = recipe(repository, text).experts
        assert expert.commit == commit
        assert expert.ref in ("math", "math@{1}", "math^2")
    with pytest.raises(UnknownRef, match="no commit 'v9', which math@v9 names") as error:
        recipe(repository, "merge_method: linear\nmodels: [{model: math@v9}]\n")
    assert error.value.hint == "`mergegit log math` shows its commits"


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        (
            "meta/llama-8b",
            "download it (`hf download meta/llama-8b --local-dir llama-8b`) and add it: "
            "`mergegit add llama-8b --name meta/llama-8b`",
        ),
        (
            "meta/llama-8b@v1.0",
            "download it (`hf download meta/llama-8b --revision v1.0 --local-dir llama-8b`) and "
            "add it: `mergegit add llama-8b --name meta/llama-8b`",
        ),
        (
            "meta/llama-8b+someone/lora",
            "download it (`hf download meta/llama-8b --local-dir llama-8b`) and add it: "
            "`mergegit add llama-8b --name meta/llama-8b`",
        ),
        ("mth", "did you mean math?"),
    ],
)
def test_a_model_that_is_not_there_is_refused_with_the_way_to_add_it(
    family: Repository, model: str, hint: str
) -> None:
    with pytest.raises(UnknownRef) as error:
        recipe(family, f"merge_method: linear\nmodels: [{{model: {model}}}]\n")
    assert error.value.hint == hint


def test_the_hint_for_a_hub_id_works(repository: Repository, models: Path) -> None:
    repository.add(models / "base", name="meta/llama-8b")
    asked = recipe(repository, "merge_method: linear\nmodels: [{model: meta/llama-8b}]\n")
    assert asked.experts[0].commit == repository.resolve("meta/llama-8b")


def test_a_file_that_is_no_directory_is_to_be_added_by_hand(
    family: Repository, models: Path
) -> None:
    path = models / "math" / "model.safetensors"
    with pytest.raises(UnknownRef, match="is a path, and not in the repository") as error:
        recipe(family, f"merge_method: linear\nmodels: [{{model: {path}}}]\n")
    assert error.value.hint == f"add it first: `mergegit add {path}`"


def test_models_that_are_directories_are_added(
    repository: Repository, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models)
    text = f"""
    merge_method: task_arithmetic
    base_model: base
    models:
      - model: ./math
      - model: {models / "code"}
    """
    asked = recipe(repository, text)
    assert sorted(repository.branches()) == ["base", "code", "math"]
    assert [expert.ref for expert in asked.experts] == ["math", "code"]
    assert repository.commit("math").parents == (repository.resolve("base"),)
    assert set(moved(repository, text).values()) == {17.0}
    assert recipe(repository, text) == asked


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("- {model: ./code, parameters: {wieght: 1}}", "no parameter 'wieght'"),
        ("- {model: ./code, parameters: {lambda: 1}}", r"\./code\.lambda: an expert can't have"),
        ("- {model: ./code, parameters: {density: 2}}", r"\./code\.density is 2; it must be"),
        ("- {model: ./cod}", "there is no branch, tag or commit './cod'"),
        ("- {model: meta/code}", "'meta/code' is not in the repository"),
    ],
)
def test_nothing_is_added_for_a_recipe_that_can_not_be(
    repository: Repository, models: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    monkeypatch.chdir(models)
    text = f"merge_method: ties\nbase_model: ./base\nmodels:\n  - model: ./math\n  {line}\n"
    with pytest.raises((BadRecipe, UnknownRef), match=message):
        recipe(repository, text)
    assert repository.branches() == {}


def test_a_reference_is_for_methods_that_merge_whole_models(family: Repository) -> None:
    text = "reference: base\nmodels: [{model: math}, {model: code}]\n"
    assert recipe(family, f"merge_method: linear\n{text}").base_ref == "base"
    with pytest.raises(BadRecipe, match="and the recipe names a reference") as error:
        recipe(family, f"merge_method: ties\n{text}")
    assert "base_model" in error.value.hint
    with pytest.raises(BadRecipe, match="base_model prose is neither merged nor the reference"):
        recipe(
            family,
            """
            merge_method: passthrough
            base_model: prose
            reference: base
            models: [{model: math}]
            """,
        )


# -- slices --------------------------------------------------------------------------------------

FRANKENMERGE = """
merge_method: passthrough
slices:
  - sources: [{model: math, layer_range: [0, 3]}]
  - sources: [{model: code, layer_range: [1, 4]}]
  - sources: [{model: math, layer_range: [3, 4]}]
"""


def franken(family: Repository) -> Tensors:
    """What FRANKENMERGE makes, put together by hand."""
    math, code = family.load("math"), family.load("code")
    out = {name: math[name] for name in OUTSIDE}
    sources = [(math, 0), (math, 1), (math, 2), (code, 1), (code, 2), (code, 3), (math, 3)]
    for layer, (tensors, own) in enumerate(sources):
        for name in tensors:
            if layer_of(name) == own:
                out[name.replace(f".{own}.", f".{layer}.")] = tensors[name]
    return out


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_layers_are_stacked_without_reading_or_writing_a_block(family: Repository) -> None:
    report = merge(family, FRANKENMERGE)
    assert same(family.load(report.branch), franken(family))
    plan = report.plan.plan
    assert (plan.planned_bytes, plan.base_bytes, plan.write_bytes) == (0, 0, 0)
    assert (report.read_bytes, report.base_read_bytes) == (0, 0)
    known = {i for name in STEPS for i in family.manifest(name).tensors.values()}
    assert set(family.manifest(report.branch).tensors.values()) <= known
    files = family.manifest(report.branch).files
    assert report.written_bytes <= sum(family.tensor(i).nbytes for i in files.values()) + 4096


def test_a_stack_is_checked_out_as_a_model_that_loads(family: Repository, tmp_path: Path) -> None:
    report = merge(family, FRANKENMERGE)
    family.checkout(report.branch, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.glob("out/*")) == [
        "README.md", "config.json", "model.safetensors",
    ]  # fmt: skip
    assert same(load_file(tmp_path / "out" / "model.safetensors"), franken(family))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_hidden_layers"] == 7
    assert config["torch_dtype"] == "float32"
    assert config["called"] == "math"


def test_a_stack_may_take_several_files(
    family: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "_SHARD_BYTES", 4000)
    report = merge(family, FRANKENMERGE)
    family.checkout(report.branch, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    want = franken(family)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in want.values())
    files = sorted(path.name for path in tmp_path.glob("out/*.safetensors"))
    assert len(files) > 1
    assert files == sorted(set(index["weight_map"].values()))
    found: Tensors = {}
    for file in files:
        held = load_file(tmp_path / "out" / file)
        assert all(index["weight_map"][name] == file for name in held)
        found.update(held)
    assert same(found, want)


def test_tensors_of_a_stack_lie_in_the_order_of_its_layers(family: Repository) -> None:
    report = merge(family, FRANKENMERGE)
    names = [name for shard in family.manifest(report.branch).shards for name in shard.names]
    layers = [layer_of(name) for name in names if layer_of(name) is not None]
    assert layers == sorted(layers)  # type: ignore[type-var]
    assert names[0] == "model.embed_tokens.weight"
    assert set(names[-2:]) == {"model.norm.weight", "lm_head.weight"}


def test_a_stack_is_kept_whole_by_what_checks_and_collects(
    repository: Repository, models: Path
) -> None:
    for name in STEPS:
        repository.add(models / name)
    report = merge(repository, FRANKENMERGE)
    want = repository.load(report.branch)
    for name in STEPS:
        repository.delete_branch(name)
    repository.gc(expire=0, grace=0)
    assert repository.fsck().is_clean
    assert same(repository.load(report.branch), want)


def test_what_a_config_says_of_every_layer_follows_the_layers(
    repository: Repository, tmp_path: Path
) -> None:
    kinds = ["full", "window", "full", "linear"]
    said = {
        "layer_types": kinds, "text_config": {"num_hidden_layers": 4}, "n_layer": 4,
        "unrelated": [1, 2, 3, 4],
    }  # fmt: skip
    repository.add(save(tmp_path / "base", weights(), **said))
    report = merge(
        repository,
        """
        merge_method: passthrough
        slices:
          - sources: [{model: base, layer_range: [2, 4]}]
          - sources: [{model: base, layer_range: [1, 4]}]
        """,
    )
    config = config_of(repository, report)
    assert config["layer_types"] == ["full", "linear", "window", "full", "linear"]
    assert config["num_hidden_layers"] == config["n_layer"] == 5
    assert config["text_config"] == {"num_hidden_layers": 5}
    assert config["unrelated"] == [1, 2, 3, 4]


def test_models_of_different_depth_and_descent_are_stacked(
    repository: Repository, tmp_path: Path
) -> None:
    shallow, deep = weights(layers=2), weights(layers=6, seed=1)
    repository.add(save(tmp_path / "shallow", shallow), no_base=True)
    repository.add(save(tmp_path / "deep", deep), no_base=True)
    text = """
    merge_method: passthrough
    slices:
      - sources: [{model: shallow, layer_range: [0, 2]}]
      - sources: [{model: deep, layer_range: [%s, 6]}]
    """
    for start in (0, 4):
        found = merged(repository, text % start)
        assert len(found) == 3 + 3 * (2 + 6 - start)
        name = "model.layers.{}.mlp.up_proj.weight"
        for layer in range(start, 6):
            assert torch.equal(found[name.format(layer + 2 - start)], deep[name.format(layer)])
        assert torch.equal(found[name.format(1)], shallow[name.format(1)])
        assert torch.equal(found["model.embed_tokens.weight"], shallow["model.embed_tokens.weight"])
        assert torch.equal(found["lm_head.weight"], deep["lm_head.weight"])


def test_a_source_is_scaled_where_that_is_asked(family: Repository) -> None:
    found = merged(
        family,
        """
        merge_method: passthrough
        slices:
          - sources: [{model: math, layer_range: [0, 2]}]
          - sources:
              - model: code
                layer_range: [1, 3]
                parameters:
                  scale:
                    - {filter: mlp, value: [0.5, 2]}
                    - {filter: q_proj, value: 0}
        """,
    )
    code = family.load("code")
    mlp, attention, norm = (
        "model.layers.{}.mlp.up_proj.weight",
        "model.layers.{}.self_attn.q_proj.weight",
        "model.layers.{}.input_layernorm.weight",
    )
    assert torch.equal(found[mlp.format(2)], code[mlp.format(1)] * 0.5)
    assert torch.equal(found[mlp.format(3)], code[mlp.format(2)] * 2)
    assert not found[attention.format(2)].any()
    assert torch.equal(found[norm.format(3)], code[norm.format(2)])
    assert torch.equal(found[mlp.format(1)], family.load("math")[mlp.format(1)])


def test_a_model_that_is_passed_through_is_itself_by_id(family: Repository) -> None:
    report = merge(family, "merge_method: passthrough\nmodels: [{model: prose}]\n")
    assert family.manifest(report.branch).tensors == family.manifest("prose").tensors
    assert report.read_bytes == 0


def test_integers_are_passed_through_whatever_the_scale(
    repository: Repository, tmp_path: Path
) -> None:
    for name, number in (("base", 1), ("math", 2)):
        buffer = torch.full((4,), number, dtype=torch.int64)
        repository.add(save(tmp_path / name, {**weights(), "model.position_ids": buffer}))
    found = merged(
        repository,
        """
        merge_method: passthrough
        base_model: base
        models: [{model: math, parameters: {scale: 2}}]
        """,
    )
    assert found["model.position_ids"].tolist() == [2, 2, 2, 2]


def test_a_stack_in_another_dtype_says_so(family: Repository) -> None:
    report = merge(family, FRANKENMERGE + "dtype: bfloat16\n")
    found, want = family.load(report.branch), franken(family)
    assert all(torch.equal(found[name], want[name].bfloat16()) for name in want)
    assert config_of(family, report)["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("dtype", ["", "dtype: float16\n", "dtype: bfloat16\n"])
def test_the_config_says_the_dtype_of_the_tensors_whosever_it_was(
    repository: Repository, tmp_path: Path, dtype: str
) -> None:
    """Here a base in bf16, of which nobody speaks, and experts in f16, whose config is taken."""
    repository.add(save(tmp_path / "base", weights(), torch.bfloat16))
    for name in ("math", "code"):
        repository.add(save(tmp_path / name, weights(STEPS[name]), torch.float16), base="base")
    report = merge(
        repository, f"merge_method: linear\nmodels: [{{model: math}}, {{model: code}}]\n{dtype}"
    )
    assert called(repository, report) == "math"
    (found,) = {str(tensor.dtype) for tensor in repository.load(report.branch).values()}
    assert config_of(repository, report)["torch_dtype"] == found.removeprefix("torch.")


CROSSING = """
merge_method: {method}
slices:
  - sources:
      - {{model: math, layer_range: [0, 2], parameters: {{weight: 0.25}}}}
      - {{model: code, layer_range: [2, 4], parameters: {{weight: 0.75}}}}
  - sources:
      - {{model: prose, layer_range: [0, 3], parameters: {{weight: 2}}}}
"""


def test_layers_of_different_numbers_are_averaged(family: Repository) -> None:
    found = merged(family, CROSSING.format(method="linear"))
    math, code, prose = (family.load(name) for name in EXPERTS)
    name = "model.layers.{}.self_attn.q_proj.weight"
    for layer in (0, 1):
        want = 0.25 * math[name.format(layer)] + 0.75 * code[name.format(layer + 2)]
        assert torch.equal(found[name.format(layer)], want)
    for layer in (2, 3, 4):
        assert torch.equal(found[name.format(layer)], prose[name.format(layer - 2)])
    embedding = "model.embed_tokens.weight"
    assert torch.equal(found[embedding], 0.25 * math[embedding] + 0.75 * code[embedding])
    assert torch.equal(found["lm_head.weight"], prose["lm_head.weight"])


def test_deltas_are_taken_from_the_layers_of_the_base_that_its_slice_names(
    family: Repository,
) -> None:
    text = """
    merge_method: task_arithmetic
    base_model: base
    slices:
      - sources:
          - {model: base, layer_range: [1, 3]}
          - {model: math, layer_range: [0, 2], parameters: {weight: 0.5}}
          - {model: code, layer_range: [2, 4], parameters: {weight: 0.25}}
      - sources:
          - {model: code, layer_range: [3, 4]}
    """
    found = merged(family, text)
    base, math, code = (family.load(name) for name in ("base", "math", "code"))
    name = "model.layers.{}.mlp.up_proj.weight"
    for layer in (0, 1):
        below = base[name.format(layer + 1)]
        want = below + 0.5 * (math[name.format(layer)] - below)
        want = want + 0.25 * (code[name.format(layer + 2)] - below)
        assert torch.equal(found[name.format(layer)], want)
    assert torch.equal(found[name.format(2)], code[name.format(3)])


def test_a_slice_of_the_base_alone_is_the_base(family: Repository) -> None:
    text = """
    merge_method: ties
    base_model: base
    slices:
      - sources: [{model: base, layer_range: [0, 2]}]
      - sources:
          - {model: base, layer_range: [2, 4]}
          - {model: math, layer_range: [2, 4]}
    """
    steps = moved(family, text)
    assert by_layer(steps) == [0, 0, 1, 1]
    assert (steps["model.embed_tokens.weight"], steps["lm_head.weight"]) == (0, 1)


def test_a_model_may_be_merged_with_other_layers_of_itself(family: Repository) -> None:
    found = merged(
        family,
        """
        merge_method: linear
        slices:
          - sources:
              - {model: math, layer_range: [0, 2]}
              - {model: math, layer_range: [2, 4], parameters: {weight: 3}}
          - sources:
              - {model: math, layer_range: [3, 4]}
        """,
    )
    math = family.load("math")
    name = "model.layers.{}.mlp.up_proj.weight"
    for layer in (0, 1):
        want = 0.25 * math[name.format(layer)] + 0.75 * math[name.format(layer + 2)]
        assert torch.equal(found[name.format(layer)], want)
    assert torch.equal(found[name.format(2)], math[name.format(3)])


def test_slices_may_take_different_models_and_numbers_of_them(family: Repository) -> None:
    steps = moved(
        family,
        """
        merge_method: task_arithmetic
        base_model: base
        slices:
          - sources: [{model: math, layer_range: [0, 1]}]
          - sources:
              - {model: code, layer_range: [1, 3]}
              - {model: prose, layer_range: [1, 3], parameters: {weight: 0.5}}
              - {model: math, layer_range: [1, 3]}
          - sources: [{model: prose, layer_range: [3, 4]}]
        """,
    )
    assert by_layer(steps) == [1, 16 + 128 + 1, 16 + 128 + 1, 256]
    assert [steps[name] for name in OUTSIDE] == [1, 256, 256]


def test_heads_are_merged_of_all_models_of_the_last_slice(family: Repository) -> None:
    steps = moved(
        family,
        """
        merge_method: linear
        slices:
          - sources: [{model: math, layer_range: [0, 1]}]
          - sources:
              - {model: code, layer_range: [1, 4]}
              - {model: prose, layer_range: [1, 4], parameters: {weight: 3}}
        """,
    )
    assert [steps[name] for name in OUTSIDE] == [1, 4 + 192, 4 + 192]


@pytest.mark.parametrize("budget", ["0", "10%", "40%", "100%"])
@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "ties"])
def test_slices_are_read_within_the_budget_that_their_plan_states(
    family: Repository, method: str, budget: str
) -> None:
    report = merge(family, CROSSING.format(method=method), budget)
    plan = report.plan.plan
    assert plan.budget_bytes is not None
    assert plan.planned_bytes <= plan.budget_bytes
    assert report.read_bytes == report.plan.read_bytes
    assert report.base_read_bytes == report.plan.base_read_bytes


def test_enough_of_a_budget_gives_the_full_merge(family: Repository) -> None:
    full, enough = (
        merge(family, CROSSING.format(method="ties"), budget) for budget in (None, "100%")
    )
    one, other = (family.manifest(report.branch).tensors for report in (full, enough))
    assert one == other


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("[0, 5]", r"layers \[0, 5\] of math, which has 4"),
        ("[4, 5]", r"layers \[4, 5\] of math, which has 4"),
        ("[1000, 1001]", r"layers \[1000, 1001\] of math, which has 4"),
    ],
)
@pytest.mark.parametrize("method", ["passthrough", "linear"])
def test_layers_that_there_are_not_are_refused_before_anything_is_read(
    family: Repository, method: str, layers: str, message: str
) -> None:
    text = f"""
    merge_method: {method}
    slices: [{{sources: [{{model: math, layer_range: {layers}}}]}}]
    """
    with pytest.raises(BadRecipe, match=message):
        family.plan(recipe(family, text))


def test_a_slice_without_layers_is_refused(family: Repository) -> None:
    text = "merge_method: linear\nslices: [{sources: [{model: math}, {model: code}]}]\n"
    with pytest.raises(BadRecipe, match="takes math without a layer_range"):
        recipe(family, text)


def test_models_of_other_architectures_are_refused(repository: Repository, tmp_path: Path) -> None:
    repository.add(save(tmp_path / "base", weights()))
    wide = {name: torch.cat([tensor, tensor]) for name, tensor in weights().items()}
    repository.add(save(tmp_path / "wide", wide), no_base=True)
    other = {name.replace("model.layers.", "h."): t for name, t in weights().items()}
    repository.add(save(tmp_path / "other", other), no_base=True)
    text = """
    merge_method: {}
    slices:
      - sources: [{{model: base, layer_range: [0, 2]}}]
      - sources: [{{model: {}, layer_range: [2, 4]}}]
    """
    for method in ("passthrough", "linear"):
        with pytest.raises(Mismatch, match=r"is \[\d+, 8\]") as error:
            repository.plan(recipe(repository, text.format(method, "wide")))
        assert {"wide", "base"} <= set(error.value.message.split())
        with pytest.raises(BadRecipe, match=r"layers of other are called h\.N"):
            repository.plan(recipe(repository, text.format(method, "other")))


def test_a_stack_with_heads_of_another_vocabulary_is_refused(
    repository: Repository, tmp_path: Path
) -> None:
    repository.add(save(tmp_path / "base", weights()))
    longer = {**weights(), "lm_head.weight": torch.ones(30, 8)}
    repository.add(save(tmp_path / "longer", longer), no_base=True)
    text = """
    merge_method: passthrough
    slices:
      - sources: [{model: base, layer_range: [0, 2]}]
      - sources: [{model: longer, layer_range: [2, 4]}]
    """
    with pytest.raises(Mismatch, match=r"lm_head.weight is \[30, 8\] in longer but \[24, 8\]"):
        repository.plan(recipe(repository, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("merge_method: slerp\nmodels: [{model: math}]\nparameters: {t: 1}", "merges 2 models"),
        (
            "merge_method: slerp\nmodels: [{model: math}, {model: code}, {model: prose}]\n"
            "parameters: {t: 1}",
            "merges 2 models, and 3 are named",
        ),
        ("merge_method: passthrough\nmodels: [{model: math}, {model: code}]", "merges 1 model,"),
        ("merge_method: slerp\nmodels: [{model: math}, {model: code}]", "t is not given"),
        ("merge_method: model_stock\nbase_model: base\nmodels: [{model: math}]", "at least 2"),
        ("merge_method: lineal\nmodels: [{model: math}]", "there is no method 'lineal'"),
    ],
)
def test_what_a_method_can_not_do_is_refused(family: Repository, text: str, message: str) -> None:
    with pytest.raises(BadRecipe, match=message):
        recipe(family, text + "\n")


# -- several recipes -----------------------------------------------------------------------------


def order(text: str) -> list[str | None]:
    return [document.name for document in in_order(read_documents(text))]


def chain(needs: dict[str, Sequence[str]]) -> str:
    return "---\n".join(
        f"name: {name}\nmerge_method: linear\nmodels:\n"
        + "".join(f"  - model: {other}\n" for other in [*others, "math"])
        for name, others in needs.items()
    )


def test_recipes_come_after_those_that_they_name() -> None:
    needs = {"a": ["c"], "b": [], "c": ["b"], "last": ["a"]}
    assert order(chain(needs)) == ["b", "c", "a", "last"]


def test_recipes_that_need_nothing_stay_in_their_order() -> None:
    needs: dict[str, Sequence[str]] = {name: [] for name in ("d", "b", "a", "c")}
    assert order(chain(needs)) == ["d", "b", "a", "c"]


def test_a_base_a_source_a_reference_and_a_tokenizer_are_needed() -> None:
    last = read(
        """
        merge_method: linear
        base_model: a
        reference: b
        slices: [{sources: [{model: c, layer_range: [0, 1]}]}]
        tokenizer: {source: d, tokens: {x: {source: e}}}
        """
    )
    assert models_of(last) == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("needs", "circle"),
    [
        ({"a": ["a"], "last": []}, "a -> a"),
        ({"a": ["b"], "b": ["c"], "c": ["a"], "last": ["a"]}, "a -> b -> c -> a"),
        ({"x": ["a"], "a": ["b"], "b": ["a"], "last": []}, "a -> b -> a"),
        ({"a": ["last"], "last": ["a"]}, "a -> last -> a"),
    ],
)
def test_recipes_in_a_circle_are_refused(needs: dict[str, Sequence[str]], circle: str) -> None:
    with pytest.raises(BadRecipe, match=f"in a circle: {circle}$"):
        order(chain(needs))


def test_nothing_may_need_the_last_recipe() -> None:
    with pytest.raises(BadRecipe, match="recipe a needs last, the last recipe of the file"):
        order(chain({"a": ["last"], "last": []}))


def test_recipes_that_are_needed_twice_come_once() -> None:
    needs = {"d": ["b", "c"], "c": ["a"], "b": ["a"], "a": [], "last": ["d", "a"]}
    assert order(chain(needs)) == ["a", "b", "c", "d", "last"]


def test_a_long_chain_is_put_in_order() -> None:
    names = [f"r{n}" for n in range(1500)]
    needs: dict[str, Sequence[str]] = {
        name: [following] for name, following in zip(names, [*names[1:], "math"], strict=True)
    }
    assert order(chain({**needs, "last": ["r0"]})) == [*reversed(names), "last"]


def test_a_result_is_named_before_any_ref_of_that_name(family: Repository) -> None:
    commit = family.resolve("code")
    asked = family.recipe_of(
        read("merge_method: linear\nmodels: [{model: math}]\n"), merged={"math": commit}
    )
    assert asked.experts[0].commit == commit


# -- back to YAML --------------------------------------------------------------------------------


def again(repository: Repository, asked: Recipe) -> Recipe:
    """The recipe that comes of a recipe's YAML."""
    (document,) = read_documents(write_documents([document_of(asked)]))
    return repository.recipe_of(document)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("base", [None, "base", "prose"])
def test_the_recipe_of_flags_reads_back(family: Repository, method: str, base: str | None) -> None:
    low, _ = METHODS[method].models
    for count in {max(low, 1), 2} if METHODS[method].models[1] is None else {low}:
        asked = family.recipe(
            experts_for(method, EXPERTS[:count]), method=method, base=base, seed=7,
            parameters=needed_parameters(method), dtype="BF16", ignore_extra=True,
        )  # fmt: skip
        assert again(family, asked) == asked


@pytest.mark.parametrize("method", METHODS)
def test_a_merge_made_again_from_its_yaml_has_the_same_manifest(
    family: Repository, method: str
) -> None:
    asked = family.recipe(
        experts_for(method, EXPERTS[:2]), method=method, base="base", seed=7,
        parameters=needed_parameters(method),
    )  # fmt: skip
    first, second = merge(family, asked), merge(family, again(family, asked))
    assert family.commit(first.branch).manifest == family.commit(second.branch).manifest


YAML = {
    "precedence": PRECEDENCE,
    "frankenmerge": FRANKENMERGE,
    "crossing, linear": CROSSING.format(method="linear"),
    "crossing, ties": CROSSING.format(method="ties"),
    "the base listed": """
        merge_method: dare_ties
        base_model: base
        models: [{model: base}, {model: math, parameters: {density: [0.2, 0.9]}}]
        seed: 5
        dtype: float32
        out_dtype: bfloat16
        """,
    "a slice of the base alone": """
        merge_method: ties
        base_model: base
        slices:
          - sources: [{model: base, layer_range: [0, 1]}]
          - sources:
              - {model: base, layer_range: [2, 4]}
              - {model: math, layer_range: [1, 3]}
        """,
    "the base one of the models": """
        merge_method: linear
        base_model: base
        models: [{model: math, parameters: {weight: {filter: mlp, value: 3}}}]
        """,
    "files of a model that is not merged": """
        merge_method: passthrough
        base_model: prose
        models: [{model: math}]
        """,
    "files of the second": """
        merge_method: linear
        base_model: code
        models: [{model: math}, {model: code}]
        """,
    "twice the same": """
        merge_method: slerp
        models: [{model: math}, {model: math}]
        parameters: {t: [0, 1]}
        """,
    "layers with others of the same model": """
        merge_method: slerp
        base_model: math
        slices:
          - sources:
              - {model: math, layer_range: [0, 2]}
              - {model: math, layer_range: [2, 4]}
            parameters: {t: 0.25}
        """,
    "deltas along an arc": """
        merge_method: nuslerp
        base_model: base
        slices:
          - sources:
              - {model: math, layer_range: [0, 2]}
              - {model: code, layer_range: [1, 3], parameters: {weight: 2}}
              - {model: base, layer_range: [2, 4]}
        """,
    "models along an arc": """
        merge_method: nuslerp
        slices:
          - sources:
              - {model: math, layer_range: [0, 2]}
              - {model: code, layer_range: [1, 3], parameters: {weight: 2}}
        """,
    "another reference": """
        merge_method: linear
        base_model: math
        reference: prose
        models: [{model: math}, {model: code}]
        """,
}


@pytest.mark.parametrize("name", YAML)
def test_a_recipe_file_reads_back(family: Repository, name: str) -> None:
    asked = recipe(family, YAML[name])
    back = again(family, asked)
    assert back == asked
    first, second = merge(family, asked), merge(family, back)
    assert family.commit(first.branch).manifest == family.commit(second.branch).manifest


def test_a_base_that_is_merged_as_an_expert_stays_one(family: Repository) -> None:
    asked = family.recipe(["base", "math"], base="base", method="ties")
    assert [expert.ref for expert in again(family, asked).experts] == ["base", "math"]
    assert again(family, asked) == asked


def test_a_recipe_is_the_same_after_its_branches_have_moved(
    repository: Repository, models: Path
) -> None:
    for name in STEPS:
        repository.add(models / name)
    for method in ("ties", "linear", "slerp", "nuslerp"):
        asked = repository.recipe(
            ["math", "code"], method=method, parameters=needed_parameters(method)
        )
        before = write_documents([document_of(asked)])
        repository.rename_branch("base", f"a-{method}")
        repository.add(models / "prose", name="math")
        repository.delete_branch("code")
        (document,) = read_documents(before)
        assert repository.recipe_of(document) == asked
        repository.rename_branch(f"a-{method}", "base")
        repository.create_branch("code", asked.experts[1].commit.hex())
        repository.reset_branch("math", asked.experts[0].commit.hex())


numbers = st.floats(-2, 2, allow_nan=False).map(lambda number: round(number, 3))
shares = st.floats(0.05, 1).map(lambda number: round(number, 3))


def values(number: st.SearchStrategy[float]) -> st.SearchStrategy[Any]:
    """A number, a gradient, or rules."""
    one = number | st.lists(number, min_size=2, max_size=4)
    rule = st.fixed_dictionaries(
        {"value": one}, optional={"filter": st.sampled_from(["mlp", "layers.1.", "*norm*"])}
    )
    return one | st.lists(rule, min_size=1, max_size=3)


@st.composite
def asked_for(draw: st.DrawFn) -> dict[str, Any]:
    """What is asked for by flags: any method, with parameters in every form."""
    method = METHODS[draw(st.sampled_from(sorted(METHODS)))]
    experts = experts_for(
        method.name, draw(st.lists(st.sampled_from(tuple(STEPS)), min_size=1, max_size=4))
    )
    parameters: dict[str, Any] = needed_parameters(method.name)
    for parameter in method.parameters:
        number = shares if parameter.name in ("density", "gamma", "select_topk") else numbers
        number = number.filter(lambda n, p=parameter: p.low <= n <= p.high and n != p.low)
        form = st.booleans() if parameter.is_switch else values(number)
        if parameter.default is not None and draw(st.booleans()):
            parameters[parameter.name] = draw(form)
        if parameter.per_expert and draw(st.booleans()):
            parameters[f"{draw(st.sampled_from(experts))}.{parameter.name}"] = draw(form)
    return {
        "experts": experts,
        "base": draw(st.sampled_from(["base", "base", "prose", None])),
        "method": method.name,
        "parameters": parameters,
        "seed": draw(st.integers(0, 3)),
        "dtype": draw(st.sampled_from([None, "F16"])),
        "ignore_extra": draw(st.booleans()),
        "allow_nonfinite": draw(st.booleans()),
    }


@settings(deadline=None, max_examples=60)
@given(request=asked_for())
def test_any_recipe_reads_back(family: Repository, request: dict[str, Any]) -> None:
    try:
        asked = family.recipe(**request)
    except (BadRecipe, NoBase):
        return
    assert again(family, asked) == asked


def test_the_kinds_of_methods_are_all_read_back() -> None:
    """The tests above go through every kind that there is."""
    assert {method.merges for method in METHODS.values()} == set(Merges)


def test_a_card_shows_the_recipe_without_commits(family: Repository) -> None:
    report = merge(family, YAML["the base listed"])
    card = manifests.read_bytes(
        family.store, family.manifest(report.branch).files["README.md"]
    ).decode()
    text = card.split("```yaml\n")[1].split("```")[0]
    (document,) = read_documents(text)
    assert (document.base_model, document.models[0].model) == ("base", "math")
    assert merge(family, family.recipe_of(document)).plan.plan.recipe == report.plan.plan.recipe


def test_gradients_survive_to_the_last_bit(family: Repository) -> None:
    asked = family.recipe(["math"], parameters={"weight": [1 / 3, 0.1 + 0.2, 1e-17]})
    assert again(family, asked).experts[0].parameters["weight"].values == (1 / 3, 0.1 + 0.2, 1e-17)


def test_a_scaled_stack_is_rounded_once(family: Repository) -> None:
    """To bf16, from products in float32."""
    text = """
    merge_method: passthrough
    slices:
      - sources: [{model: math, layer_range: [0, 4], parameters: {scale: 0.3}}]
    out_dtype: bfloat16
    """
    found, math = merged(family, text), family.load("math")
    for name, tensor in math.items():
        want = (tensor.double() * float(np.float32(0.3))).bfloat16()
        assert int(ulps(found[name], want).max()) <= 1
        assert int((ulps(found[name], want) > 0).sum()) <= 0.01 * tensor.numel() + 1
