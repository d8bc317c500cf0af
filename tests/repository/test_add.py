"""`add`: what goes in comes out byte for byte, once, with its history."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mergegit import Repository
from mergegit.dtypes import DTYPES
from mergegit.errors import BadCheckpoint, InvalidName, NoBase, UnknownRef
from mergegit.objects import BLOCK_ELEMENTS
from mergegit.storage.pack import Kind, scan
from tests.families import TINY_SHAPES, Family, save_checkpoint, tiny_checkpoint
from tests.handmade import Raw, write_safetensors
from tests.trees import fingerprint, tree_of

# -- checkpoints of every kind --------------------------------------------------------------------


def every_dtype(path: Path) -> Path:
    tensors = {dtype: Raw.random(dtype, 3, 8, seed=place) for place, dtype in enumerate(DTYPES)}
    write_safetensors(path / "model.safetensors", tensors)
    return path


def scalars_and_empty_tensors(path: Path) -> Path:
    tensors = {
        "empty": Raw("BF16", (0,), b""),
        "scale": Raw.random("F32"),
        "also.empty": Raw("F32", (3, 0, 2), b""),
        "flag": Raw("BOOL", (), b"\1"),
        "last.empty": Raw("I64", (0, 5), b""),
    }
    write_safetensors(path / "model.safetensors", tensors)
    return path


def names_with_escapes(path: Path) -> Path:
    names = ['a "quoted" name', "back\\slash", "line\nbreak", "tab\t", "nul\0", "é", "\u2028", "🜁"]
    tensors = {name: Raw.random("F16", 4, seed=place) for place, name in enumerate(names)}
    write_safetensors(path / "model.safetensors", tensors, ascii_only=True)
    return path


def names_without_escapes(path: Path) -> Path:
    tensors = {name: Raw.random("F16", 4) for name in ("é", "模型.weight", "🜁")}
    write_safetensors(path / "model.safetensors", tensors, ascii_only=False)
    return path


def tied_names(path: Path) -> Path:
    """Two shards hold a tensor of the same name, and not the same bytes: the index decides."""
    first = {"head": Raw.random("BF16", 6, seed=1), "a": Raw.random("BF16", 6, seed=2)}
    second = {"b": Raw.random("BF16", 6, seed=3), "head": Raw.random("BF16", 6, seed=4)}
    write_safetensors(path / "model-00001-of-00002.safetensors", first)
    write_safetensors(path / "model-00002-of-00002.safetensors", second)
    places = {"a": 1, "b": 2, "head": 2}
    weight_map = {name: f"model-0000{n}-of-00002.safetensors" for name, n in places.items()}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def metadata_and_padding(path: Path) -> Path:
    metadata = {"format": "pt", "note": "any text, of any kind: é \n"}
    tensors = {"w": Raw.random("F32", 5), "v": Raw.random("U8", 3)}
    write_safetensors(path / "model.safetensors", tensors, metadata=metadata, padding=13)
    return path


def folders(path: Path) -> Path:
    tiny_checkpoint(path)
    (path / "empty" / "inner").mkdir(parents=True)
    (path / "onnx" / "deep" / "deeper").mkdir(parents=True)
    (path / "onnx" / "deep" / "deeper" / "notes.txt").write_text("deep\n")
    (path / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    (path / "nothing").touch()
    return path


def second_file_of_weights(path: Path) -> Path:
    tiny_checkpoint(path)
    write_safetensors(path / "adapter_model.safetensors", {"lora": Raw.random("F32", 8)})
    write_safetensors(
        path / "extra" / "consolidated.safetensors", {"model.norm.weight": Raw.random("F32", 8)}
    )
    (path / "pytorch_model.bin").write_bytes(b"PK" + bytes(100))
    return path


def long_files(path: Path) -> Path:
    """Files of more than one block, and of exactly one and two."""
    tiny_checkpoint(path)
    noise = np.random.default_rng(0).bytes(2 * BLOCK_ELEMENTS)
    (path / "vocab.json").write_bytes(noise[:BLOCK_ELEMENTS])
    (path / "merges.txt").write_bytes(noise)
    (path / "tokenizer.model").write_bytes(noise[: BLOCK_ELEMENTS + 1])
    return path


BUILDERS = (
    every_dtype, scalars_and_empty_tensors, names_with_escapes, names_without_escapes, tied_names,
    metadata_and_padding, folders, second_file_of_weights, long_files,
)  # fmt: skip


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_a_checkpoint_comes_back_byte_for_byte(
    build: Callable[[Path], Path], repository: Repository, tmp_path: Path
) -> None:
    path = build(tmp_path / "model")
    repository.add(path)
    repository.checkout("model", tmp_path / "out")
    assert tree_of(tmp_path / "out") == tree_of(path)


def test_a_sharded_family_comes_back_byte_for_byte(
    loaded: Repository, family: Family, tmp_path: Path
) -> None:
    for path in (family.base, *family.experts):
        loaded.checkout(path.name, tmp_path / path.name)
        assert tree_of(tmp_path / path.name) == tree_of(path)


def test_a_single_file_comes_back_in_a_directory(repository: Repository, tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "llama.safetensors", {"w": Raw.random("BF16", 9)})
    report = repository.add(path)
    assert report.branch == "llama"
    repository.checkout("llama", tmp_path / "out")
    assert tree_of(tmp_path / "out") == {"llama.safetensors": path.read_bytes()}


def test_links_come_back_as_the_files_that_they_lead_to(
    repository: Repository, tiny_family: Family, tmp_path: Path
) -> None:
    """The layout of the Hub's cache: a snapshot of links into a directory of blobs."""
    cache = tmp_path / "models--org--llama-3"
    snapshot = cache / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, file in enumerate(sorted(tiny_family.base.glob("*.*"))):
        shutil.copy(file, cache / "blobs" / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    assert repository.add(snapshot).branch == "llama-3"
    repository.checkout("llama-3", tmp_path / "out")
    assert tree_of(tmp_path / "out") == tree_of(snapshot)
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


def test_what_git_and_the_hub_keep_beside_a_checkpoint_stays_out(
    repository: Repository, tmp_path: Path
) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    before = tree_of(path)
    for name in (".git", ".cache", "__pycache__"):
        (path / name).mkdir()
        (path / name / "file").write_text("no part of the model")
    repository.add(path)
    repository.checkout("model", tmp_path / "out")
    assert tree_of(tmp_path / "out") == before


@pytest.mark.parametrize("name", ["caf\udce9.txt", "a\\b.txt"])
def test_a_name_that_could_not_come_back_is_refused(
    name: str, repository: Repository, tmp_path: Path
) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    (path / name).touch()
    with pytest.raises(BadCheckpoint, match="name"):
        repository.add(path)


def test_a_directory_whose_name_is_not_utf8_needs_another_for_its_branch(
    repository: Repository, tmp_path: Path
) -> None:
    path = tiny_checkpoint(tmp_path / "model").rename(tmp_path / "caf\udce9")
    with pytest.raises(InvalidName):
        repository.add(path)
    assert repository.add(path, name="coffee").branch == "coffee"
    assert repository.reflog("coffee")[0].reason.endswith("caf?")


# -- once ------------------------------------------------------------------------------------------


def test_adding_twice_changes_no_file(loaded: Repository, family: Family) -> None:
    before = fingerprint(loaded.store.location.root)
    report = loaded.add(family.experts[0])
    assert not report.is_new
    assert (report.new_bytes, report.new_blocks) == (0, 0)
    assert report.commit == loaded.resolve("math")
    assert fingerprint(loaded.store.location.root) == before


def test_the_same_bytes_under_another_name_are_a_branch_at_the_same_commit(
    loaded: Repository, family: Family
) -> None:
    packs = set(loaded.store.location.packs.iterdir())
    report = loaded.add(family.experts[0], name="other")
    assert report.is_new
    assert report.commit == loaded.resolve("math") == loaded.resolve("other")
    assert set(loaded.store.location.packs.iterdir()) == packs


def test_a_base_that_comes_too_late_is_answered_with_a_note(
    repository: Repository, tiny_family: Family
) -> None:
    repository.add(tiny_family.experts[0])
    repository.add(tiny_family.base, no_base=True)
    report = repository.add(tiny_family.experts[0], base="base")
    assert not report.is_new
    assert any("without a base" in note for note in report.notes)


def test_the_same_base_again_is_no_news(repository: Repository, tiny_family: Family) -> None:
    repository.add(tiny_family.base)
    repository.add(tiny_family.experts[0])
    assert repository.add(tiny_family.experts[0], base="base").notes == ()


def test_identical_blocks_are_stored_once(repository: Repository, tmp_path: Path) -> None:
    """A tensor of three equal blocks, and another of the same bytes."""
    block = np.random.default_rng(0).bytes(2 * BLOCK_ELEMENTS)
    tensor = Raw("BF16", (3 * BLOCK_ELEMENTS,), block * 3)
    path = write_safetensors(tmp_path / "model.safetensors", {"a": tensor, "b": tensor})
    report = repository.add(path)
    assert report.blocks == 7  # six, and the header
    assert report.new_blocks == 2
    assert report.total_bytes == path.stat().st_size - 8
    assert report.new_bytes < 1.1 * len(block)


def test_new_bytes_are_those_that_the_packs_grew_by(repository: Repository, family: Family) -> None:
    seen: set[Path] = set()
    for path in (family.base, *family.experts):
        report = repository.add(path)
        new = set(repository.store.location.packs.iterdir()) - seen
        seen |= new
        headers = [header for pack in new for header, _ in scan(pack)]
        stored = [header for header in headers if header.kind is Kind.SEGMENT]
        assert report.new_bytes == sum(header.length for header in stored)
        assert report.new_blocks == len({header.key for header in stored})
        size = sum(pack.stat().st_size for pack in new)
        others = sum(header.length for header in headers if header.kind is not Kind.SEGMENT)
        assert report.new_bytes <= size <= report.new_bytes + others + 129 * (len(headers) + 8)


def test_a_resharded_checkpoint_costs_next_to_nothing(
    loaded: Repository, family: Family, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    tensors = {}
    for file in sorted(family.base.glob("*.safetensors")):
        tensors.update(load_file(file))
    path = save_checkpoint(tmp_path / "resharded", tensors, shards=3)
    report = loaded.add(path)
    assert report.base_ref == "base"
    assert report.new_bytes < 0.01 * report.total_bytes


# -- history ---------------------------------------------------------------------------------------


def test_the_base_is_the_commit_with_the_same_tensors(
    repository: Repository, tiny_family: Family, tmp_path: Path
) -> None:
    write_safetensors(tmp_path / "other.safetensors", {"w": Raw.random("F32", 4)})
    repository.add(tmp_path / "other.safetensors")
    base = repository.add(tiny_family.base)
    expert = repository.add(tiny_family.experts[0])
    assert (base.base, base.base_ref) == (None, None)
    assert (expert.base, expert.base_ref) == (base.commit, "base")
    assert repository.commit("math").parents == (base.commit,)


def test_experts_are_not_taken_for_the_base(repository: Repository, tiny_family: Family) -> None:
    repository.add(tiny_family.base)
    repository.add(tiny_family.experts[0])
    assert repository.add(tiny_family.experts[1]).base_ref == "base"


def test_two_possible_bases_are_an_error_that_names_them(
    repository: Repository, tiny_family: Family
) -> None:
    repository.add(tiny_family.base)
    repository.add(tiny_family.experts[0], no_base=True)
    with pytest.raises(NoBase, match=r"base.*math|math.*base"):
        repository.add(tiny_family.experts[1])
    assert "prose" not in repository.branches()
    assert repository.add(tiny_family.experts[1], base="base").base_ref == "base"


def test_a_base_that_nearly_fits_is_worth_a_note(
    repository: Repository, tiny_family: Family, tmp_path: Path
) -> None:
    repository.add(tiny_family.base)
    tensors = {name: Raw.random("BF16", *shape) for name, shape in TINY_SHAPES.items()}
    tensors["model.embed_tokens.weight"] = Raw.random("BF16", 25, 8)
    path = write_safetensors(tmp_path / "longer.safetensors", tensors)
    report = repository.add(path)
    assert report.base is None
    assert any("base has other tensors or shapes" in note for note in report.notes)


def test_without_a_base_means_without(repository: Repository, tiny_family: Family) -> None:
    repository.add(tiny_family.base)
    report = repository.add(tiny_family.experts[0], no_base=True)
    assert report.base is None
    assert repository.commit("math").parents == ()


def test_an_unknown_base_stops_before_anything_is_stored(
    repository: Repository, tiny_family: Family
) -> None:
    before = fingerprint(repository.store.location.root)
    with pytest.raises(UnknownRef):
        repository.add(tiny_family.base, base="nothing")
    assert fingerprint(repository.store.location.root) == before


def test_a_new_version_descends_from_its_base_and_from_the_old_one(
    repository: Repository, tiny_family: Family, tmp_path: Path
) -> None:
    base = repository.add(tiny_family.base)
    old = repository.add(tiny_family.experts[0])
    new = repository.add(tiny_family.experts[1], name="math")
    assert repository.commit("math").parents == (base.commit, old.commit)
    assert new.base == base.commit
    assert repository.resolve("math^2") == old.commit
    repository.checkout("math", tmp_path / "new")
    repository.checkout("math^2", tmp_path / "old")
    assert tree_of(tmp_path / "new") == tree_of(tiny_family.experts[1])
    assert tree_of(tmp_path / "old") == tree_of(tiny_family.experts[0])


def test_a_new_version_of_the_base_descends_from_the_old_one_alone(
    repository: Repository, tiny_family: Family
) -> None:
    old = repository.add(tiny_family.base)
    repository.add(tiny_family.experts[0], name="base")
    assert repository.commit("base").parents == (old.commit,)


def test_the_commit_says_who_when_and_why(tmp_path: Path, tiny_family: Family) -> None:
    with Repository.init(tmp_path / "r", author="Grace <grace@example.org>") as repository:
        repository._clock = lambda: 1_700_000_000.5
        repository.add(tiny_family.base, message="first\n\nand why")
        commit = repository.commit("base")
        assert (commit.author, commit.time) == ("Grace <grace@example.org>", 1_700_000_000)
        assert (commit.title, commit.message) == ("first", "first\n\nand why")
        entry = repository.reflog("base")[0]
        assert (entry.old, entry.new, entry.author) == (
            None, repository.resolve("base"), commit.author
        )  # fmt: skip


def test_nan_among_the_weights_is_stored_and_noted(repository: Repository, tmp_path: Path) -> None:
    values = np.array([1.0, np.nan, np.inf, -0.0], np.float32)
    path = write_safetensors(
        tmp_path / "broken.safetensors", {"w": Raw("F32", (4,), values.tobytes())}
    )
    report = repository.add(path)
    assert any("tensor w holds 2 elements" in note for note in report.notes)
    repository.checkout("broken", tmp_path / "out")
    assert (tmp_path / "out" / "broken.safetensors").read_bytes() == path.read_bytes()


# -- reading ---------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, int]]]:
    """The ranges of bytes that are read of each file by ``os.pread`` or whole, as they happen.

    Opening a file in any other way than by ``os.open`` is an error.
    """
    ranges: dict[str, list[tuple[int, int]]] = {}
    pread, fdopen = os.pread, os.fdopen

    def path_of(fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}")

    def recording_pread(fd: int, length: int, offset: int) -> bytes:
        data = pread(fd, length, offset)
        ranges.setdefault(path_of(fd), []).append((offset, offset + len(data)))
        return data

    def recording_fdopen(fd: int, *args: object, **kwargs: object) -> object:
        ranges.setdefault(path_of(fd), []).append((0, os.fstat(fd).st_size))
        return fdopen(fd, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "pread", recording_pread)
    monkeypatch.setattr(os, "fdopen", recording_fdopen)
    return ranges


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_every_byte_of_a_checkpoint_is_read_exactly_once(
    repository: Repository, family: Family, reads: dict[str, list[tuple[int, int]]]
) -> None:
    repository.add(family.base)
    reads.clear()
    repository.add(family.experts[0])
    for path in (path for path in family.experts[0].rglob("*") if path.is_file()):
        at = 0
        for begin, end in sorted(reads[os.fspath(path.resolve())]):
            assert begin == at, f"{path.name} is read again or passed over at byte {begin}"
            at = end
        assert at == path.stat().st_size


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_of_the_base_only_blocks_that_differ_are_read(
    repository: Repository, tmp_path: Path, reads: dict[str, list[tuple[int, int]]]
) -> None:
    noise = np.random.default_rng(0).bytes(6 * BLOCK_ELEMENTS)
    changed = noise[: -2 * BLOCK_ELEMENTS] + bytes(2 * BLOCK_ELEMENTS)
    for name, data in (("base", noise), ("expert", changed)):
        tensor = Raw("BF16", (3 * BLOCK_ELEMENTS,), data)
        write_safetensors(tmp_path / f"{name}.safetensors", {"w": tensor})
    repository.add(tmp_path / "base.safetensors")
    reads.clear()
    repository.add(tmp_path / "expert.safetensors")
    packs = [ranges for path, ranges in reads.items() if path.endswith(".pack")]
    blocks = [end - begin for ranges in packs for begin, end in ranges if end - begin > 100_000]
    assert sum(blocks) < 2.5 * BLOCK_ELEMENTS


# -- failing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_add_leaves_the_repository_as_it_was(
    error: type[BaseException], loaded: Repository, family: Family, tmp_path: Path
) -> None:
    path = save_changed(family.base, tmp_path / "changed")
    before = fingerprint(loaded.store.location.root)

    def stop_half_way(_what: str, done: int, total: int) -> None:
        if done > total / 2:
            raise error

    with pytest.raises(error):
        loaded.add(path, progress=stop_half_way)
    assert fingerprint(loaded.store.location.root) == before
    assert list(loaded.store.location.temporary.iterdir()) == []
    assert loaded.add(path).is_new
    assert loaded.fsck().is_clean


def append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"more")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def rewrite(path: Path) -> None:
    """The same length, at another time."""
    path.write_bytes(path.read_bytes()[::-1])
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000_000))


@pytest.mark.parametrize("file", ["model-00002-of-00002.safetensors", "README.md"])
@pytest.mark.parametrize("meddle", [append, truncate, rewrite, os.unlink])
def test_a_file_that_changes_while_it_is_read_is_an_error(
    meddle: Callable[[Path], None], file: str, repository: Repository, family: Family,
    tmp_path: Path,
) -> None:  # fmt: skip
    path = Path(shutil.copytree(family.base, tmp_path / "changing"))
    before = fingerprint(repository.store.location.root)
    pending = [file]

    def change(_what: str, done: int, total: int) -> None:
        if pending and done > total / 4:
            meddle(path / pending.pop())

    with pytest.raises(BadCheckpoint, match=file):
        repository.add(path, progress=change)
    assert fingerprint(repository.store.location.root) == before


def save_changed(base: Path, path: Path) -> Path:
    """A copy of a checkpoint in which every weight of the last shard is another."""
    shutil.copytree(base, path)
    shard = sorted(path.glob("*.safetensors"))[-1]
    data = bytearray(shard.read_bytes())
    head = 8 + int.from_bytes(data[:8], "little")
    weights = np.frombuffer(data, np.uint8)[head:]
    weights ^= 1
    shard.write_bytes(data)
    return path
