"""`status`: what the repository holds, and what it takes."""

from __future__ import annotations

from pathlib import Path

from mergegit import Repository
from mergegit.encoding import FORMAT_VERSION
from tests.families import Family, tiny_checkpoint


def size_of(path: Path) -> int:
    """Bytes of a checkpoint as manifests count them: without each shard's length field."""
    files = [file for file in path.rglob("*") if file.is_file()]
    shards = sum(file.suffix == ".safetensors" for file in files)
    return sum(file.stat().st_size for file in files) - 8 * shards


def test_an_empty_repository_holds_nothing(repository: Repository) -> None:
    status = repository.status()
    assert (status.branches, status.tags, status.commits) == (0, 0, 0)
    assert (status.blocks, status.objects, status.packs) == (0, 0, 0)
    assert status.checkpoint_bytes == 0
    assert status.format == FORMAT_VERSION
    assert status.root == str(repository.store.location.root)


def test_refs_and_commits_are_counted(tiny: Repository) -> None:
    tiny.create_branch("again", "math")
    tiny.create_tag("v1", "math")
    status = tiny.status()
    assert (status.branches, status.tags, status.commits) == (5, 1, 4)


def test_checkpoint_bytes_are_what_all_commits_would_take_as_files(
    tiny: Repository, tiny_family: Family
) -> None:
    expected = sum(map(size_of, (tiny_family.base, *tiny_family.experts)))
    assert tiny.status().checkpoint_bytes == expected


def test_a_checkpoint_in_two_commits_counts_once(
    repository: Repository, tiny_family: Family
) -> None:
    repository.add(tiny_family.base)
    repository.add(tiny_family.experts[0], name="base")
    repository.add(tiny_family.base, name="base")
    assert repository.status().commits == 3
    expected = size_of(tiny_family.base) + size_of(tiny_family.experts[0])
    assert repository.status().checkpoint_bytes == expected


def test_disk_bytes_grow_with_what_is_stored_and_with_nothing_else(
    loaded: Repository, family: Family
) -> None:
    before = loaded.status()
    loaded.add(family.experts[0], name="again")
    assert abs(loaded.status().disk_bytes - before.disk_bytes) < 64 << 10
    root = loaded.store.location.root
    taken = sum(path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file())
    assert loaded.status().disk_bytes == taken
    assert before.ratio is not None
    assert before.ratio == before.checkpoint_bytes / before.disk_bytes


def test_experts_of_one_base_take_less_than_their_files(
    repository: Repository, family: Family
) -> None:
    for path in (family.base, *family.experts):
        repository.add(path)
    packs = sum(path.stat().st_size for path in repository.store.location.packs.iterdir())
    assert packs < 0.8 * repository.status().checkpoint_bytes


def test_every_pack_is_counted(tiny: Repository, tmp_path: Path) -> None:
    packs = tiny.status().packs
    assert packs == len(list(tiny.store.location.packs.glob("*.pack")))
    tiny.add(tiny_checkpoint(tmp_path / "more", moved=9))
    assert tiny.status().packs == len(list(tiny.store.location.packs.glob("*.pack"))) > packs
