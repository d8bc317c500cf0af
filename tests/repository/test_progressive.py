"""Progressive deltas in a repository: layout, prefixes, bounds, bases of bases, repack."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from mergegit import Repository
from mergegit.objects import BlockId
from mergegit.storage.pack import Encoding
from tests.families import EXPERTS, Family, base_tensors, expert_tensors, save_checkpoint
from tests.trees import tree_of

BIG = "model.layers.0.mlp.up_proj.weight"


def forms(repository: Repository, ref: str, name: str) -> list[list[Encoding]]:
    """The encodings in which each block of a tensor is stored."""
    tensor = repository.tensor(repository.manifest(ref).tensors[name])
    stored = repository.store.forms(tensor.blocks())
    return [[form.encoding for form in stored[block]] for block in tensor.blocks()]


def delta_norm(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return float(
        np.sqrt(sum(float(((state[n].double() - other[n].double()) ** 2).sum()) for n in state))
    )


def test_an_expert_is_stored_as_deltas_and_a_base_plainly(loaded: Repository) -> None:
    assert forms(loaded, "math", BIG) == [[Encoding.DELTA]] * 2
    assert forms(loaded, "base", BIG) == [[Encoding.RAW]] * 2


def test_raw_encoding_stores_an_expert_plainly(repository: Repository, family: Family) -> None:
    repository.add(family.base)
    repository.add(family.experts[0], encoding="raw")
    assert forms(repository, "math", BIG) == [[Encoding.RAW]] * 2


def test_a_layer_of_an_expert_is_one_sequential_run(loaded: Repository) -> None:
    manifest = loaded.manifest("math")
    blocks = [
        block
        for shard in manifest.shards
        for name in shard.names
        for block in loaded.tensor(manifest.tensors[name]).blocks()
    ]
    stored = loaded.store.forms(blocks)
    for layer in range(5):
        places = [
            form.places[layer]
            for block in blocks
            for form in stored[block]
            if form.encoding is Encoding.DELTA
        ]
        assert len({place.pack for place in places}) == 1
        gaps = [
            later.offset - (earlier.offset + earlier.length)
            for earlier, later in itertools.pairwise(places)
        ]
        assert set(gaps) == {128}


def test_reading_one_plane_reads_the_bytes_of_one_plane(
    loaded: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = loaded.recipe(["math"])
    planner = loaded.planner(recipe)
    first = [int(costs[0]) for costs in planner.problem.experts[0].costs]
    plan = planner.plan(sum(first) // 2)
    assert 0 < plan.planned_bytes <= sum(first) // 2
    assert sum(plan.experts[0].layer_bytes) == plan.planned_bytes


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("task_arithmetic", {"weight": 0.5}),
        ("task_arithmetic", {"weight": 0.7, "code.weight": -0.4, "lambda": 1.5}),
        ("linear", {"math.weight": 2.0}),
        ("dare_linear", {"density": 0.4}),
    ],
)
def test_the_error_is_as_predicted_and_never_above_the_bound(
    loaded: Repository, method: str, parameters: dict[str, float]
) -> None:
    recipe = loaded.recipe(EXPERTS, method=method, parameters=parameters, dtype="F32")
    full = loaded.merge(loaded.plan(recipe))
    whole = loaded.load(full.branch)
    base = {name: tensor.float() for name, tensor in loaded.load("base").items()}
    norm = delta_norm(whole, base)
    for budget in ("1%", "3%", "8%", "15%", "25%", "40%"):
        report = loaded.merge(loaded.plan(recipe, budget=budget))
        plan = report.plan.plan
        error = delta_norm(loaded.load(report.branch), whole)
        assert plan.error_bound is not None
        assert error <= plan.error_bound * plan.merged_norm * 1.0001
        assert error / norm == pytest.approx(plan.predicted_error, rel=0.1)


def test_a_fine_tune_can_be_a_base(repository: Repository, tmp_path: Path) -> None:
    """Its blocks, stored as deltas so far, are stored plainly beside: chains have length one."""
    base = base_tensors()
    chat = expert_tensors(base, "chat")
    expert = expert_tensors(chat, "math", 5e-4)
    repository.add(save_checkpoint(tmp_path / "base", base))
    repository.add(save_checkpoint(tmp_path / "chat", chat))
    assert forms(repository, "chat", BIG) == [[Encoding.DELTA]] * 2
    added = save_checkpoint(tmp_path / "math", expert)
    repository.add(added, base="chat")
    assert forms(repository, "chat", BIG) == [[Encoding.DELTA, Encoding.RAW]] * 2
    assert forms(repository, "math", BIG) == [[Encoding.DELTA]] * 2
    repository.checkout("math", tmp_path / "out")
    assert tree_of(tmp_path / "out") == tree_of(added)
    assert repository.fsck().is_clean


def test_an_expert_can_be_merged_on_another_base_than_its_delta_has(
    loaded: Repository, family: Family, tmp_path: Path
) -> None:
    recipe = loaded.recipe(["code", "prose"], base="math")
    plan = loaded.plan(recipe, budget="60%")
    assert loaded.merge(plan).read_bytes == plan.plan.planned_bytes
    full = loaded.plan(recipe, anew=True)
    assert loaded.merge(full).read_bytes == full.plan.planned_bytes


def test_repack_makes_deltas_of_what_was_added_plainly(
    repository: Repository, family: Family, tmp_path: Path
) -> None:
    repository.add(family.base)
    repository.add(family.experts[0], encoding="raw")
    before = repository.status().disk_bytes
    commit = repository.resolve("math")
    report = repository.repack()
    assert report.after_bytes < 0.7 * report.before_bytes
    assert forms(repository, "math", BIG) == [[Encoding.DELTA]] * 2
    assert repository.status().disk_bytes < before
    assert repository.resolve("math") == commit
    assert repository.fsck().is_clean
    repository.checkout("math", tmp_path / "out")
    assert tree_of(tmp_path / "out") == tree_of(family.experts[0])
    assert repository.repack().blocks == 0


def test_repack_makes_plain_bytes_of_deltas(loaded: Repository) -> None:
    loaded.repack(["math"], encoding="raw")
    assert forms(loaded, "math", BIG) == [[Encoding.RAW]] * 2
    assert forms(loaded, "code", BIG) == [[Encoding.DELTA]] * 2
    assert loaded.fsck().is_clean


def test_repack_leaves_blocks_that_are_bases_plain(loaded: Repository) -> None:
    loaded.repack()
    assert forms(loaded, "base", BIG) == [[Encoding.RAW]] * 2


def test_repack_pays_where_the_base_was_added_late(repository: Repository, family: Family) -> None:
    repository.add(family.experts[0])
    repository.add(family.base, no_base=True)
    report = repository.repack(["math"], base="base")
    assert report.blocks > 0
    assert forms(repository, "math", BIG) == [[Encoding.DELTA]] * 2
    assert repository.fsck().is_clean


def test_a_merge_gives_the_same_contents_after_repack(loaded: Repository) -> None:
    recipe = loaded.recipe(EXPERTS, method="ties", parameters={"density": 0.3})
    deltas = loaded.merge(loaded.plan(recipe), branch="deltas")
    loaded.repack(encoding="raw")
    plain = loaded.merge(loaded.plan(recipe), branch="plain")
    assert deltas.commit != plain.commit
    assert loaded.manifest("deltas").tensors == loaded.manifest("plain").tensors


def test_a_damaged_plane_is_found_before_it_is_used(loaded: Repository) -> None:
    """Some layers of a block have no id to vouch for them; their checksums do."""
    tensor = loaded.tensor(loaded.manifest("math").tensors[BIG])
    block = BlockId(tensor.block(0))
    place = loaded.store.forms([block])[block][0].places[0]
    name = loaded.store.reader.pack_name(place)
    path = loaded.store.location.packs / f"{name}.pack"
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[place.offset + 100] ^= 1
    path.write_bytes(data)
    loaded.store.reader.close()
    recipe = loaded.recipe(["math"])
    with pytest.raises(Exception, match="damaged"):
        loaded.merge(loaded.plan(recipe, budget="7%"))


def test_merging_on_a_fine_tune_makes_no_chain_of_two(
    repository: Repository, tmp_path: Path
) -> None:
    base = base_tensors()
    chat = expert_tensors(base, "chat")
    repository.add(save_checkpoint(tmp_path / "base", base))
    for name, tensors in (
        ("chat", chat),
        ("math", expert_tensors(chat, "math", 5e-4)),
        ("code", expert_tensors(chat, "code", 5e-4)),
    ):
        repository.add(save_checkpoint(tmp_path / name, tensors), base="base")
    recipe = repository.recipe(["math", "code"], base="chat")
    repository.merge(repository.plan(recipe), branch="merged")
    for _, stored in repository.store.catalog.blocks():
        for form in stored:
            if form.encoding is Encoding.DELTA:
                below = repository.store.forms([BlockId(form.base)])[BlockId(form.base)]
                assert Encoding.RAW in {other.encoding for other in below}
    assert repository.fsck().is_clean
