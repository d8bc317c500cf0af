"""`fsck`: sound repositories are clean, and damage of every kind is found and named."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mergegit import Repository
from mergegit.errors import Damaged, UnusableRepository
from mergegit.objects import Commit
from mergegit.repository.checking import CheckReport
from mergegit.repository.lineage import name_of
from mergegit.storage.pack import HEADER, PREAMBLE
from tests.families import Family
from tests.repository.damage import flip, records_of
from tests.trees import tree_of

WORDS = ("commit", "manifest", "tensor", "plan", "statistics", "raw",
         "layer 0", "layer 1", "layer 2", "layer 3", "layer 4")  # fmt: skip


def texts(report: CheckReport) -> list[str]:
    return [f"{problem.what}; {', '.join(problem.commits)}" for problem in report.problems]


# -- sound -----------------------------------------------------------------------------------------


def test_an_empty_repository_is_clean(repository: Repository) -> None:
    report = repository.fsck()
    assert report.is_clean
    assert (report.packs, report.blocks, report.objects, report.commits) == (0, 0, 0, 0)


def test_a_repository_is_clean_after_every_verb(
    tiny: Repository, tiny_family: Family, tmp_path: Path
) -> None:
    def check() -> None:
        report = tiny.fsck()
        assert texts(report) == []
        assert report.notes == []

    check()
    tiny.add(tiny_family.experts[1], name="math")
    check()
    recipe = tiny.recipe(["math", "prose"], method="ties", parameters={"density": 0.5})
    plan = tiny.plan(recipe, budget="40%")
    check()
    tiny.merge(plan, branch="merged")
    check()
    tiny.create_branch("again", "merged")
    tiny.create_tag("v1", "merged")
    tiny.rename_branch("again", "release")
    tiny.delete_branch("release")
    tiny.delete_tag("v1")
    check()
    tiny.checkout("merged", tmp_path / "out")
    check()
    tiny.repack(encoding="raw")
    check()
    tiny.repack()
    check()


def test_everything_is_counted(merged: Repository) -> None:
    report = merged.fsck()
    assert report.commits == len(list(merged.log())) == 6
    status = merged.status()
    assert (report.packs, report.objects) == (status.packs, status.objects)
    assert report.blocks >= status.blocks
    assert report.checked_bytes > 0


def test_a_pack_that_no_catalog_knows_is_a_note(merged: Repository) -> None:
    """What a command that was killed leaves behind harms nobody."""
    stray = merged.store.location.packs / f"{'0' * 32}.pack"
    shutil.copy(next(merged.store.location.packs.glob("*.pack")), stray)
    report = merged.fsck()
    assert report.is_clean
    assert any(stray.stem in note for note in report.notes)


# -- damaged ---------------------------------------------------------------------------------------


def commits_that_need(repository: Repository, key: bytes) -> set[str]:
    """Ids, shortened, of the commits that hold an object or block."""
    found = set()
    for commit_id, commit in repository.log():
        manifest = repository.store.manifest(commit.manifest)
        keys = {commit_id, commit.manifest, commit.plan, *manifest.tensor_ids()}
        for tensor_id in manifest.tensor_ids():
            keys.update(repository.tensor(tensor_id).blocks())
        if key in keys:
            found.add(commit_id.hex()[:10])
    return found


@pytest.mark.parametrize("word", WORDS)
def test_a_flip_in_a_payload_is_found_and_who_needs_it_is_named(
    word: str, merged: Repository
) -> None:
    record = records_of(merged, word)[-1]
    needing = commits_that_need(merged, record.header.key)
    assert needing
    root = merged.store.location.root.parent
    merged.close()
    flip(record.pack, record.offset + record.header.length // 2)
    with Repository.open(root) as reopened:
        report = reopened.fsck()
    assert not report.is_clean
    said = {commit.split()[0] for problem in report.problems for commit in problem.commits}
    assert needing <= said
    assert any(record.header.key.hex()[:8] in problem.what for problem in report.problems)


@pytest.mark.parametrize("word", ["raw", "layer 0", "layer 4", "tensor", "statistics"])
def test_the_tensor_is_named(word: str, merged: Repository) -> None:
    names_of: dict[bytes, set[str]] = {}
    for _, commit in merged.log():
        for name, tensor_id in merged.store.manifest(commit.manifest).tensors.items():
            for key in (tensor_id, *merged.tensor(tensor_id).blocks()):
                names_of.setdefault(key, set()).add(name)
    record = next(r for r in records_of(merged, word) if r.header.key in names_of)
    names = names_of[record.header.key]
    root = merged.store.location.root.parent
    merged.close()
    flip(record.pack, record.offset + record.header.length // 2)
    with Repository.open(root) as reopened:
        said = " ".join(texts(reopened.fsck()))
    assert any(name in said for name in names)


@pytest.mark.parametrize("word", ["commit", "raw", "layer 2", "statistics"])
def test_a_flip_in_a_header_is_found(word: str, merged: Repository) -> None:
    record = records_of(merged, word)[-1]
    needing = commits_that_need(merged, record.header.key)
    flip(record.pack, record.offset - HEADER.size + 30)
    (problem,) = merged.fsck().problems
    assert record.pack.stem in problem.what
    assert "header" in problem.what
    assert needing <= {commit.split()[0] for commit in problem.commits}


def test_a_flip_in_a_preamble_is_found(merged: Repository) -> None:
    pack = next(merged.store.location.packs.glob("*.pack"))
    flip(pack, 0)
    assert any(pack.stem in text for text in texts(merged.fsck()))


def test_a_flip_in_an_end_is_found(merged: Repository) -> None:
    pack = next(merged.store.location.packs.glob("*.pack"))
    flip(pack, pack.stat().st_size - HEADER.size + 16)
    assert any(pack.stem in text for text in texts(merged.fsck()))


def test_a_pack_that_was_cut_is_found(merged: Repository) -> None:
    pack = next(merged.store.location.packs.glob("*.pack"))
    os.chmod(pack, 0o644)
    os.truncate(pack, PREAMBLE.size + HEADER.size)
    assert any(pack.stem in text for text in texts(merged.fsck()))


def test_a_missing_pack_is_one_problem_with_all_who_need_it(merged: Repository) -> None:
    """The pack of the base's blocks, on which everything else is a delta."""
    base = merged.resolve("base")
    record = next(
        record
        for record in records_of(merged, "raw")
        if base.hex()[:10] in commits_that_need(merged, record.header.key)
    )
    record.pack.unlink()
    (problem,) = merged.fsck().problems
    assert f"pack {record.pack.stem} is missing" in problem.what
    assert {commit.split()[0] for commit in problem.commits} == {
        commit_id.hex()[:10] for commit_id, _ in merged.log()
    }


def test_a_missing_pack_of_objects_is_found(merged: Repository) -> None:
    record = records_of(merged, "commit")[0]
    commit = record.header.key.hex()[:10]
    root = merged.store.location.root.parent
    merged.close()
    record.pack.unlink()
    with Repository.open(root) as reopened:
        report = reopened.fsck()
    assert any(
        "is missing" in problem.what and commit in " ".join(problem.commits)
        for problem in report.problems
    )


def test_every_damaged_ref_is_named_and_the_others_are_checked(merged: Repository) -> None:
    heads = merged.store.location.refs / "heads"
    (heads / "math").write_text("")
    (heads / "code").write_text("nonsense\n")
    (heads / "prose").write_text("0" * 64 + "\n")
    report = merged.fsck()
    said = texts(report)
    for name in ("branch math does", "branch code does", "commit 0000000000 is missing"):
        assert any(name in text for text in said)
    assert report.commits > 3


def blocks_of(repository: Repository, commit: Commit) -> set[str]:
    """The ids of the blocks of a commit's tensors."""
    tensors = repository.store.manifest(commit.manifest).tensors.values()
    return {block.hex() for tensor in tensors for block in repository.tensor(tensor).blocks()}


def test_damage_stops_the_verbs_that_meet_it(merged: Repository) -> None:
    record = records_of(merged, "layer 4")[0]
    merged.close()
    flip(record.pack, record.offset)
    with Repository.open(record.pack.parents[2]) as reopened:
        needing = [
            name_of(reopened.store, commit_id)
            for commit_id, commit in reopened.log()
            if record.header.key.hex() in blocks_of(reopened, commit)
        ]
        assert needing
        for ref in needing:
            with pytest.raises(Damaged, match=record.header.key.hex()[:8]):
                reopened.load(ref)


# -- mended ----------------------------------------------------------------------------------------


def everything(repository: Repository, tmp_path: Path) -> dict[str, object]:
    """All that a repository can tell: refs, history, objects and checkouts."""
    trees = {}
    for ref in ("base", "math", "code", "prose", "merged", "math^2"):
        target = tmp_path / f"tree-{len(list(tmp_path.iterdir()))}"
        repository.checkout(ref, target)
        trees[ref] = tree_of(target)
    return {
        "branches": repository.branches(),
        "log": list(repository.log()),
        "trees": trees,
        "objects": sorted(object_id for object_id, _ in repository.store.catalog.objects()),
        "blocks": sorted(block for block, _ in repository.store.catalog.blocks()),
        "statistics": sorted(repository.store.catalog.all_statistics()),
    }


def test_a_deleted_catalog_is_made_again_from_the_packs(merged: Repository, tmp_path: Path) -> None:
    before = everything(merged, tmp_path)
    root = merged.store.location.root
    packs = len(list(merged.store.location.packs.glob("*.pack")))
    merged.close()
    shutil.rmtree(root / "catalog")
    assert Repository.rebuild_catalog(root.parent) == packs
    with Repository.open(root.parent) as reopened:
        assert everything(reopened, tmp_path) == before
        assert reopened.fsck().is_clean
        recipe = reopened.recipe(["math", "code"])
        assert not reopened.merge(reopened.plan(recipe), branch="merged").is_new


def test_a_rebuilt_catalog_plans_and_reads_as_before(merged: Repository) -> None:
    recipe = merged.recipe(["math", "prose"])
    before = merged.plan(recipe, budget="30%")
    root = merged.store.location.root
    merged.close()
    Repository.rebuild_catalog(root.parent)
    with Repository.open(root.parent) as reopened:
        after = reopened.plan(recipe, budget="30%")
        assert after == before
        assert reopened.merge(after).read_bytes == before.plan.planned_bytes


@pytest.mark.parametrize("keep_directory", [False, True])
def test_a_catalog_that_was_lost_is_said_so(merged: Repository, keep_directory: bool) -> None:
    root = merged.store.location.root
    merged.close()
    shutil.rmtree(root / "catalog")
    if keep_directory:
        (root / "catalog").mkdir()
    for use in (Repository.open, Repository.init):
        with pytest.raises(UnusableRepository, match=r"catalog .* is empty") as caught:
            use(root.parent)
        assert "fsck --rebuild-catalog" in caught.value.hint
    Repository.rebuild_catalog(root.parent)
    with Repository.open(root.parent) as reopened:
        assert reopened.fsck().is_clean


def test_packs_without_refs_are_no_lost_catalog(tiny: Repository, tiny_family: Family) -> None:
    """They are what the first command of a repository leaves when it is killed."""
    root = tiny.store.location.root
    tiny.close()
    shutil.rmtree(root / "catalog")
    shutil.rmtree(root / "refs" / "heads")
    with Repository.open(root.parent) as reopened:
        assert reopened.add(tiny_family.base).is_new


def test_rebuilding_leaves_nothing_in_the_way(merged: Repository) -> None:
    location = merged.store.location
    merged.close()
    for leftover in ("catalog-new", "catalog-old"):
        shutil.copytree(location.catalog, location.temporary / leftover)
    Repository.rebuild_catalog(location.root.parent)
    assert list(location.temporary.iterdir()) == []


def test_rebuilding_takes_from_a_damaged_pack_what_comes_before_the_damage(
    merged: Repository,
) -> None:
    record = records_of(merged, "layer 4")[-1]
    root = merged.store.location.root.parent
    merged.close()
    flip(record.pack, record.offset - HEADER.size + 30)
    Repository.rebuild_catalog(root)
    with Repository.open(root) as reopened:
        report = reopened.fsck()
        assert not report.is_clean
        assert any(record.header.key.hex()[:8] in text for text in texts(report))
        assert reopened.load("base")


def test_adding_a_checkpoint_again_restores_what_was_lost_of_it(
    merged: Repository, tiny_family: Family, tmp_path: Path
) -> None:
    """The pack of the base's blocks is gone for good; its checkpoint is still at hand."""
    base = merged.resolve("base")
    record = next(
        record
        for record in records_of(merged, "raw")
        if base.hex()[:10] in commits_that_need(merged, record.header.key)
    )
    root = merged.store.location.root.parent
    merged.close()
    record.pack.unlink()
    Repository.rebuild_catalog(root)
    with Repository.open(root) as reopened:
        assert not reopened.fsck().is_clean
        report = reopened.add(tiny_family.base)
        assert not report.is_new
        assert report.new_blocks > 0
        assert reopened.resolve("base") == base
        assert texts(reopened.fsck()) == []
        for path in (tiny_family.base, tiny_family.experts[1]):
            reopened.checkout(path.name, tmp_path / path.name)
            assert tree_of(tmp_path / path.name) == tree_of(path)
