"""Adapters in a repository beside PEFT: models that are checked out merged, and adapters that are
extracted.

Runs where MERGEKIT_PYTHON names an interpreter that has transformers and peft beside mergekit.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergegit import Repository
from tests.families import generator
from tests.mergekit.test_adapters import (
    CONV1D,
    GPT2,
    LINEAR,
    LLAMA,
    PYTHON,
    QWEN2,
    case,
    drive,
    tied,
)

pytestmark = [
    pytest.mark.mergekit,
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON,
        reason="MERGEKIT_PYTHON is not set; let it name a Python that has transformers and peft",
    ),
]

Tensors = dict[str, torch.Tensor]


def bf16(model: dict[str, Any]) -> dict[str, Any]:
    return {**model, "dtype": "bfloat16"}


MODELS = {
    "plain": bf16(case(LLAMA, LINEAR)),
    "wide": case(LLAMA, LINEAR, modules_to_save=["lm_head", "norm"]),
    "rslora": bf16(case(LLAMA, LINEAR, use_rslora=True)),
    "dora": bf16(case(LLAMA, LINEAR, use_dora=True)),
    "saved": bf16(case(LLAMA, LINEAR, modules_to_save=["lm_head", "norm", "embed_tokens"])),
    "embedding": bf16(case(LLAMA, ["q_proj", "embed_tokens", "lm_head"])),
    "tied, saved": bf16(
        case(tied(LLAMA), LINEAR, modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    ),
    "tied, embedding": bf16(
        case(tied(LLAMA), ["q_proj", "embed_tokens"], ensure_weight_tying=True)
    ),
    "bias": bf16(case(QWEN2, LINEAR, bias="lora_only")),
    "gpt2": bf16(case(GPT2, CONV1D, fan_in_fan_out=True)),
    "gpt2, dora": bf16(case(GPT2, CONV1D, fan_in_fan_out=True, use_dora=True)),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters by PEFT, checked out merged into ``model``, and loaded again by transformers."""
    root = tmp_path_factory.mktemp("models")
    drive("make", root, MODELS)
    for name in MODELS:
        with Repository.init(root / name / "repository", author="Ada") as repository:
            repository.add(root / name / "base")
            repository.add(root / name / "adapter", base="base")
            repository.merge(repository.plan(repository.recipe(["adapter"])), branch="merged")
            repository.checkout("adapter", root / name / "model", merged=True)
            repository.checkout("merged", root / name / "by-merge")
    drive("load", root, MODELS)
    return root


@pytest.mark.parametrize("name", MODELS)
def test_a_merged_checkout_is_what_peft_merges_and_transformers_loads(
    made: Path, name: str
) -> None:
    theirs = load_file(made / name / "merged.safetensors")
    ours = load_file(made / name / "loaded.safetensors")
    base = load_file(made / name / "base" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        wanted = theirs[key].double()
        # One step of the dtype; beside zero, what float32 tells of the base and of the sum over the
        # rank, which PEFT takes in another order.
        step = 2.0**-7 if tensor.dtype == torch.bfloat16 else 2.0**-20
        below = base.get(key, tensor).double()
        slack = 2.0**-20 * (below.abs() + (wanted - below).abs().max())
        assert bool(((tensor.double() - wanted).abs() <= step * wanted.abs() + slack).all()), key
    stored = load_file(made / name / "model" / "model.safetensors")
    moved = [key for key in base if not torch.equal(base[key], stored[key])]
    assert moved


@pytest.mark.parametrize("name", MODELS)
def test_a_merged_checkout_is_the_merge(made: Path, name: str) -> None:
    checked_out = load_file(made / name / "model" / "model.safetensors")
    merged = load_file(made / name / "by-merge" / "model.safetensors")
    assert checked_out.keys() == merged.keys()
    for key, tensor in merged.items():
        assert torch.equal(checked_out[key], tensor), key


def tune(base: Tensors, kinds: dict[str, float]) -> Tensors:
    """Every tensor whose name has one of ``kinds`` in it moves by so much."""
    tuned = {}
    for name, tensor in base.items():
        scale = next((scale for kind, scale in kinds.items() if kind in name), 0.0)
        noise = torch.randn(tensor.shape, generator=generator("tune", name))
        tuned[name] = (tensor.float() + scale * noise).to(tensor.dtype)
    return tuned


EXTRACTED: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "llama": (bf16(LLAMA), {"proj": 0.02, "norm": 0.1, "embed": 0.02, "head": 0.02}),
    "qwen2": (bf16(QWEN2), {"proj": 0.02}),
    "tied": (bf16(tied(LLAMA)), {"proj": 0.02, "embed": 0.02}),
    "gpt2": (bf16(GPT2), {"attn": 0.02, "mlp": 0.02, "ln_1": 0.02}),
    # The checkpoint's names lack what the class with a head puts before them.
    "gpt2, short names": (bf16(GPT2) | {"inside": "transformer"}, {"attn": 0.02, "mlp": 0.02}),
}


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, float]]:
    """Directories with an extracted adapter that PEFT has merged, and the errors stated of them."""
    root = tmp_path_factory.mktemp("extracted")
    models = {name: case(model, ["q_proj", "c_attn"]) for name, (model, _) in EXTRACTED.items()}
    drive("make", root, models)
    errors = {}
    for name, (model, kinds) in EXTRACTED.items():
        path = root / name
        base = load_file(path / "base" / "model.safetensors")
        (path / "tuned").mkdir()
        save_file(tune(base, kinds), path / "tuned" / "model.safetensors", {"format": "pt"})
        if model.get("inside"):
            # Checkpoints of this age were of the class without a head, and say the one with it.
            config = json.loads((path / "base" / "config.json").read_text())
            config["architectures"] = [model["model"]]
            (path / "base" / "config.json").write_text(json.dumps(config))
        for file in (path / "adapter").iterdir():
            file.unlink()
        with Repository.init(path / "repository", author="Ada") as repository:
            repository.add(path / "base")
            repository.add(path / "tuned")
            report = repository.extract_lora("tuned", path / "adapter", rank=6, dtype="float32")
            errors[name] = report.error
    drive("merge", root, models)
    return {name: (root / name, error) for name, error in errors.items()}


@pytest.mark.parametrize("name", EXTRACTED)
def test_what_peft_makes_of_an_extracted_adapter_is_off_by_what_was_said(
    extracted: dict[str, tuple[Path, float]], name: str
) -> None:
    path, error = extracted[name]
    base = load_file(path / "base" / "model.safetensors")
    tuned = load_file(path / "tuned" / "model.safetensors")
    merged = load_file(path / "merged.safetensors")
    prefix = f"{EXTRACTED[name][0]['inside']}." if EXTRACTED[name][0].get("inside") else ""
    missed = whole = 0.0
    for key, tensor in tuned.items():
        wanted = tensor.double()
        missed += float((merged[f"{prefix}{key}"].double() - wanted).square().sum())
        whole += float((wanted - base[key].double()).square().sum())
    assert math.sqrt(missed / whole) == pytest.approx(error, rel=1e-3)
    assert 0.05 < error < 0.99
