"""How alike experts are: exact numbers beside the weights, estimates beside those."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mergegit import Repository
from mergegit.errors import BadRecipe, NoBase, UnknownRef
from mergegit.repository.similarity_report import SimilarityReport
from mergegit.repository.spots import UnknownTensor
from tests.families import base_tensors, expert_tensors, generator, save_checkpoint
from tests.repository.lineages import ReadPlaces, Tensors
from tests.repository.test_comparing import Q_PROJ, add_adapter

REFS = ("math", "code", "kin", "twin", "sparse", "wide")


def deltas(repository: Repository, ref: str, base: str = "base") -> dict[str, torch.Tensor]:
    ours, theirs = repository.load(ref), repository.load(base)
    return {name: (ours[name].float() - theirs[name].float()).double() for name in theirs}


def flat(tensors: Tensors) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def pairs(report: SimilarityReport) -> list[tuple[int, int]]:
    count = len(report.experts)
    return [(i, j) for i in range(count) for j in range(i)]


def test_what_is_read_is_exact(lineages: Repository) -> None:
    report = lineages.similarity(REFS, exact=True)
    vectors = [flat(deltas(lineages, ref)) for ref in REFS]
    size = flat({n: t.double() for n, t in lineages.load("base").items()})
    assert report.exact
    assert report.base.name == "base"
    for k, vector in enumerate(vectors):
        figure = report.norms[k]
        assert figure is not None
        assert figure.error is None
        assert figure.value == pytest.approx(float(vector.norm() / size.norm()), rel=1e-6)
    for i, j in pairs(report):
        one, other = vectors[i], vectors[j]
        cosine, agreement, overlap = (
            matrix[i][j] for matrix in (report.cosines, report.agreements, report.overlaps)
        )
        both = (one != 0) & (other != 0)
        assert cosine is not None
        assert agreement is not None
        assert overlap is not None
        assert (cosine.error, agreement.error, overlap.is_exact) == (None, None, True)
        assert cosine.value == pytest.approx(
            float(one @ other / one.norm() / other.norm()), abs=1e-6
        )
        assert overlap.share == pytest.approx(float(both.double().mean()), abs=1e-12)
        same = float((one[both].sign() == other[both].sign()).double().mean())
        assert agreement.value == pytest.approx(same, abs=1e-12)


def test_the_number_of_threads_changes_nothing(lineages_path: Path) -> None:
    reports = []
    for threads in (1, 3):
        with Repository.open(lineages_path, threads=threads) as repository:
            reports.append(repository.similarity(REFS[:3], exact=True))
    assert reports[0] == reports[1]


def test_matrices_are_symmetric(lineages: Repository) -> None:
    report = lineages.similarity(REFS[:3])
    for matrix in (report.cosines, report.agreements, report.overlaps):
        assert [list(row) for row in matrix] == [
            list(column) for column in zip(*matrix, strict=True)
        ]


def test_estimates_err_no_more_than_they_say_and_nothing_is_read(
    lineages: Repository, read_places: ReadPlaces
) -> None:
    told = lineages.similarity(REFS)
    assert read_places.blocks(lineages) == []
    read = lineages.similarity(REFS, exact=True)
    assert [figure.value for figure in told.norms if figure] == pytest.approx(
        [figure.value for figure in read.norms if figure]
    )
    for i, j in pairs(told):
        cosine, true = told.cosines[i][j], read.cosines[i][j]
        assert cosine is not None
        assert true is not None
        assert cosine.error is not None
        assert abs(cosine.value - true.value) < 4.5 * cosine.error
        overlap, counted = told.overlaps[i][j], read.overlaps[i][j]
        assert overlap is not None
        assert counted is not None
        assert overlap.low - 1e-12 <= counted.share <= overlap.high + 1e-12
        assert overlap.low <= overlap.share <= overlap.high


def test_signs_agree_as_estimated_where_changes_are_normal(lineages: Repository) -> None:
    refs = ("math", "code", "kin", "prose")
    told, read = lineages.similarity(refs), lineages.similarity(refs, exact=True)
    for i, j in pairs(told):
        figure, true = told.agreements[i][j], read.agreements[i][j]
        assert figure is not None
        assert true is not None
        assert figure.error is not None
        # Rounding to bf16 makes changes that are not quite normal.
        assert abs(figure.value - true.value) < 4.5 * figure.error + 0.01


def test_blocks_that_two_experts_share_are_known_to_overlap(lineages: Repository) -> None:
    """``twin`` has half of its tensors from ``math``: there is nothing to estimate in them."""
    report = lineages.similarity(["math", "twin"], patterns=["layers.1.mlp"])
    assert report.overlaps[0][1] == report.overlaps[0][0]
    assert report.cosines[0][1] is not None
    assert report.cosines[0][1].value == pytest.approx(1.0, abs=1e-9)
    assert report.agreements[0][1] is not None
    assert report.agreements[0][1].value == pytest.approx(1.0, abs=1e-6)


def test_only_blocks_that_experts_changed_are_read(
    lineages: Repository, read_places: ReadPlaces
) -> None:
    report = lineages.similarity(["sparse", "math"], patterns=["mlp"], exact=True)
    read = set(read_places.blocks(lineages))
    assert report.read_bytes > 0

    def blocks(ref: str) -> set[bytes]:
        tensors = lineages.manifest(ref).tensors
        return {b for n, i in tensors.items() if "mlp" in n for b in lineages.tensor(i).blocks()}

    assert read == blocks("base") | blocks("sparse") | blocks("math")
    read_places.places.clear()
    lineages.similarity(["sparse", "base"], base="base", patterns=["mlp"], exact=True)
    changed = blocks("sparse") - blocks("base")
    assert len(changed) == 1
    assert len(set(read_places.blocks(lineages))) == 2  # that one, and the base's in its place


def test_experts_that_did_nothing_have_no_cosine(lineages: Repository) -> None:
    for exact in (False, True):
        report = lineages.similarity(["base", "math"], base="base", exact=exact)
        assert report.cosines[0][1] is None
        assert report.agreements[0][1] is None
        assert report.norms[0] is not None
        assert report.norms[0].value == 0.0
        assert report.overlaps[0][1] is not None
        assert report.overlaps[0][1].share == 0.0


def test_without_refs_it_is_about_all_that_was_added_on_one_base(lineages: Repository) -> None:
    report = lineages.similarity()
    names = {expert.name for expert in report.experts}
    assert report.base.name == "base"
    assert {"math", "code", "prose", "kin"} <= names
    # A base, one without and one of another, and merges.
    assert not {"base", "grown", "later", "both", "all"} & names


def test_a_merge_beside_its_expert_is_compared_on_the_base_of_both(lineages: Repository) -> None:
    report = lineages.similarity(["all", "prose"])
    assert report.base.name == "base"
    one, other = flat(deltas(lineages, "all")), flat(deltas(lineages, "prose"))
    true = float(one @ other / one.norm() / other.norm())
    cosine = report.cosines[0][1]
    assert cosine is not None
    assert cosine.value == pytest.approx(true, abs=0.05)


@pytest.mark.parametrize("merge", ["lean", "dropped", "all"])
def test_a_merge_is_as_like_its_experts_as_its_recipe_says(
    merge: str, lineages: Repository
) -> None:
    """However little was read of them: what is missing points nowhere."""
    refs = [merge, "math", "prose", "kin"]
    told, read = lineages.similarity(refs), lineages.similarity(refs, exact=True)
    for i, j in pairs(told):
        cosine, true = told.cosines[i][j], read.cosines[i][j]
        assert cosine is not None
        assert true is not None
        assert cosine.error is not None
        assert abs(cosine.value - true.value) < 4 * cosine.error + 0.01
    assert told.norms[0] is not None
    assert read.norms[0] is not None
    assert told.norms[0].value == pytest.approx(read.norms[0].value, rel=0.04)


def test_what_statistics_do_not_tell_is_left_open(lineages: Repository) -> None:
    report = lineages.similarity(["voted", "math", "code"])
    assert report.cosines[0][1] is None
    assert report.overlaps[0][0] is None
    assert report.norms[0] is None
    assert report.cosines[1][2] is not None
    assert lineages.similarity(["voted", "math"], exact=True).cosines[0][1] is not None


def test_tensors_that_not_all_have_are_left_out_and_named(lineages: Repository) -> None:
    report = lineages.similarity(["math", "grown"], base="base", exact=True)
    assert report.left_out == {
        "lm_head.weight": "it has another shape in grown",
        "model.embed_tokens.weight": "it has another shape in grown",
        "model.norm.weight": "grown lack it",
    }
    ours, theirs = deltas(lineages, "math"), lineages.load("grown")
    names = [name for name in ours if name not in report.left_out]
    base = lineages.load("base")
    one = flat({n: ours[n] for n in names})
    other = flat({n: (theirs[n].float() - base[n].float()).double() for n in names})
    cosine = report.cosines[0][1]
    assert cosine is not None
    assert cosine.value == pytest.approx(float(one @ other / one.norm() / other.norm()), abs=1e-6)


def test_tensors_that_can_not_be_subtracted_are_named_where_they_differ(
    repository: Repository, tmp_path: Path
) -> None:
    for name, value in (("base", 0), ("one", 1), ("other", 2)):
        tensors = {
            "w": torch.full((300,), float(value)) + torch.arange(300.0),
            "ids": torch.tensor([value]),
            "fixed": torch.tensor([7]),
        }
        save_file(tensors, tmp_path / f"{name}.safetensors")
        repository.add(tmp_path / f"{name}.safetensors")
    report = repository.similarity()
    assert report.left_out == {"ids": "I64 can't be subtracted"}
    assert report.tensors == 1


def test_two_bases_with_as_many_branches_must_be_told_apart(
    repository: Repository, tmp_path: Path
) -> None:
    for base in ("x", "y"):
        tensors = {f"{base}.w": base_tensors()["model.norm.weight"]}
        repository.add(save_checkpoint(tmp_path / base, tensors, shards=1))
        for expert in ("one", "two"):
            moved = expert_tensors(tensors, expert, 0.1)
            repository.add(save_checkpoint(tmp_path / f"{base}-{expert}", moved, shards=1))
    with pytest.raises(NoBase, match="as many branches stand on each of") as refused:
        repository.similarity()
    assert "--base" in refused.value.hint
    assert [e.name for e in repository.similarity(base="y").experts] == ["y-one", "y-two"]


def test_an_adapter_is_an_expert_like_another(repository: Repository, tmp_path: Path) -> None:
    base = {f"{Q_PROJ}.weight": base_tensors()[f"{Q_PROJ}.weight"], "norm": torch.ones(8)}
    repository.add(save_checkpoint(tmp_path / "base", base, torch.float32, shards=1))
    moved = add_adapter(repository, tmp_path / "lora", "base", "lora")
    other = torch.randn((96, 96), generator=generator("full")) * 1e-3 + 0.01 * moved.float()
    full = {**base, f"{Q_PROJ}.weight": base[f"{Q_PROJ}.weight"] + other}
    repository.add(save_checkpoint(tmp_path / "full", full, torch.float32, shards=1))
    true = float((moved * other).sum() / moved.norm() / other.double().norm())
    told = repository.similarity(["lora", "full"]).cosines[0][1]
    read = repository.similarity(["lora", "full"], exact=True).cosines[0][1]
    assert told is not None
    assert read is not None
    assert told.error is not None
    assert abs(told.value - true) < 4.5 * told.error
    assert (read.error, read.value) == (None, pytest.approx(true, abs=1e-4))


REFUSED: dict[str, tuple[Callable[[Repository], object], type[Exception], str]] = {
    "one alone": (lambda r: r.similarity(["math"]), BadRecipe, "alone"),
    "a ref that is not there": (lambda r: r.similarity(["math", "x"]), UnknownRef, "x"),
    "no common base": (lambda r: r.similarity(["math", "grown"]), NoBase, "no common ancestor"),
    "a base of one branch": (lambda r: r.similarity(base="math"), NoBase, "no two branches on"),
    "a name that nothing has": (
        lambda r: r.similarity(["math", "code"], patterns=["zzz"]), UnknownTensor, "zzz",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_compared_is_refused(case: str, lineages: Repository) -> None:
    ask, error, words = REFUSED[case]
    with pytest.raises(error, match=words) as refused:
        ask(lineages)
    assert refused.value.hint  # type: ignore[attr-defined]


def test_an_empty_repository_has_nothing_to_compare(repository: Repository) -> None:
    with pytest.raises(NoBase, match="no two branches"):
        repository.similarity()


def test_elements_are_counted(lineages: Repository) -> None:
    report = lineages.similarity(["math", "code"], patterns=["model.norm"])
    assert (report.tensors, report.elements) == (1, 96)
    assert math.isclose(report.overlaps[0][0].share * 96, 27)  # type: ignore[union-attr]
