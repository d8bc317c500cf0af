"""The same recipe files, merged by mergekit and by mergegit: every shape that recipes have.

Runs where MERGEKIT_PYTHON names an interpreter that has mergekit.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mergegit.merge.methods import METHODS
from tests.cli.conftest import CommandLine
from tests.families import generator
from tests.merge.reference import trim_threshold, ulps

PYTHON = os.environ.get("MERGEKIT_PYTHON")

pytestmark = [
    pytest.mark.mergekit,
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON,
        reason="MERGEKIT_PYTHON is not set; let it name a Python that has mergekit installed",
    ),
]

DRIVER = Path(__file__).with_name("recipes_driver.py")
Tensor = torch.Tensor
Tensors = dict[str, Tensor]

MODELS = ("base", "math", "code", "prose")
LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 4, 64, 176, 256
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


def shapes(*, tied: bool) -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        out[f"{prefix}self_attn.q_proj.weight"] = (HIDDEN, HIDDEN)
        out[f"{prefix}self_attn.k_proj.weight"] = (HIDDEN // 2, HIDDEN)
        out[f"{prefix}self_attn.v_proj.weight"] = (HIDDEN // 2, HIDDEN)
        out[f"{prefix}self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
        out[f"{prefix}mlp.gate_proj.weight"] = (INTERMEDIATE, HIDDEN)
        out[f"{prefix}mlp.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        out[f"{prefix}mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        out[f"{prefix}input_layernorm.weight"] = (HIDDEN,)
        out[f"{prefix}post_attention_layernorm.weight"] = (HIDDEN,)
    out["model.norm.weight"] = (HIDDEN,)
    if not tied:
        out["lm_head.weight"] = (VOCABULARY, HIDDEN)
    return out


def make_family(root: Path, *, tied: bool) -> None:
    """A base and experts in bf16; weights of every model and layer are their own."""
    base = {
        name: torch.randn(shape, generator=generator("recipes", name)) * 0.02
        + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes(tied=tied).items()
    }
    for model in MODELS:
        moved = base
        if model != "base":
            moved = {
                name: tensor + torch.randn(tensor.shape, generator=generator(model, name)) * 2e-3
                for name, tensor in base.items()
            }
        path = root / model
        path.mkdir(parents=True)
        config = {**CONFIG, "tie_word_embeddings": tied}
        (path / "config.json").write_text(json.dumps(config, indent=2))
        typed = {name: tensor.bfloat16() for name, tensor in moved.items()}
        save_file(typed, path / "model.safetensors", metadata={"format": "pt"})


@dataclass(frozen=True, slots=True)
class Case:
    """A recipe file in both tools' words; ``dtype`` lines are added to every document of it.

    ``densities`` are the points of each expert's density, for methods that trim: which of the
    elements at a threshold are kept is up to the sort, and they are compared nowhere.
    """

    recipe: str
    layers: int = LAYERS
    densities: Mapping[str, tuple[float, ...]] | None = None
    tied: bool = False


CASES: dict[str, Case] = {
    "linear": Case(
        """
        merge_method: linear
        models:
          - model: math
            parameters: {weight: 1.0}
          - model: code
            parameters: {weight: 0.3}
          - model: prose
            parameters: {weight: 0.5}
        """
    ),
    "linear, gradients and filters": Case(
        """
        merge_method: linear
        models:
          - model: math
            parameters:
              weight:
                - filter: mlp
                  value: [0, 1]
                - filter: self_attn
                  value: 0.3
                - value: 0.7
          - model: code
            parameters:
              weight: [1, 0.5, 0.25, 0.1, 2]
        parameters:
          normalize: true
        """
    ),
    "linear, the base one of the models": Case(
        """
        merge_method: linear
        base_model: base
        models:
          - model: math
            parameters: {weight: 0.4}
          - model: code
        parameters:
          weight: 1.5
        """
    ),
    "linear slices, the base no source": Case(
        """
        merge_method: linear
        base_model: base
        slices:
          - sources:
              - model: math
                layer_range: [0, 2]
                parameters: {weight: 0.4}
              - model: code
                layer_range: [0, 2]
          - sources:
              - model: code
                layer_range: [2, 4]
                parameters: {weight: 3}
              - model: prose
                layer_range: [0, 2]
        parameters:
          weight: 1
        """
    ),
    "linear slices of one model, others at no weight": Case(
        """
        merge_method: linear
        parameters:
          weight: 1.0
        slices:
          - sources:
              - model: math
                layer_range: [0, 1]
              - model: code
                layer_range: [0, 1]
                parameters: {weight: 0}
          - sources:
              - model: math
                layer_range: [1, 3]
          - sources:
              - model: code
                layer_range: [1, 4]
          - sources:
              - model: prose
                layer_range: [3, 4]
              - model: code
                layer_range: [3, 4]
                parameters: {weight: 0}
        """,
        layers=7,
    ),
    "slerp in a slice": Case(
        """
        slices:
          - sources:
              - model: math
                layer_range: [0, 4]
              - model: code
                layer_range: [0, 4]
        merge_method: slerp
        base_model: math
        parameters:
          t:
            - filter: self_attn
              value: [0, 0.5, 0.3, 0.7, 1]
            - filter: mlp
              value: [1, 0.5, 0.7, 0.3, 0]
            - value: 0.5
        """
    ),
    "slerp, the base second": Case(
        """
        slices:
          - sources:
              - model: math
                layer_range: [0, 4]
              - model: code
                layer_range: [0, 4]
        merge_method: slerp
        base_model: code
        parameters:
          t: [0.1, 0.6]
        """
    ),
    "slerp of models": Case(
        """
        models:
          - model: code
        merge_method: slerp
        base_model: math
        parameters:
          t: 0.35
        """
    ),
    "slerp slices with values of their own": Case(
        """
        slices:
          - sources:
              - model: math
                layer_range: [0, 1]
              - model: code
                layer_range: [0, 1]
            parameters:
              t: 0.25
          - sources:
              - model: math
                layer_range: [1, 4]
              - model: code
                layer_range: [1, 4]
            parameters:
              t:
                - filter: down_proj
                  value: 0.9
        merge_method: slerp
        base_model: math
        parameters:
          t: [0.4, 0.6]
        """
    ),
    "ties with gradients": Case(
        """
        models:
          - model: math
            parameters:
              density: [1, 0.7, 0.1]
              weight: 1.0
          - model: code
            parameters:
              density: 0.5
              weight: [0, 0.3, 0.7, 1]
          - model: prose
            parameters:
              density: 0.33
              weight:
                - filter: mlp
                  value: 0.5
                - value: 0
        merge_method: ties
        base_model: base
        parameters:
          normalize: true
          int8_mask: true
        """,
        densities={"math": (1, 0.7, 0.1), "code": (0.5,), "prose": (0.33,)},
    ),
    "ties, the base among the models": Case(
        """
        models:
          - model: base
            parameters: {weight: 1, density: 1}
          - model: math
            parameters: {weight: 0.6, density: 0.4}
          - model: code
            parameters: {weight: 0.5, density: 0.6}
        merge_method: ties
        base_model: base
        parameters: {normalize: false, lambda: 0.9}
        """,
        densities={"math": (0.4,), "code": (0.6,)},
    ),
    "task arithmetic": Case(
        """
        merge_method: task_arithmetic
        base_model: base
        models:
          - model: math
            parameters:
              weight:
                - filter: layers.2
                  value: -0.5
                - filter: norm
                  value: 0
                - value: [0.2, 0.9]
          - model: code
            parameters: {weight: 0.8}
        parameters:
          lambda: [1, 0.5]
        """
    ),
    "task arithmetic in slices": Case(
        """
        merge_method: task_arithmetic
        base_model: base
        slices:
          - sources:
              - model: base
                layer_range: [1, 3]
              - model: math
                layer_range: [1, 3]
                parameters: {weight: [0.3, 0.6]}
              - model: code
                layer_range: [2, 4]
            parameters: {weight: 0.5}
          - sources:
              - model: base
                layer_range: [0, 1]
          - sources:
              - model: code
                layer_range: [3, 4]
                parameters: {weight: 0.4}
              - model: base
                layer_range: [2, 3]
        """
    ),
    "a frankenmerge": Case(
        """
        slices:
          - sources:
              - model: math
                layer_range: [0, 3]
          - sources:
              - model: code
                layer_range: [1, 4]
          - sources:
              - model: math
                layer_range: [2, 4]
        merge_method: passthrough
        """,
        layers=8,
    ),
    "a frankenmerge with scales": Case(
        """
        slices:
          - sources:
              - model: math
                layer_range: [0, 2]
          - sources:
              - model: code
                layer_range: [1, 4]
                parameters:
                  scale:
                    - filter: o_proj
                      value: 0.0
                    - filter: down_proj
                      value: [0.5, 1.5]
                    - value: 1.0
        merge_method: passthrough
        """,
        layers=5,
    ),
    "scales by a layer's number": Case(
        """
        slices:
          - sources:
              - model: math
                layer_range: [0, 2]
                parameters:
                  scale:
                    - filter: layers.1.
                      value: 0.25
          - sources:
              - model: math
                layer_range: [1, 4]
                parameters:
                  scale:
                    - filter: layers.2.
                      value: 0.5
                    - filter: layers.3.
                      value: 2
        merge_method: passthrough
        """,
        layers=5,
    ),
    "a value for all by a layer's number": Case(
        """
        slices:
          - sources:
              - {model: math, layer_range: [2, 4]}
              - {model: code, layer_range: [2, 4]}
          - sources:
              - {model: math, layer_range: [0, 2]}
              - {model: code, layer_range: [1, 3]}
        merge_method: slerp
        base_model: math
        parameters:
          t:
            - filter: layers.1.
              value: 0.1
            - filter: layers.2.
              value: 0.9
            - value: 0.5
        """
    ),
    "a slice cut out": Case(
        """
        slices:
          - sources:
              - model: prose
                layer_range: [0, 1]
          - sources:
              - model: prose
                layer_range: [3, 4]
        merge_method: passthrough
        """,
        layers=2,
    ),
    "all of one model, tied": Case(
        """
        models:
          - model: prose
        merge_method: passthrough
        """,
        tied=True,
    ),
    "linear, tied": Case(
        """
        merge_method: linear
        models:
          - model: math
          - model: code
        parameters: {weight: [0.5, 2]}
        """,
        tied=True,
    ),
    "a frankenmerge, tied": Case(
        """
        slices:
          - sources:
              - {model: math, layer_range: [0, 3]}
          - sources:
              - {model: code, layer_range: [1, 4]}
        merge_method: passthrough
        """,
        layers=6,
        tied=True,
    ),
    "dare that drops nothing": Case(
        """
        merge_method: dare_ties
        base_model: base
        models:
          - model: math
            parameters: {weight: [0.4, 0.8], density: 1}
          - model: code
            parameters: {weight: 0.6, density: 1.0}
        """
    ),
    "dare_linear that drops nothing, normalized": Case(
        """
        merge_method: dare_linear
        base_model: base
        models:
          - model: math
            parameters: {weight: 0.4}
          - model: code
            parameters: {weight: 0.6}
        parameters: {normalize: true, density: 1}
        """
    ),
    "modules": Case(
        """
        merge_method: linear
        modules:
          default:
            models:
              - model: math
              - model: code
                parameters: {weight: {filter: mlp, value: 3}}
            parameters: {weight: 2}
        parameters: {weight: 5}
        """
    ),
    "the nearer value, and what it leaves open": Case(
        """
        merge_method: task_arithmetic
        base_model: base
        slices:
          - sources:
              - model: base
                layer_range: [0, 4]
              - model: math
                layer_range: [0, 4]
                parameters:
                  weight:
                    - filter: q_proj
                      value: 0.1
              - model: code
                layer_range: [0, 4]
            parameters:
              weight:
                - filter: proj
                  value: [0.2, 0.3]
        parameters:
          weight: 0.4
        """
    ),
    "nuslerp of models": Case(
        """
        merge_method: nuslerp
        models:
          - model: math
            parameters: {weight: [0.3, 0.6]}
          - model: code
            parameters: {weight: 0.7}
        """
    ),
    "nuslerp of what changed": Case(
        """
        merge_method: nuslerp
        base_model: base
        models:
          - model: math
            parameters: {weight: 0.3}
          - model: code
            parameters: {weight: 0.7}
        """
    ),
    "nuslerp of what changed, in slices": Case(
        """
        merge_method: nuslerp
        base_model: base
        slices:
          - sources:
              - {model: base, layer_range: [0, 2]}
              - {model: math, layer_range: [0, 2], parameters: {weight: 0.3}}
              - {model: code, layer_range: [0, 2], parameters: {weight: 0.5}}
          - sources:
              - {model: math, layer_range: [2, 4], parameters: {weight: 0.3}}
              - {model: prose, layer_range: [2, 4], parameters: {weight: 0.5}}
              - {model: base, layer_range: [2, 4]}
        """
    ),
    "multislerp": Case(
        """
        merge_method: multislerp
        models:
          - {model: math, parameters: {weight: 0.3}}
          - {model: code, parameters: {weight: [0.7, 0.2]}}
          - {model: prose, parameters: {weight: 0.5}}
        """
    ),
    "model stock": Case(
        """
        merge_method: model_stock
        base_model: base
        models:
          - model: math
          - model: code
          - model: prose
        """
    ),
    "karcher": Case(
        """
        merge_method: karcher
        models:
          - model: math
          - model: code
        parameters: {max_iter: 20, tol: 1e-6}
        """
    ),
    "nearswap": Case(
        """
        merge_method: nearswap
        base_model: math
        models:
          - model: code
        parameters: {t: [0.001, 0.0001]}
        """
    ),
    "several recipes": Case(
        """
        name: both
        merge_method: task_arithmetic
        base_model: base
        models:
          - {model: math, parameters: {weight: 0.5}}
          - {model: code, parameters: {weight: 0.5}}
        ---
        name: soft
        merge_method: linear
        models:
          - {model: both, parameters: {weight: 1}}
          - {model: prose, parameters: {weight: [1, 0]}}
        ---
        merge_method: passthrough
        slices:
          - sources:
              - {model: both, layer_range: [0, 3]}
          - sources:
              - {model: soft, layer_range: [1, 4]}
        """,
        layers=6,
    ),
}
IN_FLOAT32 = "dtype: float32\nout_dtype: bfloat16\n"


def text_of(case: Case) -> str:
    documents = textwrap.dedent(case.recipe).strip().split("\n---\n")
    return "\n---\n".join(f"{document}\n{IN_FLOAT32}" for document in documents)


@dataclass(frozen=True, slots=True)
class Made:
    """What a tool made of a case."""

    tensors: Tensors
    config: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Made:
        tensors: Tensors = {}
        for file in sorted(path.glob("*.safetensors")):
            tensors.update(load_file(file))
        return cls(tensors, json.loads((path / "config.json").read_text()))


@dataclass(frozen=True, slots=True)
class Results:
    """What both made of each case, by the same files, and the models that they had."""

    models: Mapping[bool, Mapping[str, Tensors]]
    ours: Mapping[str, Made]
    theirs: Mapping[str, Made]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("recipes")
    ours: dict[str, Made] = {}
    theirs: dict[str, Made] = {}
    models: dict[bool, dict[str, Tensors]] = {}
    for tied in (False, True):
        place = root / ("tied" if tied else "untied")
        make_family(place, tied=tied)
        models[tied] = {model: Made.read(place / model).tensors for model in MODELS}
        cases = [name for name, case in CASES.items() if case.tied == tied]
        files = {name: place / f"{number}.yml" for number, name in enumerate(cases)}
        for name, file in files.items():
            file.write_text(text_of(CASES[name]))
        run_mergekit(place, files.values())
        mergegit = CommandLine(place)
        mergegit.ok("init")
        for number, (name, file) in enumerate(files.items()):
            done = mergegit("merge", "-c", file, "-b", f"merged/{number}")
            assert done.code == 0, (name, done)
            mergegit.ok("checkout", f"merged/{number}", file.with_suffix(".ours"))
            ours[name] = Made.read(file.with_suffix(".ours"))
            theirs[name] = Made.read(file.with_suffix(".theirs"))
    return Results(models, ours, theirs)


def run_mergekit(place: Path, files: Iterable[Path]) -> None:
    assert PYTHON is not None
    asked = [str(path) for file in files for path in (file, file.with_suffix(".theirs"))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [PYTHON, str(DRIVER), *asked], env=environment, cwd=place, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]


CANCELLED = 1e-8
"""Where terms cancel, a unit in the last place is finer than the last bits of float32's sums."""


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_gives_the_same_model(results: Results, name: str, record_property: Any) -> None:
    case = CASES[name]
    ours, theirs = results.ours[name].tensors, results.theirs[name].tensors
    assert ours.keys() == theirs.keys()
    compared = excluded = apart = 0
    for key in ours:
        assert (ours[key].dtype, ours[key].shape) == (theirs[key].dtype, theirs[key].shape), key
        near = (ours[key].double() - theirs[key].double()).abs() < CANCELLED
        but = torch.zeros_like(near)
        if case.densities:
            but = at_a_threshold(case, results.models[case.tied], key)
        units = ulps(ours[key], theirs[key]).masked_fill(near | but, 0)
        assert int(units.max()) <= 1, key
        compared += int((~but).sum())
        excluded += int(but.sum())
        apart += int((units > 0).sum())
    print(f"{name}: compared {compared}, excluded {excluded}, apart {apart}")
    record_property("apart", apart)
    # Averages of bf16 numbers often lie half way between two of them: the last bit of float32
    # decides.
    assert apart <= (0.04 if "linear" in case.recipe else 5e-4) * compared
    assert excluded < 0.2 * (compared + excluded)


def at_a_threshold(case: Case, models: Mapping[str, Tensors], key: str) -> Tensor:
    """Where the |delta| of some expert is the smallest that its density keeps."""
    base = models["base"][key]
    out = torch.zeros(base.shape, dtype=torch.bool)
    layer = int(key.split(".")[2]) if ".layers." in key else 0
    for model, points in (case.densities or {}).items():
        delta = (models[model][key].float() - base.float()).abs()
        depth = np.linspace(0, 1, len(points)) if len(points) > 1 else [0]
        density = float(np.interp(layer / (LAYERS - 1), depth, points))
        out |= delta == trim_threshold(delta, density)
    return out


@pytest.mark.parametrize("name", CASES)
def test_the_config_is_the_same(results: Results, name: str) -> None:
    ours, theirs = results.ours[name].config, results.theirs[name].config
    assert ours["num_hidden_layers"] == theirs["num_hidden_layers"] == CASES[name].layers
    assert ours["tie_word_embeddings"] == theirs["tie_word_embeddings"] == CASES[name].tied
    assert ours["torch_dtype"] == theirs.get("torch_dtype", theirs.get("dtype")) == "bfloat16"


FIELDS = "from mergekit.options import MergeOptions; print(*MergeOptions.model_fields)"


def test_the_page_for_mergekits_users_has_all_of_its_options() -> None:
    assert PYTHON is not None
    done = subprocess.run([PYTHON, "-c", FIELDS], capture_output=True, text=True, check=True)
    page = (Path(__file__).parents[2] / "docs" / "from-mergekit.md").read_text()
    fields = done.stdout.split()
    assert len(fields) > 20
    for field in fields:
        assert re.search(rf"--{field.replace('_', '-')}\b", page), field


METHODS_OF_MERGEKIT = (
    "from mergekit.merge_methods.registry import registered_methods; "
    "print(*(method.spec.name for method in registered_methods()))"
)


def test_every_method_of_mergekit_is_here() -> None:
    assert PYTHON is not None
    done = subprocess.run(
        [PYTHON, "-c", METHODS_OF_MERGEKIT], capture_output=True, text=True, check=True
    )
    names = done.stdout.split()
    assert len(names) > 15
    assert set(names) <= METHODS.keys()
