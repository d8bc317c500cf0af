"""Diffs of weights: what is the same, and how large the change is of what is not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mergegit import Repository
from mergegit.errors import UnknownRef
from mergegit.repository.comparing import DiffReport, TensorChange, cosine_of, relative_of
from mergegit.repository.figures import Figure
from mergegit.repository.spots import UnknownTensor
from tests.families import base_tensors, generator, save_checkpoint
from tests.handmade import Raw, write_safetensors
from tests.repository.conftest import ADAPTERS
from tests.repository.lineages import MOVED, ReadPlaces, Tensors

STILL = [f"model.layers.{layer}.input_layernorm.weight" for layer in (0, 1)]
"""Tensors that no member of the family moved."""


def by_name(report: DiffReport) -> dict[str, TensorChange]:
    return {change.name: change for change in report.tensors}


def load(repository: Repository, ref: str) -> Tensors:
    return {name: tensor.double() for name, tensor in repository.load(ref).items()}


def norm(tensors: Tensors) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors.values()))


def minus(one: Tensors, other: Tensors) -> Tensors:
    """Differences of the tensors that both have in one shape."""
    common = [name for name in one if name in other and one[name].shape == other[name].shape]
    return {name: one[name] - other[name] for name in common}


def dot(one: Tensors, other: Tensors) -> float:
    return sum(float((one[name] * other[name]).sum()) for name in one)


def near(figure: Figure | None, true: float, *, sigmas: float = 4.5) -> bool:
    """Whether an estimate is one, and errs no more than it may."""
    assert figure is not None
    assert figure.error is not None
    return abs(figure.value - true) <= sigmas * figure.error


def is_exactly(figure: Figure | None, true: float) -> bool:
    """Whether a number is said to be exact, and is."""
    assert figure is not None
    return figure.error is None and math.isclose(figure.value, true, rel_tol=1e-6, abs_tol=1e-12)


# -- what is the same ------------------------------------------------------------------------------


def test_what_became_of_each_tensor_is_told(lineages: Repository) -> None:
    report = lineages.diff("math", "grown")
    changes = by_name(report)
    assert changes["model.norm.weight"].status == "removed"
    assert changes["model.layers.0.self_attn.q_proj.bias"].status == "added"
    embedding = changes["model.embed_tokens.weight"]
    assert embedding.status == "reshaped"
    assert (embedding.old.shape, embedding.new.shape) == ((700, 96), (740, 96))  # type: ignore[union-attr]
    assert {c.name for c in report.with_status("same")} == {
        name for name in changes if "layers.1" in name or name in STILL
    }
    assert {c.name for c in report.with_status("changed")} == {
        "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight",
    }  # fmt: skip


def test_identical_commits_are_told_by_their_ids_alone(
    lineages: Repository, read_places: ReadPlaces
) -> None:
    report = lineages.diff("math", "math", against="code", exact=True)
    assert report.is_same
    assert all(change.status == "same" for change in report.tensors)
    assert report.read_bytes == 0
    assert read_places.blocks(lineages) == []


def test_blocks_that_are_the_same_are_counted_as_that(lineages: Repository) -> None:
    change = by_name(lineages.diff("base", "sparse"))[MOVED]
    assert (change.status, change.blocks_changed, len(change.either)) == ("changed", 1, 2)


def test_the_order_of_layers_is_that_of_their_numbers(
    repository: Repository, tmp_path: Path
) -> None:
    names = [f"layers.{n}.w" for n in range(12)]
    for at, name in enumerate(("a", "b")):
        write_safetensors(
            tmp_path / f"{name}.safetensors",
            {n: Raw.random("I32", 4, seed=at) for n in sorted(names)},
        )
        repository.add(tmp_path / f"{name}.safetensors", no_base=True)
    assert [change.name for change in repository.diff("a", "b").tensors] == names


# -- what statistics tell --------------------------------------------------------------------------


def test_an_expert_beside_its_base_is_known_exactly_and_nothing_is_read(
    lineages: Repository, read_places: ReadPlaces
) -> None:
    report = lineages.diff("base", "math", files=False)
    assert read_places.blocks(lineages) == []
    base, math_ = load(lineages, "base"), load(lineages, "math")
    delta = minus(math_, base)
    for name, change in by_name(report).items():
        assert is_exactly(change.norm, float(delta[name].norm())), name
        assert is_exactly(change.relative, float(delta[name].norm() / base[name].norm())), name
        assert change.elements_changed == int((delta[name] != 0).sum())
    assert is_exactly(relative_of(report.tensors), norm(delta) / norm(base))
    assert {c.name for c in report.with_status("same")} == set(STILL)


def test_the_way_back_is_as_long(lineages: Repository) -> None:
    forth, back = lineages.diff("base", "math"), lineages.diff("math", "base")
    norms = [[change.norm for change in report.tensors] for report in (forth, back)]
    assert norms[0] == norms[1]
    math_ = load(lineages, "math")
    for change in back.with_status("changed"):
        # The size of an expert is that of its base and a change at about a right angle to it.
        assert change.relative is not None
        true = change.norm.value / float(math_[change.name].norm())  # type: ignore[union-attr]
        assert change.relative.value == pytest.approx(true, rel=0.01)


def test_experts_of_one_base_are_estimated_and_nothing_is_read(
    lineages: Repository, read_places: ReadPlaces
) -> None:
    report = lineages.diff("math", "code", files=False)
    assert read_places.blocks(lineages) == []
    delta = minus(load(lineages, "code"), load(lineages, "math"))
    for change in report.with_status("changed"):
        if change.either.elements > 256:
            assert near(change.norm, float(delta[change.name].norm())), change.name
        else:
            assert is_exactly(change.norm, float(delta[change.name].norm()))
        assert change.elements_changed is None
    whole = relative_of(report.tensors)
    assert near(whole, norm(delta) / norm(load(lineages, "math")))


@pytest.mark.parametrize(
    ("old", "new"), [("math", "kin"), ("base", "later"), ("later", "code"), ("code", "later")]
)
def test_what_is_known_of_changes_one_after_another_is_added_up(
    old: str, new: str, lineages: Repository
) -> None:
    delta = minus(load(lineages, new), load(lineages, old))
    for change in lineages.diff(old, new).with_status("changed"):
        if change.either.elements > 256:
            assert near(change.norm, float(delta[change.name].norm())), change.name
            # A tenth is what sketches tell of the difference of two that are nearly the same.
            assert change.norm.error < 0.06 * change.norm.value  # type: ignore[union-attr,operator]


def test_models_without_a_common_base_are_estimated_from_their_own_sketches(
    lineages: Repository,
) -> None:
    """``grown`` was added without a base, and is known beside zeros as the base is."""
    delta = minus(load(lineages, "grown"), load(lineages, "code"))
    changed = lineages.diff("code", "grown").with_status("changed")
    assert "model.layers.0.self_attn.q_proj.weight" in {change.name for change in changed}
    for change in changed:
        assert near(change.norm, float(delta[change.name].norm())), change.name


@pytest.mark.parametrize("ref", ["both", "all", "lean", "dropped"])
def test_a_merge_by_weights_is_known_from_its_recipe(
    ref: str, lineages: Repository, read_places: ReadPlaces
) -> None:
    """Though it was read in part, or a merge of a merge, or dropped at random, and rounded."""
    report = lineages.diff("base", ref, files=False)
    assert read_places.blocks(lineages) == []
    delta = minus(load(lineages, ref), load(lineages, "base"))
    for change in report.with_status("changed"):
        true = float(delta[change.name].norm())
        assert change.norm is not None
        if change.norm.error is None:  # it served as an expert, and was measured
            assert change.norm.value == pytest.approx(true, rel=1e-6)
        else:
            assert near(change.norm, true), change.name
            if change.either.elements > 256:
                assert change.norm.value == pytest.approx(true, rel=0.25), change.name
    assert relative_of(report.tensors).value == pytest.approx(  # type: ignore[union-attr]
        norm(delta) / norm(load(lineages, "base")), rel=0.05
    )


def test_a_merge_that_is_no_sum_is_not_known_without_reading(lineages: Repository) -> None:
    report = lineages.diff("base", "voted")
    assert all(change.norm is None for change in report.with_status("changed"))
    assert relative_of(report.tensors) is None
    read = lineages.diff("base", "voted", exact=True)
    delta = minus(load(lineages, "voted"), load(lineages, "base"))
    assert is_exactly(relative_of(read.tensors), norm(delta) / norm(load(lineages, "base")))


def test_a_model_in_another_dtype_is_compared_by_its_values(lineages: Repository) -> None:
    changes = by_name(lineages.diff("base", "wide"))
    delta = minus(load(lineages, "wide"), load(lineages, "base"))
    for name, change in changes.items():
        assert change.status == "changed"
        assert change.blocks_changed == len(change.either)
        assert is_exactly(change.norm, float(delta[name].norm())), name
    assert changes[STILL[0]].norm == Figure(0.0)


# -- what is read ----------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("old", "new"),
    [("base", "math"), ("math", "code"), ("wide", "math"), ("later", "all"), ("sparse", "twin")],
)
def test_exact_numbers_are_those_of_the_weights(
    old: str, new: str, threads: int, lineages_path: Path
) -> None:
    with Repository.open(lineages_path, threads=threads) as repository:
        report = repository.diff(old, new, exact=True)
        one, other = repository.load(old), repository.load(new)
    for change in report.tensors:
        was, now = one[change.name].float(), other[change.name].float()
        true = (now - was).double()
        assert change.norm is not None
        assert is_exactly(change.norm, float(true.norm())), change.name
        assert change.elements_changed == int((true != 0).sum())
        relative = change.relative
        assert relative is not None
        expected = float(true.norm() / was.double().norm())
        assert relative.value == pytest.approx(expected, rel=1e-3)
        if change.blocks_changed == len(change.either):
            assert is_exactly(relative, expected), change.name


def test_blocks_that_are_the_same_are_not_read(
    lineages: Repository, read_places: ReadPlaces
) -> None:
    report = lineages.diff("base", "sparse", files=False, exact=True)
    read = read_places.blocks(lineages)
    old, new = (
        lineages.tensor(lineages.manifest(ref).tensors[MOVED]) for ref in ("base", "sparse")
    )
    assert set(read) == {old.block(0), new.block(0)}
    assert report.read_bytes == sum(
        place.length
        for place in read_places.places
        for form in lineages.store.forms([old.block(0), new.block(0)]).values()
        for stored in form
        if (place.pack, place.offset) in {(p.pack, p.offset) for p in stored.places}
    )


def test_a_block_that_is_a_delta_from_the_other_one_reads_that_once(
    lineages: Repository, read_places: ReadPlaces
) -> None:
    lineages.diff("base", "math", files=False, exact=True, patterns=["lm_head"])
    read = read_places.blocks(lineages)
    (base,) = lineages.tensor(lineages.manifest("base").tensors["lm_head.weight"]).blocks()
    (expert,) = lineages.tensor(lineages.manifest("math").tensors["lm_head.weight"]).blocks()
    assert read.count(base) == 1
    assert read.count(expert) == 5  # four planes and the residual


def test_tensors_that_can_not_be_subtracted_are_compared_element_by_element(
    repository: Repository, tmp_path: Path
) -> None:
    tensors = {"ids": torch.arange(12), "w": torch.ones(3)}
    for name, ids in (("a", tensors["ids"]), ("b", torch.arange(12) // 3 * 3)):
        save_file({**tensors, "ids": ids}, tmp_path / f"{name}.safetensors")
        repository.add(tmp_path / f"{name}.safetensors", no_base=True)
    change = by_name(repository.diff("a", "b"))["ids"]
    assert (change.status, change.has_numbers, change.elements_changed) == ("changed", False, None)
    exact = by_name(repository.diff("a", "b", exact=True))["ids"]
    assert exact.elements_changed == 8
    assert not exact.has_numbers


def test_what_is_not_finite_counts_as_zero_as_it_does_in_statistics(
    repository: Repository, tmp_path: Path
) -> None:
    base = torch.randn(300, generator=generator("finite"))
    odd = base + 0.5
    odd[7], odd[8] = math.nan, math.inf
    for name, tensor in (("base", base), ("odd", odd)):
        save_file({"w": tensor}, tmp_path / f"{name}.safetensors")
        repository.add(tmp_path / f"{name}.safetensors")
    told = by_name(repository.diff("base", "odd"))["w"]
    read = by_name(repository.diff("base", "odd", exact=True))["w"]
    expected = math.sqrt(298) * 0.5
    assert told.norm.value == pytest.approx(expected, rel=1e-5)  # type: ignore[union-attr]
    assert read.norm.value == pytest.approx(expected, rel=1e-5)  # type: ignore[union-attr]
    assert told.elements_changed == read.elements_changed == 298


def test_scalars_and_empty_tensors_are_compared(repository: Repository, tmp_path: Path) -> None:
    for name, value in (("a", 2.0), ("b", 3.0)):
        tensors = {"scale": torch.tensor(value), "empty": torch.zeros((0, 4))}
        save_file(tensors, tmp_path / f"{name}.safetensors")
        repository.add(tmp_path / f"{name}.safetensors")
    for exact in (False, True):
        changes = by_name(repository.diff("a", "b", exact=exact))
        assert is_exactly(changes["scale"].relative, 0.5)
        assert changes["empty"].status == "same"


# -- a third model beside --------------------------------------------------------------------------


@pytest.mark.parametrize("third", ["code", "kin", "both", "later", "twin"])
def test_the_direction_of_a_change_is_compared_with_a_third_models(
    third: str, lineages: Repository
) -> None:
    base = load(lineages, "base")
    ours, theirs = minus(load(lineages, "math"), base), minus(load(lineages, third), base)
    true = dot(ours, theirs) / norm(ours) / norm(theirs)
    told = lineages.diff("base", "math", against=third)
    assert near(cosine_of(told.tensors), true)
    read = lineages.diff("base", "math", against=third, exact=True)
    assert is_exactly(cosine_of(read.tensors), true)
    for change in read.with_status("changed"):
        one, other = ours[change.name], theirs[change.name]
        if float(other.norm()):
            cosine = float((one * other).sum() / one.norm() / other.norm())
            assert is_exactly(change.cosine, cosine), change.name
        else:
            assert change.cosine is None


def test_a_model_beside_itself_has_its_own_direction(lineages: Repository) -> None:
    cosine = cosine_of(lineages.diff("base", "math", against="math").tensors)
    assert cosine is not None
    assert cosine.value == pytest.approx(1.0, abs=1e-6)


def test_tensors_that_the_third_model_lacks_are_left_out_of_the_cosine(
    lineages: Repository,
) -> None:
    report = lineages.diff("base", "code", against="grown", exact=True)
    beside = [change for change in report.tensors if change.is_beside]
    assert {change.name for change in report.tensors} - {change.name for change in beside} == {
        "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight",
    }  # fmt: skip
    base = load(lineages, "base")
    theirs = minus(load(lineages, "grown"), base)
    ours = {name: t for name, t in minus(load(lineages, "code"), base).items() if name in theirs}
    true = dot(ours, theirs) / norm(ours) / norm(theirs)
    assert is_exactly(cosine_of(report.tensors), true)


# -- adapters --------------------------------------------------------------------------------------

Q_PROJ = "model.layers.0.self_attn.q_proj"


def add_adapter(repository: Repository, path: Path, base: str, seed: str) -> torch.Tensor:
    """Add a LoRA adapter of one projection; returns what it adds to the weight."""
    a = torch.randn((4, 96), generator=generator(seed, "a")) * 0.02
    b = torch.randn((96, 4), generator=generator(seed, "b")) * 0.02
    path.mkdir()
    prefix = f"base_model.model.{Q_PROJ}"
    factors = {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    save_file(factors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"],
        "base_model_name_or_path": base,
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config))
    repository.add(path, base=base)
    return 2.0 * (b.double() @ a.double())


def test_an_adapter_is_seen_as_the_model_that_it_makes(
    repository: Repository, tmp_path: Path
) -> None:
    base = {f"{Q_PROJ}.weight": base_tensors()[f"{Q_PROJ}.weight"], "norm": torch.ones(8)}
    repository.add(save_checkpoint(tmp_path / "base", base, torch.float32, shards=1))
    one = add_adapter(repository, tmp_path / "one", "base", "one")
    other = add_adapter(repository, tmp_path / "other", "base", "other")
    weight = base[f"{Q_PROJ}.weight"].double()
    for exact in (False, True):
        report = repository.diff("base", "one", against="other", exact=exact)
        changes = by_name(report)
        assert changes.keys() == base.keys()
        change = changes[f"{Q_PROJ}.weight"]
        assert change.relative is not None
        true = float(one.norm() / weight.norm())
        assert change.relative.value == pytest.approx(true, rel=1e-4)
        assert change.relative.error is None
        cosine = float((one * other).sum() / one.norm() / other.norm())
        if exact:
            assert change.cosine.value == pytest.approx(cosine, abs=1e-5)  # type: ignore[union-attr]
        else:
            assert near(change.cosine, cosine)
        assert "one is an adapter" in report.notes[0]
    apart = by_name(repository.diff("one", "other", exact=True))[f"{Q_PROJ}.weight"]
    assert apart.norm is not None
    assert apart.norm.value == pytest.approx(float((other - one).norm()), rel=1e-4)


@pytest.mark.parametrize("ref", ADAPTERS)
def test_every_kind_of_adapter_is_known_as_it_is_read(
    ref: str, lora: Repository, read_places: ReadPlaces
) -> None:
    told = lora.diff("base", ref, against="math", files=False)
    blocks = {b for i in lora.manifest("base").tensors.values() for b in lora.tensor(i).blocks()}
    assert not blocks & set(read_places.blocks(lora))
    read = by_name(lora.diff("base", ref, against="math", files=False, exact=True))
    assert {c.name for c in told.with_status("changed")} != set()
    for change in told.tensors:
        exact = read[change.name]
        assert (change.status, change.elements_changed) == (exact.status, exact.elements_changed)
        assert change.norm is not None
        assert exact.norm is not None
        assert (change.norm.error, exact.norm.error) == (None, None)
        assert change.norm.value == pytest.approx(exact.norm.value, rel=1e-5)
        if change.cosine is not None and exact.cosine is not None:
            assert abs(change.cosine.value - exact.cosine.value) <= 4.5 * (
                change.cosine.error or 1e-5
            )


# -- what is asked for -----------------------------------------------------------------------------


def test_names_restrict_what_is_compared(lineages: Repository, read_places: ReadPlaces) -> None:
    report = lineages.diff("base", "math", patterns=["mlp"], exact=True, weights=True)
    assert {change.name for change in report.tensors} == {
        f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)
    }
    assert not report.files
    whole = lineages.diff("base", "math")
    assert by_name(report)[MOVED].blocks_changed == by_name(whole)[MOVED].blocks_changed


def test_weights_or_files_alone(lineages: Repository) -> None:
    assert not lineages.diff("base", "math", files=False).files
    files = lineages.diff("base", "math", weights=False)
    assert not files.tensors
    assert [file.path for file in files.files] == ["README.md"]


REFUSED: dict[str, tuple[Callable[[Repository], object], type[Exception], str]] = {
    "a ref that is not there": (lambda r: r.diff("base", "nothing"), UnknownRef, "nothing"),
    "a third that is not there": (
        lambda r: r.diff("base", "math", against="nothing"), UnknownRef, "nothing",
    ),
    "a name that nothing has": (
        lambda r: r.diff("base", "math", patterns=["mlp", "zzz"]), UnknownTensor, "zzz",
    ),
    "a tensor's name among files": (
        lambda r: r.diff("base", "math", patterns=["mlp"], weights=False), UnknownTensor, "file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_there_is_refused(case: str, lineages: Repository) -> None:
    ask, error, word = REFUSED[case]
    with pytest.raises(error, match=word):
        ask(lineages)


def test_what_was_zero_and_is_no_more_has_no_relative_norm(
    repository: Repository, tmp_path: Path
) -> None:
    for name, value in (("a", 0.0), ("b", 0.5)):
        save_file({"bias": torch.full((4,), value)}, tmp_path / f"{name}.safetensors")
        repository.add(tmp_path / f"{name}.safetensors")
    change = by_name(repository.diff("a", "b"))["bias"]
    assert is_exactly(change.norm, 1.0)
    assert change.relative is None
