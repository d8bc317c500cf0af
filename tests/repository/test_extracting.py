"""Adapters factored out of fine-tunes: what is written, and how far it is off."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergegit import MergegitError, Repository
from mergegit.errors import BadCheckpoint, BadRecipe, BadTarget, Mismatch, NoBase, NotFinite
from tests.adapters import CONFIG, PREFIX, WEIGHTS, Tensors, adapted, tuned_tensors
from tests.families import generator, save_checkpoint
from tests.trees import tree_of

UP = "model.layers.0.mlp.up_proj.weight"


def low_rank_tune(base: Tensors, rank: int = 3) -> Tensors:
    """A fine-tune in float32 whose matrices have moved by matrices of low rank, and norms too."""
    tuned = {}
    for name, tensor in base.items():
        if tensor.ndim == 2 and "embed" not in name:
            b = torch.randn(tensor.shape[0], rank, generator=generator("b", name))
            a = torch.randn(rank, tensor.shape[1], generator=generator("a", name))
            tuned[name] = tensor.float() + 1e-3 * b @ a
        else:
            noise = torch.randn(tensor.shape, generator=generator(name)) * 1e-2
            tuned[name] = tensor.float() + noise * ("layernorm" not in name)
    return tuned


def error_of(path: Path, base: Tensors, expert: Tensors) -> float:
    """|expert - (base + adapter)| / |expert - base|."""
    made = adapted(path, base)
    missed = sum(float((expert[n].double() - made[n]).square().sum()) for n in base)
    whole = sum(float((expert[n].double() - base[n].double()).square().sum()) for n in base)
    return math.sqrt(missed / whole)


def best_error(base: Tensors, expert: Tensors, rank: int) -> float:
    """The least error that any adapter of the rank has."""
    missed = whole = 0.0
    for name, tensor in base.items():
        delta = expert[name].double() - tensor.double()
        whole += float(delta.square().sum())
        if delta.ndim == 2 and "embed" not in name:
            missed += float(torch.linalg.svdvals(delta)[rank:].square().sum())
    return math.sqrt(missed / whole)


@pytest.mark.parametrize("rank", [1, 8, 48])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_the_stated_error_is_that_of_base_and_adapter(
    lora: Repository, base: Tensors, tmp_path: Path, rank: int, dtype: str | None
) -> None:
    report = lora.extract_lora("math", tmp_path / "out", rank=rank, dtype=dtype)
    expert = lora.load("math")
    measured = error_of(tmp_path / "out", base, expert)
    assert report.error == pytest.approx(measured, rel=1e-5, abs=1e-7)
    best = best_error(base, expert, rank)
    assert best * (1 - 1e-5) - 1e-6 <= report.error <= best + (1e-5 if dtype else 5e-3)
    assert (report.commit, report.base) == (lora.resolve("math"), lora.resolve("base"))
    assert (report.base_ref, report.rank) == ("base", rank)
    files = list((tmp_path / "out").iterdir())
    assert report.nbytes == sum(file.stat().st_size for file in files)
    assert {file.name for file in files} == {WEIGHTS, CONFIG}


def test_the_errors_of_kinds_are_those_of_their_matrices(
    lora: Repository, base: Tensors, tmp_path: Path
) -> None:
    report = lora.extract_lora("math", tmp_path / "out", rank=4, dtype="float32")
    expert, made = lora.load("math"), adapted(tmp_path / "out", base)
    by_kind: dict[str, list[float]] = {}
    for name, tensor in base.items():
        if tensor.ndim == 2 and "embed" not in name:
            delta = expert[name].double() - tensor.double()
            missed = (expert[name].double() - made[name]).norm() / delta.norm()
            kind = name.removesuffix(".weight").split(".", 3)[-1] if "layers" in name else "lm_head"
            by_kind.setdefault(kind, []).append(float(missed))
    assert [kind.kind for kind in report.kinds] == sorted(by_kind)
    for kind in report.kinds:
        errors = by_kind[kind.kind]
        assert kind.count == len(errors)
        assert kind.worst == pytest.approx(max(errors), rel=1e-4)
        assert kind.median == pytest.approx(sum(errors) / len(errors), rel=1e-4)


def test_what_was_of_low_rank_comes_back(lora: Repository, base: Tensors, tmp_path: Path) -> None:
    tuned = low_rank_tune(base)
    lora.add(save_checkpoint(tmp_path / "tuned", tuned, torch.float32), base="base")
    report = lora.extract_lora("tuned", tmp_path / "lora-of-tuned", rank=5)
    assert report.error < 1e-5
    added = lora.add(tmp_path / "lora-of-tuned")
    assert (added.is_adapter, added.base_ref) == (True, "base")
    for expert in ("tuned", "lora-of-tuned"):
        plan = lora.plan(lora.recipe([expert], base="base", dtype="F32"))
        lora.merge(plan, branch=f"of/{expert}")
    want, got = lora.load("of/tuned"), lora.load("of/lora-of-tuned")
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=2e-7 * 50)


def test_the_adapter_added_again_is_off_by_what_was_said(
    lora: Repository, base: Tensors, tmp_path: Path
) -> None:
    report = lora.extract_lora("math", tmp_path / "small", rank=6)
    lora.add(tmp_path / "small")
    lora.merge(lora.plan(lora.recipe(["small"], dtype="F32")), branch="made")
    made, expert = lora.load("made"), lora.load("math")
    missed = sum(float((expert[n].double() - made[n].double()).square().sum()) for n in base)
    whole = sum(float((expert[n].double() - base[n].double()).square().sum()) for n in base)
    assert math.sqrt(missed / whole) == pytest.approx(report.error, rel=1e-4)


def test_what_is_no_matrix_is_saved_whole_and_what_is_the_bases_is_not(
    lora: Repository, tmp_path: Path
) -> None:
    report = lora.extract_lora("math", tmp_path / "out", rank=2)
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    expert = lora.load("math")
    whole = ["model.embed_tokens.weight", "model.norm.weight"]
    assert report.whole == len(whole)
    for name in whole:
        assert torch.equal(tensors[PREFIX + name], expert[name])
    assert not any("layernorm" in name for name in tensors)
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert config["modules_to_save"] == ["model.embed_tokens", "model.norm"]
    assert config["base_model_name_or_path"] == "base"
    assert report.matrices == 5
    assert len(tensors) == 2 * 5 + len(whole)


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [(None, torch.bfloat16), ("float32", torch.float32), ("float16", torch.float16)],
)
def test_factors_have_the_dtype_asked_for_and_whole_tensors_keep_theirs(
    lora: Repository, tmp_path: Path, dtype: str | None, wanted: torch.dtype
) -> None:
    lora.extract_lora("math", tmp_path / "out", rank=2, dtype=dtype)
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    for name, tensor in tensors.items():
        assert tensor.dtype == (wanted if "lora_" in name else torch.bfloat16)


@pytest.mark.parametrize("threads", [1, 4])
def test_threads_change_nothing(lora_template: Path, tmp_path: Path, threads: int) -> None:
    for count in (threads, 2):
        with Repository.open(lora_template, threads=count) as repository:
            repository.extract_lora("math", tmp_path / str(count), rank=3)
    assert tree_of(tmp_path / str(threads)) == tree_of(tmp_path / "2")


def test_a_merge_can_be_extracted_on_any_of_its_ancestors(lora: Repository, tmp_path: Path) -> None:
    lora.merge(lora.plan(lora.recipe(["math", "chat"])), branch="both")
    report = lora.extract_lora("both", tmp_path / "out", rank=6)
    assert report.base_ref == "base"
    again = lora.extract_lora("both", tmp_path / "upon", rank=6, base="math")
    assert again.base_ref == "math"
    assert json.loads((tmp_path / "upon" / CONFIG).read_text())["base_model_name_or_path"] == "math"


GPT2 = {
    "wte.weight": (60, 16),
    "h.0.attn.c_attn.weight": (16, 48),
    "h.0.attn.c_attn.bias": (48,),
    "h.0.attn.c_proj.weight": (16, 16),
    "h.0.attn.c_proj.bias": (16,),
    "h.0.mlp.c_proj.weight": (64, 16),
    "h.0.mlp.c_proj.bias": (16,),
    "ln_f.weight": (16,),
}


def test_weights_that_are_stored_with_inputs_first(repository: Repository, tmp_path: Path) -> None:
    tensors = {n: torch.randn(s, generator=generator(n)) * 0.02 for n, s in GPT2.items()}
    tuned = {
        n: t + 1e-3 * torch.randn(t.shape, generator=generator("t", n)) for n, t in tensors.items()
    }
    for name, model in (("base", tensors), ("tuned", tuned)):
        path = save_checkpoint(tmp_path / name, model, torch.float32, shards=1)
        config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
        (path / "config.json").write_text(json.dumps(config))
        repository.add(path, base="base" if name == "tuned" else None)
    report = repository.extract_lora("tuned", tmp_path / "out", rank=4)
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert config["fan_in_fan_out"] is True
    assert config["task_type"] == "CAUSAL_LM"
    # The class with a head has this before every name of the checkpoint.
    assert all(name.startswith("transformer.") for name in config["target_modules"])
    tensors_of = load_file(tmp_path / "out" / WEIGHTS)
    name = f"{PREFIX}transformer.h.0.attn.c_attn"
    assert tensors_of[f"{name}.lora_A.weight"].shape == (4, 16)
    assert tensors_of[f"{name}.lora_B.weight"].shape == (48, 4)
    repository.add(tmp_path / "out", name="small")
    repository.merge(repository.plan(repository.recipe(["small"])), branch="made")
    made = repository.load("made")
    missed = sum(float((tuned[n] - made[n]).double().square().sum()) for n in tuned)
    whole = sum(float((tuned[n] - tensors[n]).double().square().sum()) for n in tuned)
    assert math.sqrt(missed / whole) == pytest.approx(report.error, rel=1e-4)


def test_a_head_that_is_tied_to_a_saved_embedding_comes_along(
    repository: Repository, base: Tensors, tmp_path: Path
) -> None:
    """PEFT unties the head of a model whose embedding alone is saved."""
    tensors = {name: t for name, t in base.items() if name != "lm_head.weight"}
    tuned = {name: t for name, t in tuned_tensors("tied").items() if name in tensors}
    for name, model in (("base", tensors), ("tuned", tuned)):
        path = save_checkpoint(tmp_path / name, model)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
        repository.add(path)
    repository.extract_lora("tuned", tmp_path / "out", rank=4)
    own = load_file(tmp_path / "out" / WEIGHTS)
    embedding = own[f"{PREFIX}model.embed_tokens.weight"]
    assert torch.equal(own[f"{PREFIX}lm_head.weight"], embedding)
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["ensure_weight_tying"] is True
    report = repository.add(tmp_path / "out", name="small")
    assert not any("ties" in note for note in report.notes)


# -- what can't be extracted -----------------------------------------------------------------------


def refused(
    repository: Repository,
    out: Path,
    expert: str,
    kind: type[MergegitError],
    why: str,
    **options: Any,
) -> str:
    """The hint of the error, after which nothing is left."""
    before = {path.name for path in out.parent.iterdir()}
    with pytest.raises(kind, match=why) as caught:
        repository.extract_lora(expert, out, **{"rank": 4, **options})
    assert {path.name for path in out.parent.iterdir()} == before
    return caught.value.hint


def test_an_adapter_is_one_already(lora: Repository, tmp_path: Path) -> None:
    hint = refused(lora, tmp_path / "out", "chat", Mismatch, "chat is an adapter already")
    assert "checkout" in hint
    refused(lora, tmp_path / "out", "math", Mismatch, "the base chat is an adapter", base="chat")


def test_without_a_difference_there_is_nothing_to_write(
    lora: Repository, base: Tensors, tmp_path: Path
) -> None:
    refused(lora, tmp_path / "out", "base", Mismatch, "does not differ from base", base="base")
    wide = {name: tensor.float() for name, tensor in base.items()}
    lora.add(save_checkpoint(tmp_path / "wide", wide, torch.float32), base="base")
    refused(lora, tmp_path / "out", "wide", Mismatch, "wide does not differ from base")


def test_without_a_base_one_must_be_named(lora: Repository, tmp_path: Path) -> None:
    assert "--base" in refused(lora, tmp_path / "out", "base", NoBase, "without a base")


def test_other_shapes_and_names_are_refused(
    lora: Repository, base: Tensors, tmp_path: Path
) -> None:
    embedding = "model.embed_tokens.weight"
    longer = {**base, embedding: torch.cat([base[embedding], torch.zeros(8, 48).bfloat16()])}
    lora.add(save_checkpoint(tmp_path / "longer", longer), base="base")
    why = r"\[120, 48\] in base but \[128, 48\] in longer"
    refused(lora, tmp_path / "out", "longer", Mismatch, why)
    more = {**base, "model.extra.weight": torch.zeros(3, 3)}
    lora.add(save_checkpoint(tmp_path / "more", more), base="base")
    refused(
        lora, tmp_path / "out", "more", Mismatch, r"model\.extra\.weight is in more but not in base"
    )
    refused(lora, tmp_path / "out", "base", Mismatch, "is in more but not in base", base="more")


def test_a_change_of_no_matrix_is_no_adapter(
    lora: Repository, base: Tensors, tmp_path: Path
) -> None:
    norms = {n: t * 1.5 if "norm" in n else t for n, t in base.items()}
    lora.add(save_checkpoint(tmp_path / "norms", norms), base="base")
    refused(lora, tmp_path / "out", "norms", Mismatch, "in no matrix of a layer")


def test_what_no_module_holds_is_refused(lora: Repository, base: Tensors, tmp_path: Path) -> None:
    for name, scale in (("one", 1.0), ("two", 2.0)):
        own = {**(base if name == "one" else tuned_tensors("x")), "scale": torch.ones(3) * scale}
        lora.add(save_checkpoint(tmp_path / name, own), base="one" if name == "two" else "base")
    refused(lora, tmp_path / "out", "two", BadCheckpoint, "scale can't be part of an adapter")


def test_numbers_that_are_not_finite_are_refused(
    lora: Repository, base: Tensors, tmp_path: Path
) -> None:
    for name in (UP, "model.norm.weight"):
        broken = tuned_tensors("broken")
        broken[name].view(-1)[3] = math.nan
        ref = f"broken-{name.split('.')[1]}"
        lora.add(save_checkpoint(tmp_path / ref, broken), base="base")
        refused(lora, tmp_path / "out", ref, NotFinite, f"the change of {name} holds NaN")


def test_factors_beyond_the_range_of_their_dtype_are_refused(
    lora: Repository, base: Tensors, tmp_path: Path
) -> None:
    large = {n: t.float() + 1e12 * (n == UP) for n, t in base.items()}
    lora.add(save_checkpoint(tmp_path / "large", large, torch.float32), base="base")
    hint = refused(
        lora, tmp_path / "out", "large", NotFinite, "beyond the range of float16", dtype="float16"
    )
    assert "--dtype" in hint


def test_quantised_matrices_are_refused(lora: Repository, base: Tensors, tmp_path: Path) -> None:
    path = tmp_path / "narrow"
    path.mkdir()
    narrow = {n: t.to(torch.float8_e4m3fn) if n == UP else t for n, t in base.items()}
    save_file(narrow, path / "model.safetensors")
    lora.add(path, base="base")
    refused(lora, tmp_path / "out", "narrow", Mismatch, f"{UP} is F8_E4M3 in narrow: quantised")


@pytest.mark.parametrize(
    ("options", "why"), [({"rank": 0}, "rank 0"), ({"dtype": "int8"}, "no dtype for factors")]
)
def test_what_makes_no_sense_is_refused(
    lora: Repository, tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    refused(lora, tmp_path / "out", "math", BadRecipe, why, **options)


def test_a_directory_with_something_in_it_is_left_alone(lora: Repository, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(BadTarget, match="not empty"):
        lora.extract_lora("math", tmp_path / "out", rank=2)
    assert tree_of(tmp_path / "out") == {"mine": b"precious"}
