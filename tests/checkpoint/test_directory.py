"""Checkpoints on disk: which files count, who owns each tensor, and what is refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from mergegit.checkpoint.directory import MAX_JSON_BYTES, Checkpoint, inspect
from mergegit.checkpoint.layout import INDEX_FILE, SINGLE_FILE
from mergegit.errors import BadCheckpoint
from tests.checkpoint.handmade import entry, write, write_tensors
from tests.families import Family

FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"


def write_index(directory: Path, weight_map: object) -> Path:
    path = directory / INDEX_FILE
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def write_shards(directory: Path) -> Path:
    """Two shards, ``a`` and ``b`` in the first, ``c`` in the second; no index."""
    write_tensors(directory / FIRST, a=b"1", b=b"22")
    write_tensors(directory / SECOND, c=b"333")
    return directory


def shard_names(checkpoint: Checkpoint) -> list[str]:
    return [shard.source.inside for shard in checkpoint.shards]


def owners(checkpoint: Checkpoint) -> dict[str, str]:
    """For each of the model's tensors the shard that holds it."""
    names = shard_names(checkpoint)
    return {tensor: names[index] for tensor, index in checkpoint.owner.items()}


def plain_files(checkpoint: Checkpoint) -> list[str]:
    return [source.inside for source in checkpoint.files]


# -- which files are the model --------------------------------------------------------------------


def test_one_file_is_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = inspect(write_tensors(tmp_path / "math.safetensors", w=b"12"))
    assert (checkpoint.name, shard_names(checkpoint)) == ("math", ["math.safetensors"])
    assert set(checkpoint.tensors()) == {"w"}
    assert (checkpoint.files, checkpoint.directories) == ((), ())


def test_a_directory_with_the_single_file_is_that_model(tmp_path: Path) -> None:
    write_tensors(tmp_path / "math" / SINGLE_FILE, w=b"12")
    checkpoint = inspect(tmp_path / "math")
    assert checkpoint.name == "math"
    assert owners(checkpoint) == {"w": SINGLE_FILE}


def test_an_index_names_the_shards(tmp_path: Path) -> None:
    write_index(write_shards(tmp_path), {"a": FIRST, "b": FIRST, "c": SECOND})
    assert owners(inspect(tmp_path)) == {"a": FIRST, "b": FIRST, "c": SECOND}


def test_shards_without_an_index_are_all_files_at_the_top(tmp_path: Path) -> None:
    write_shards(tmp_path)
    assert owners(inspect(tmp_path)) == {"a": FIRST, "b": FIRST, "c": SECOND}


def test_a_file_of_any_name_will_do_where_there_is_no_other(tmp_path: Path) -> None:
    write_tensors(tmp_path / "diffusion_pytorch_model.safetensors", w=b"1")
    assert owners(inspect(tmp_path)) == {"w": "diffusion_pytorch_model.safetensors"}


def test_a_family_as_hugging_face_writes_it_is_understood(family: Family) -> None:
    checkpoint = inspect(family.base)
    index = json.loads((family.base / INDEX_FILE).read_text())
    assert owners(checkpoint) == index["weight_map"]
    assert checkpoint.notes == ()
    assert set(plain_files(checkpoint)) == {
        "README.md",
        "config.json",
        INDEX_FILE,
        "original/params.json",
        "tokenizer.json",
    }


def test_the_single_file_stands_before_an_index_and_a_note_says_so(tmp_path: Path) -> None:
    write_shards(tmp_path)
    write_tensors(tmp_path / SINGLE_FILE, a=b"9")
    write_index(tmp_path, {"a": FIRST})
    checkpoint = inspect(tmp_path)
    assert owners(checkpoint) == {"a": SINGLE_FILE}
    assert shard_names(checkpoint) == [SINGLE_FILE, FIRST, SECOND]
    assert [note for note in checkpoint.notes if SINGLE_FILE in note and INDEX_FILE in note]


def test_weights_beside_the_model_come_along_as_strays(tmp_path: Path) -> None:
    write_tensors(tmp_path / SINGLE_FILE, w=b"1")
    write_tensors(tmp_path / "adapter_model.safetensors", w=b"2", v=b"3")
    checkpoint = inspect(tmp_path)
    assert owners(checkpoint) == {"w": SINGLE_FILE}
    assert shard_names(checkpoint) == [SINGLE_FILE, "adapter_model.safetensors"]
    assert checkpoint.tensors()["w"].end == 1


def test_weights_in_a_nested_folder_are_not_the_models(tmp_path: Path) -> None:
    write_tensors(tmp_path / "w.safetensors", w=b"1")
    write_tensors(tmp_path / "original" / "w.safetensors", w=b"2")
    checkpoint = inspect(tmp_path)
    assert owners(checkpoint) == {"w": "w.safetensors"}
    assert shard_names(checkpoint) == ["w.safetensors", "original/w.safetensors"]


# -- tensors that stand twice ---------------------------------------------------------------------


def test_an_index_decides_which_of_two_tensors_of_one_name_counts(tmp_path: Path) -> None:
    write_tensors(tmp_path / FIRST, embed=b"1", head=b"22")
    write_tensors(tmp_path / SECOND, head=b"333")
    write_index(tmp_path, {"embed": FIRST, "head": SECOND})
    checkpoint = inspect(tmp_path)
    assert owners(checkpoint) == {"embed": FIRST, "head": SECOND}
    assert checkpoint.tensors()["head"].shape == (3,)


def test_two_tensors_of_one_name_are_refused_where_no_index_decides(tmp_path: Path) -> None:
    write_tensors(tmp_path / FIRST, embed=b"1", head=b"22")
    write_tensors(tmp_path / SECOND, head=b"333")
    with pytest.raises(BadCheckpoint, match=f"head stands in both {FIRST} and {SECOND}"):
        inspect(tmp_path)


def test_two_tensors_of_one_name_that_the_index_forgets_are_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / FIRST, embed=b"1", head=b"22")
    write_tensors(tmp_path / SECOND, head=b"333", norm=b"4")
    write_index(tmp_path, {"embed": FIRST, "norm": SECOND})
    with pytest.raises(BadCheckpoint, match="head stands in both"):
        inspect(tmp_path)


def test_a_tensor_that_the_index_forgets_belongs_to_the_shard_that_has_it(tmp_path: Path) -> None:
    write_index(write_shards(tmp_path), {"a": FIRST, "c": SECOND})
    assert owners(inspect(tmp_path))["b"] == FIRST


# -- the index ------------------------------------------------------------------------------------


def test_a_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    write_index(write_shards(tmp_path), {"a": FIRST, "c": SECOND})
    (tmp_path / SECOND).unlink()
    with pytest.raises(BadCheckpoint, match=f"shard {SECOND} of .* is missing"):
        inspect(tmp_path)


def test_all_missing_shards_are_counted(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", a=b"1")
    write_index(tmp_path, {"a": "a.safetensors", **{f"t{i}": f"{i}.safetensors" for i in range(3)}})
    with pytest.raises(BadCheckpoint, match=r"shard 0\.safetensors and 2 more"):
        inspect(tmp_path)


def test_a_tensor_that_the_index_names_must_be_in_its_shard(tmp_path: Path) -> None:
    write_index(write_shards(tmp_path), {"a": SECOND, "c": SECOND})
    with pytest.raises(BadCheckpoint, match=f"{SECOND} lacks tensor a"):
        inspect(tmp_path)


@pytest.mark.parametrize(
    "file",
    [
        "../elsewhere.safetensors",
        "a/../../elsewhere.safetensors",
        "/elsewhere.safetensors",
        "elsewhere.bin",
        "",
        "..",
    ],
)
def test_an_index_can_not_lead_out_of_the_checkpoint(file: str, tmp_path: Path) -> None:
    write_tensors(tmp_path / "elsewhere.safetensors", a=b"1")
    inside = tmp_path / "inside"
    write_index(write_shards(inside), {"a": file})
    with pytest.raises(BadCheckpoint, match="can't be a shard"):
        inspect(inside)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", "null", "{}", "\x00", "[" * 50_000]
    + [json.dumps({"weight_map": value}) for value in ({}, [], None, "a", {"a": 1}, {"a": None})],
    ids=lambda text: repr(text[:24]),
)
def test_an_index_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(BadCheckpoint, match=INDEX_FILE):
        inspect(tmp_path)


def test_an_index_that_is_not_text_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX_FILE).write_bytes(b"\xff\xfe\xff")
    with pytest.raises(BadCheckpoint, match=INDEX_FILE):
        inspect(tmp_path)


def test_an_endless_index_is_not_read(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX_FILE).touch()
    os.truncate(tmp_path / INDEX_FILE, MAX_JSON_BYTES + 1)
    with pytest.raises(BadCheckpoint, match="at most"):
        inspect(tmp_path)


def test_an_index_may_name_a_shard_in_a_folder(tmp_path: Path) -> None:
    write_tensors(tmp_path / "weights" / "a.safetensors", a=b"1")
    write_index(tmp_path, {"a": "weights/a.safetensors"})
    assert owners(inspect(tmp_path)) == {"a": "weights/a.safetensors"}


# -- what is missing ------------------------------------------------------------------------------


def test_a_place_with_nothing_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="no checkpoint at"):
        inspect(tmp_path / "gone")


def test_a_directory_without_safetensors_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadCheckpoint, match="no safetensors files"):
        inspect(tmp_path)


def test_legacy_weights_come_with_the_advice_to_convert_them(tmp_path: Path) -> None:
    (tmp_path / "consolidated.00.pth").write_bytes(b"x")
    with pytest.raises(BadCheckpoint) as caught:
        inspect(tmp_path)
    assert "consolidated.00.pth" in caught.value.hint


@pytest.mark.parametrize("name", ["model.bin", "model", "model.safetensors.txt"])
def test_a_file_of_another_kind_is_no_checkpoint(name: str, tmp_path: Path) -> None:
    write_tensors(tmp_path / name, a=b"1")
    with pytest.raises(BadCheckpoint, match=r"is not a \.safetensors file"):
        inspect(tmp_path / name)


def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadCheckpoint, match="pipe"):
        inspect(tmp_path / "pipe")


@pytest.mark.parametrize("missing", [FIRST, SECOND])
def test_a_shard_that_its_siblings_count_must_be_there(missing: str, tmp_path: Path) -> None:
    (write_shards(tmp_path) / missing).unlink()
    with pytest.raises(BadCheckpoint, match=f"shard {missing} of .* is missing"):
        inspect(tmp_path)


def test_a_file_that_claims_endless_siblings_is_refused_at_once(tmp_path: Path) -> None:
    write_tensors(tmp_path / "m-1-of-99999999999999.safetensors", a=b"1")
    with pytest.raises(BadCheckpoint, match="m-2-of-99999999999999"):
        inspect(tmp_path)


def test_a_model_without_tensors_is_refused(tmp_path: Path) -> None:
    write(tmp_path / SINGLE_FILE, b"{}")
    with pytest.raises(BadCheckpoint, match="holds no tensors"):
        inspect(tmp_path)


def test_a_malformed_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / SECOND).write_bytes(b"oops")
    with pytest.raises(BadCheckpoint, match=SECOND):
        inspect(tmp_path)


# -- files beside the weights ---------------------------------------------------------------------


def test_every_other_file_comes_along_by_its_path(tmp_path: Path) -> None:
    write_tensors(tmp_path / SINGLE_FILE, w=b"1")
    for path in ("config.json", "a/b/c.txt", "a/tokenizer.json", ".gitattributes", "naïve.txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("{}")
    checkpoint = inspect(tmp_path)
    assert sorted(plain_files(checkpoint)) == [
        ".gitattributes",
        "a/b/c.txt",
        "a/tokenizer.json",
        "config.json",
        "naïve.txt",
    ]
    assert all(source.size == 2 for source in checkpoint.files)


def test_the_order_of_files_does_not_depend_on_the_disk(tmp_path: Path) -> None:
    lists = []
    for number, names in enumerate(("abcdef", "fedcba")):
        root = tmp_path / str(number)
        write_tensors(root / SINGLE_FILE, w=b"1")
        for name in names:
            (root / name).mkdir()
            (root / name / "x").touch()
            (root / f"{name}.txt").touch()
        lists.append(plain_files(inspect(root)))
    assert lists[0] == lists[1]
    assert len(lists[0]) == 12


def test_empty_folders_are_remembered_and_full_ones_follow_from_their_files(
    tmp_path: Path,
) -> None:
    write_tensors(tmp_path / SINGLE_FILE, w=b"1")
    (tmp_path / "empty" / "within").mkdir(parents=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    assert inspect(tmp_path).directories == ("empty/within",)


@pytest.mark.parametrize(
    "name", [".git", ".cache", ".mergegit", "__pycache__", ".ipynb_checkpoints"]
)
@pytest.mark.parametrize("above", ["", "nested/"])
def test_some_folders_are_no_part_of_a_checkpoint(name: str, above: str, tmp_path: Path) -> None:
    write_tensors(tmp_path / SINGLE_FILE, w=b"1")
    write_tensors(tmp_path / above / name / "other.safetensors", v=b"1")
    (tmp_path / above / name / "x.txt").touch()
    checkpoint = inspect(tmp_path)
    assert shard_names(checkpoint) == [SINGLE_FILE]
    assert checkpoint.files == ()
    assert checkpoint.directories == (("nested",) if above else ())


@pytest.mark.skipif(sys.platform == "darwin", reason="the system allows no such name")
def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / SINGLE_FILE, w=b"1")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")).touch()
    with pytest.raises(BadCheckpoint, match="UTF-8") as caught:
        inspect(tmp_path)
    caught.value.message.encode()


def test_a_pipe_in_a_checkpoint_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / SINGLE_FILE, w=b"1")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadCheckpoint, match="neither a file nor a directory"):
        inspect(tmp_path)


# -- links ----------------------------------------------------------------------------------------


def test_links_are_followed_as_the_hub_cache_needs(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    write_tensors(blobs / "abc", w=b"1")
    (blobs / "def").write_text("{}")
    snapshot.mkdir(parents=True)
    (snapshot / SINGLE_FILE).symlink_to("../../blobs/abc")
    (snapshot / "config.json").symlink_to("../../blobs/def")
    (tmp_path / "link").symlink_to(snapshot)
    checkpoint = inspect(tmp_path / "link")
    assert owners(checkpoint) == {"w": SINGLE_FILE}
    assert plain_files(checkpoint) == ["config.json"]
    assert checkpoint.name == "main"


def test_a_link_to_a_folder_is_that_folder(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_tensors(root / SINGLE_FILE, w=b"1")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.txt").touch()
    (root / "a").symlink_to(tmp_path / "tokenizer")
    (root / "b").symlink_to(tmp_path / "tokenizer")
    assert plain_files(inspect(root)) == ["a/vocab.txt", "b/vocab.txt"]


def test_a_broken_link_is_named(tmp_path: Path) -> None:
    write_tensors(tmp_path / SINGLE_FILE, w=b"1")
    (tmp_path / "vocab.txt").symlink_to("gone")
    with pytest.raises(BadCheckpoint, match=r"vocab\.txt is a link to a file that is not there"):
        inspect(tmp_path)


def test_links_that_lead_to_one_another_are_named(tmp_path: Path) -> None:
    write_tensors(tmp_path / SINGLE_FILE, w=b"1")
    (tmp_path / "x.txt").symlink_to("y.txt")
    (tmp_path / "y.txt").symlink_to("x.txt")
    with pytest.raises(BadCheckpoint, match=r"x\.txt"):
        inspect(tmp_path)


@pytest.mark.parametrize("target", [".", "..", "../.."])
def test_a_link_to_a_folder_above_is_refused(target: str, tmp_path: Path) -> None:
    write_tensors(tmp_path / SINGLE_FILE, w=b"1")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "loop").symlink_to(target)
    with pytest.raises(BadCheckpoint, match="a link to a directory above it"):
        inspect(tmp_path)


# -- the config -----------------------------------------------------------------------------------


def write_model(directory: Path, config: object) -> Path:
    """Two layers and an embedding of seven rows."""
    header = {
        "model.embed_tokens.weight": entry("U8", [7, 2], 0, 14),
        "model.layers.0.w": entry("U8", [1], 14, 15),
        "model.layers.1.w": entry("U8", [1], 15, 16),
    }
    write(directory / SINGLE_FILE, header, bytes(16))
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_a_config_that_agrees_with_the_weights_needs_no_note(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "vocab_size": 7}
    assert inspect(write_model(tmp_path, config)).notes == ()


def test_more_rows_than_the_vocabulary_are_padding_and_need_no_note(tmp_path: Path) -> None:
    assert inspect(write_model(tmp_path, {"vocab_size": 6})).notes == ()


@pytest.mark.parametrize(
    ("config", "note"),
    [
        ({"num_hidden_layers": 3}, "config.json promises 3 layers; the weights have 2"),
        (
            {"vocab_size": 9},
            "config.json promises 9 tokens; model.embed_tokens.weight has 7 rows",
        ),
    ],
)
def test_a_config_that_promises_more_gets_a_note(
    config: dict[str, int], note: str, tmp_path: Path
) -> None:
    assert inspect(write_model(tmp_path, config)).notes == (note,)


@pytest.mark.parametrize("config", [{"num_hidden_layers": "2", "vocab_size": None}, {}])
def test_a_config_that_says_nothing_gets_no_note(config: object, tmp_path: Path) -> None:
    assert inspect(write_model(tmp_path, config)).notes == ()


@pytest.mark.parametrize("text", ["{", "[]", "\ud7ff"])
def test_a_config_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    write_model(tmp_path, {})
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        inspect(tmp_path)


def test_files_that_were_read_are_not_read_again(tmp_path: Path) -> None:
    write_model(tmp_path, {"vocab_size": 7})
    write_tensors(tmp_path / "other.safetensors", v=b"1")
    (tmp_path / "notes.txt").write_text("x")
    assert inspect(tmp_path).contents == {
        "config.json": (tmp_path / "config.json").read_bytes(),
    }


# -- files that change ----------------------------------------------------------------------------


def one_source(tmp_path: Path) -> tuple[Path, Checkpoint]:
    path = write_tensors(tmp_path / "x.safetensors", w=b"1")
    return path, inspect(path)


def test_a_file_as_it_was_is_opened(tmp_path: Path) -> None:
    path, checkpoint = one_source(tmp_path)
    fd = checkpoint.shards[0].source.open()
    assert os.pread(fd, 1 << 20, 0) == path.read_bytes()
    os.close(fd)


@pytest.mark.parametrize("change", ["longer", "touched"])
def test_a_file_that_changed_since_is_refused(change: str, tmp_path: Path) -> None:
    path, checkpoint = one_source(tmp_path)
    if change == "longer":
        status = path.stat()
        with open(path, "ab") as file:
            file.write(b"x")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    else:
        os.utime(path, ns=(0, 0))
    with pytest.raises(BadCheckpoint, match="changed while it was read"):
        checkpoint.shards[0].source.open()


def test_a_file_that_is_gone_since_is_refused(tmp_path: Path) -> None:
    path, checkpoint = one_source(tmp_path)
    path.unlink()
    with pytest.raises(BadCheckpoint, match=r"x\.safetensors"):
        checkpoint.shards[0].source.open()


def test_a_refused_file_is_not_left_open(tmp_path: Path) -> None:
    path, checkpoint = one_source(tmp_path)
    os.utime(path, ns=(0, 0))
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(3):
        with pytest.raises(BadCheckpoint):
            checkpoint.shards[0].source.open()
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after == before
