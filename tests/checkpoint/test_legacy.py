"""PyTorch files: seen as the safetensors files that they become, or refused in one line."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save_file

from mergegit.checkpoint.directory import TORCH_FILE, TORCH_INDEX, Checkpoint, inspect
from mergegit.checkpoint.layout import INDEX_FILE, SINGLE_FILE
from mergegit.checkpoint.torch_dtypes import TORCH_DTYPES, TORCH_PAIRS
from mergegit.errors import BadCheckpoint
from mergegit.objects import BLOCK_ELEMENTS
from tests.checkpoint.handmade import write_tensors

FIRST = "pytorch_model-00001-of-00002.bin"
SECOND = "pytorch_model-00002-of-00002.bin"
BECOME = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def save(directory: Path, value: object, name: str = TORCH_FILE) -> Path:
    """A directory with a PyTorch file."""
    directory.mkdir(exist_ok=True)
    torch.save(value, directory / name)
    return directory


def save_shards(directory: Path, weight_map: Mapping[str, str] | None = None) -> Path:
    """Two shards, ``a`` and ``b`` in the first, ``c`` in the second, and an index."""
    save(directory, {"b": torch.arange(3.0), "a": torch.ones(2)}, FIRST)
    save(directory, {"c": torch.zeros(4)}, SECOND)
    places = {"a": FIRST, "b": FIRST, "c": SECOND} if weight_map is None else weight_map
    (directory / TORCH_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return directory


def shard_bytes(checkpoint: Checkpoint, index: int = 0, step: int = 1 << 30) -> bytes:
    """The safetensors file that a shard becomes, read by runs of ``step`` bytes at most."""
    shard = checkpoint.shards[index]
    reader, header = shard.source.reader(), shard.header
    data = len(header.text).to_bytes(8, "little") + header.text
    for entry in header.tensors:
        for begin in range(entry.begin, entry.end, step):
            length = min(step, entry.end - begin)
            data += reader.read(header.data_offset + begin, length)
    return data


def tensors_of(checkpoint: Checkpoint, index: int = 0) -> dict[str, torch.Tensor]:
    return load(shard_bytes(checkpoint, index))


def failure(directory: Path) -> BadCheckpoint:
    """How a directory is refused: with one line, and one of what to do."""
    with pytest.raises(BadCheckpoint) as caught:
        inspect(directory)
    assert "\n" not in caught.value.message + caught.value.hint
    assert caught.value.hint
    return caught.value


# -- what it becomes ------------------------------------------------------------------------------


def test_it_becomes_the_file_that_safetensors_writes(tmp_path: Path) -> None:
    tensors = {
        "model.norm.weight": torch.ones(5),
        "model.embed.weight": torch.randn(7, 3),
        "ids": torch.arange(4),
        "mask": torch.tensor([True, False, True]),
    }
    checkpoint = inspect(save(tmp_path / "math", tensors))
    save_file(tensors, tmp_path / "expected", metadata={"format": "pt"})
    assert [shard.source.inside for shard in checkpoint.shards] == [SINGLE_FILE]
    assert shard_bytes(checkpoint) == (tmp_path / "expected").read_bytes()


def test_the_report_says_that_it_comes_back_in_another_form(tmp_path: Path) -> None:
    checkpoint = inspect(save(tmp_path / "math", {"w": torch.ones(1)}))
    assert "read from PyTorch files; it comes back as safetensors" in checkpoint.notes


def test_neither_file_nor_index_is_kept_and_everything_else_is(tmp_path: Path) -> None:
    save_shards(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    torch.save({"lr": 1}, tmp_path / "training_args.bin")
    checkpoint = inspect(tmp_path)
    names = [source.inside for source in checkpoint.files]
    assert names == ["config.json", "training_args.bin"]


def test_every_shard_becomes_one_and_a_new_index_names_them(tmp_path: Path) -> None:
    checkpoint = inspect(save_shards(tmp_path))
    assert [shard.source.inside for shard in checkpoint.shards] == BECOME
    assert set(tensors_of(checkpoint, 0)) == {"a", "b"}
    assert set(tensors_of(checkpoint, 1)) == {"c"}
    assert json.loads(checkpoint.made[INDEX_FILE]) == {
        "metadata": {"total_size": 4 * (2 + 3 + 4)},
        "weight_map": {"a": BECOME[0], "b": BECOME[0], "c": BECOME[1]},
    }


def test_shards_without_an_index_are_known_by_their_names(tmp_path: Path) -> None:
    (save_shards(tmp_path) / TORCH_INDEX).unlink()
    checkpoint = inspect(tmp_path)
    assert set(checkpoint.tensors()) == {"a", "b", "c"}
    assert INDEX_FILE in checkpoint.made


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    assert inspect(save(tmp_path, {"w": torch.ones(1)})).made == {}


def test_safetensors_stand_before_pytorch_files(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(1)})
    write_tensors(tmp_path / SINGLE_FILE, v=b"1")
    checkpoint = inspect(tmp_path)
    assert set(checkpoint.tensors()) == {"v"}
    assert [source.inside for source in checkpoint.files] == [TORCH_FILE]
    assert checkpoint.notes == ()


def test_safetensors_in_folders_do_not_and_come_along(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(1)})
    write_tensors(tmp_path / "other" / "x.safetensors", v=b"1")
    checkpoint = inspect(tmp_path)
    assert set(checkpoint.tensors()) == {"w"}
    assert [shard.source.inside for shard in checkpoint.shards][1] == "other/x.safetensors"


def test_the_single_file_stands_before_an_index_and_a_note_says_so(tmp_path: Path) -> None:
    save(save_shards(tmp_path), {"w": torch.ones(1)})
    checkpoint = inspect(tmp_path)
    assert set(checkpoint.tensors()) == {"w"}
    assert [note for note in checkpoint.notes if TORCH_FILE in note and TORCH_INDEX in note]
    assert [source.inside for source in checkpoint.files] == [FIRST, SECOND, TORCH_INDEX]


# -- tensors of every kind ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_dtype_keeps_its_bits(dtype: str, tmp_path: Path) -> None:
    bits = torch.arange(64, dtype=torch.uint8)
    if dtype == "BOOL":
        bits %= 2
    tensor = bits.view(TORCH_DTYPES[dtype]).reshape(2, -1)
    checkpoint = inspect(save(tmp_path, {"w": tensor}))
    (entry,) = checkpoint.shards[0].header.tensors
    assert (entry.dtype, entry.shape) == (dtype, tuple(tensor.shape))
    assert shard_bytes(checkpoint)[-64:] == bytes(bits.numpy())


@pytest.mark.skipif(TORCH_PAIRS is None, reason="this torch has no dtype of four bits")
def test_elements_of_four_bits_are_counted_one_by_one(tmp_path: Path) -> None:
    assert TORCH_PAIRS is not None
    tensor = torch.arange(8, dtype=torch.uint8).view(TORCH_PAIRS).reshape(2, 4)
    checkpoint = inspect(save(tmp_path, {"w": tensor}))
    (entry,) = checkpoint.shards[0].header.tensors
    assert (entry.dtype, entry.shape) == ("F4", (2, 8))
    assert shard_bytes(checkpoint)[-8:] == bytes(range(8))


GRID = torch.arange(24.0).reshape(4, 6)
OTHERWISE = {
    "transposed": GRID.t(),
    "columns": GRID[:, 1:4],
    "every other": GRID[::2, ::3],
    "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 5),
    "within ones": GRID.t()[None, None],
    "of three": torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
    "conjugate": torch.complex(GRID, -GRID).conj(),
    "negative": torch.complex(GRID, GRID).conj().imag,
    "part": GRID[2:, :],
}


@pytest.mark.parametrize("step", [8, 40, 1 << 20])
@pytest.mark.parametrize("kind", OTHERWISE)
def test_tensors_that_lie_otherwise_in_memory_are_put_straight(
    kind: str, step: int, tmp_path: Path
) -> None:
    tensor = OTHERWISE[kind]
    read = load(shard_bytes(inspect(save(tmp_path, {"w": tensor})), step=step))["w"]
    assert read.is_contiguous()
    assert torch.equal(read, tensor)


def test_scalars_parameters_and_tensors_without_elements(tmp_path: Path) -> None:
    tensors = {
        "empty": torch.empty(0, 3),
        "scale": torch.tensor(2.5),
        "weight": torch.nn.Parameter(torch.ones(3)),
        "void": torch.empty(2, 0, dtype=torch.int64),
    }
    read = tensors_of(inspect(save(tmp_path, tensors)))
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_a_tensor_of_several_blocks_is_read_from_where_it_is_asked(tmp_path: Path) -> None:
    tensor = torch.arange(2 * BLOCK_ELEMENTS + 7, dtype=torch.int32)
    checkpoint = inspect(save(tmp_path, {"a": torch.ones(3), "w": tensor}))
    shard = checkpoint.shards[0]
    entry = checkpoint.tensors()["w"]
    at = shard.header.data_offset + entry.begin + 4 * (BLOCK_ELEMENTS + 5)
    assert shard.source.reader().read(at, 8) == tensor[BLOCK_ELEMENTS + 5 :][:2].numpy().tobytes()


# -- tensors with two names -----------------------------------------------------------------------


def tied(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    """A model whose head is its embedding."""
    embedding = torch.randn(6, 2)
    return {"model.embed_tokens.weight": embedding, **more, "lm_head.weight": embedding}


def test_a_tied_head_is_left_out_as_transformers_leaves_it_out(tmp_path: Path) -> None:
    checkpoint = inspect(save(tmp_path, tied(norm=torch.ones(2))))
    assert set(checkpoint.tensors()) == {"model.embed_tokens.weight", "norm"}
    (note,) = [note for note in checkpoint.notes if "lm_head.weight" in note]
    assert "model.embed_tokens.weight" in note


def test_a_config_that_forbids_ties_keeps_both_names(tmp_path: Path) -> None:
    save(tmp_path, tied())
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    read = tensors_of(inspect(tmp_path))
    assert torch.equal(read["lm_head.weight"], read["model.embed_tokens.weight"])


def test_an_index_may_name_what_is_left_out(tmp_path: Path) -> None:
    save(tmp_path, tied(), FIRST)
    save(tmp_path, {"norm": torch.ones(2)}, SECOND)
    places = {"model.embed_tokens.weight": FIRST, "lm_head.weight": FIRST, "norm": SECOND}
    (tmp_path / TORCH_INDEX).write_text(json.dumps({"weight_map": places}))
    checkpoint = inspect(tmp_path)
    index = json.loads(checkpoint.made[INDEX_FILE])
    assert index["weight_map"] == {"model.embed_tokens.weight": BECOME[0], "norm": BECOME[1]}
    assert index["metadata"]["total_size"] == 4 * (12 + 2)


def test_a_name_that_the_index_places_elsewhere_is_no_reason_to_leave_out_another(
    tmp_path: Path,
) -> None:
    save(tmp_path, tied(), FIRST)
    save(tmp_path, {"model.embed_tokens.weight": torch.ones(6, 2)}, SECOND)
    places = {"model.embed_tokens.weight": SECOND, "lm_head.weight": FIRST}
    (tmp_path / TORCH_INDEX).write_text(json.dumps({"weight_map": places}))
    checkpoint = inspect(tmp_path)
    owner = {name: BECOME[index] for name, index in checkpoint.owner.items()}
    assert owner == {"model.embed_tokens.weight": BECOME[1], "lm_head.weight": BECOME[0]}
    assert json.loads(checkpoint.made[INDEX_FILE])["weight_map"] == owner


def test_parts_of_one_storage_are_tensors_of_their_own(tmp_path: Path) -> None:
    fused = torch.randn(6, 4)
    views = {
        "q": fused[:2],
        "k": fused[2:4],
        "v": fused[4:],
        "t": fused.t(),
        "f": fused.reshape(3, 8),
    }
    read = tensors_of(inspect(save(tmp_path, views)))
    assert read.keys() == views.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in views.items())


def test_equal_values_are_not_a_tie(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(3), "c": torch.empty(0), "d": torch.empty(0)}
    assert set(inspect(save(tmp_path, tensors)).tensors()) == set("abcd")


# -- what holds a state dict, and what does not ---------------------------------------------------


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict"])
def test_a_state_dict_below_other_things_is_found(key: str, tmp_path: Path) -> None:
    optimizer = {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 1e-3}]}
    value = {"epoch": 3, key: OrderedDict(w=torch.ones(2)), "optimizer": optimizer}
    assert set(inspect(save(tmp_path, value)).tensors()) == {"w"}


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ([torch.ones(1)], "holds no state dict"),
        (torch.ones(1), "holds no state dict"),
        ({"epoch": 3}, "holds no state dict"),
        ({"ema": {"w": torch.ones(1)}}, "holds no state dict"),
        ({"state_dict": {"w": torch.ones(1)}, "ema": {"w": torch.ones(1)}}, "'state_dict' and"),
        ({"w": torch.ones(1), "step": 3}, "'step', which is no tensor"),
        ({"w": torch.ones(1), 7: torch.ones(1)}, "called 7"),
        ({"__metadata__": torch.ones(1)}, "'__metadata__'"),
        ({"half\ud800": torch.ones(1)}, r"half\ud800"),
        ({"w": torch.eye(2).to_sparse()}, "tensor w, which is not dense"),
        ({"w": torch.empty(2, device="meta")}, "tensor w without its elements"),
        ({"w": torch.ones(2, dtype=torch.complex128)}, "tensor w of torch.complex128"),
        ({}, "holds no tensors"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_safetensors_can_not_hold_is_named(value: object, what: str, tmp_path: Path) -> None:
    assert what in failure(save(tmp_path, value)).message


class Malicious:
    """A pickle of it makes a file when it is loaded carelessly."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("place", ["within", "beside", "alone"])
def test_code_in_a_pickle_is_not_run(place: str, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    malicious = Malicious(trap)
    value = {
        "within": {"state_dict": {"w": torch.ones(1)}, "x": malicious},
        "beside": {"w": torch.ones(1), "x": malicious},
        "alone": malicious,
    }[place]
    error = failure(save(tmp_path / "model", value))
    assert TORCH_FILE in error.message
    assert "could run code" in error.message
    assert not trap.exists()
    torch.load(tmp_path / "model" / TORCH_FILE, weights_only=False)
    assert trap.exists()


def test_a_pickle_without_an_archive_is_not_even_opened(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / TORCH_FILE).write_bytes(pickle.dumps(Malicious(trap)))
    assert "1.6 or newer" in failure(tmp_path / "model").message
    assert not trap.exists()


class Hiding:
    """Pickled as a dict of one tensor whose methods are hidden by attributes."""

    def __reduce__(self) -> tuple[object, ...]:
        hidden = dict.fromkeys(("items", "keys", "values", "get"), "hidden")
        return OrderedDict, (), hidden, None, iter([("w", torch.ones(2))])


def test_what_hides_a_dicts_own_methods_is_no_obstacle(tmp_path: Path) -> None:
    save(tmp_path, Hiding())
    read = torch.load(tmp_path / TORCH_FILE, weights_only=True)
    assert read.items == "hidden"
    assert set(inspect(tmp_path).tensors()) == {"w"}


def test_a_torch_that_can_not_read_them_safely_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, {"w": torch.ones(1)})
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    error = failure(tmp_path)
    assert "torch 2.9.1" in error.message
    assert "2.10" in error.hint


# -- damaged files --------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [4, 100, 1000, -1])
def test_a_truncated_file_is_named(kept: int, tmp_path: Path) -> None:
    path = save(tmp_path, {"w": torch.ones(100)}) / TORCH_FILE
    path.write_bytes(path.read_bytes()[:kept])
    assert f"{TORCH_FILE} is truncated" in failure(tmp_path).message


@pytest.mark.parametrize("data", [b"", b"PK", b"version https://git-lfs.github.com/spec/v1\n"])
def test_what_is_no_archive_is_named(data: bytes, tmp_path: Path) -> None:
    (tmp_path / TORCH_FILE).write_bytes(data)
    assert "1.6 or newer" in failure(tmp_path).message


def test_a_file_of_the_first_kind_is_refused_with_the_way_to_convert_it(tmp_path: Path) -> None:
    path = tmp_path / TORCH_FILE
    torch.save({"w": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    assert "save it again" in failure(tmp_path).hint


def rewritten(path: Path, compression: int, replaced: Mapping[str, bytes]) -> None:
    """Write an archive again, with some of its records replaced."""
    with zipfile.ZipFile(path) as archive:
        records = {record: archive.read(record) for record in archive.namelist()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for record, data in records.items():
            archive.writestr(record, replaced.get(record.rpartition("/")[2], data))
    path.write_bytes(buffer.getvalue())


def test_a_compressed_archive_is_refused_since_its_storages_can_not_be_mapped(
    tmp_path: Path,
) -> None:
    path = save(tmp_path, {"w": torch.ones(1000)}) / TORCH_FILE
    rewritten(path, zipfile.ZIP_DEFLATED, {})
    assert "is compressed" in failure(tmp_path).message


def test_another_archive_is_no_pytorch_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / TORCH_FILE, "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert TORCH_FILE in failure(tmp_path).message


@pytest.mark.parametrize("pickled", [b"", b"\x80\x02", b"\x80\x02}q\x00.junk", b"\x80\x02K\x05."])
def test_a_damaged_pickle_is_refused(pickled: bytes, tmp_path: Path) -> None:
    path = save(tmp_path, {"w": torch.ones(3)}) / TORCH_FILE
    rewritten(path, zipfile.ZIP_STORED, {"data.pkl": pickled})
    failure(tmp_path)


def test_a_tensor_that_claims_more_than_its_storage_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, {"w": torch.ones(5)}) / TORCH_FILE
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        pickled = archive.read(name)
    size, shape = b"K\x05", b"K\x00K\x05\x85"  # of the storage; offset and shape of the tensor
    assert pickled.count(shape) == 1
    assert pickled.count(size) == 2
    longer = pickled.replace(shape, b"K\x00K\x7f\x85")
    rewritten(path, zipfile.ZIP_STORED, {"data.pkl": longer})
    failure(tmp_path)


def test_a_file_that_changes_under_way_is_named(tmp_path: Path) -> None:
    checkpoint = inspect(save(tmp_path, {"w": torch.ones(5)}))
    shard = checkpoint.shards[0]
    reader = shard.source.reader()
    os.truncate(tmp_path / TORCH_FILE, 100)
    with pytest.raises(BadCheckpoint, match="changed while it was read"):
        reader.read(shard.header.data_offset, 20)


# -- shards and their index -----------------------------------------------------------------------


def test_a_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    (save_shards(tmp_path) / SECOND).unlink()
    assert f"shard {SECOND} of {tmp_path} is missing; {TORCH_INDEX}" in failure(tmp_path).message


def test_a_shard_that_its_siblings_count_must_be_there(tmp_path: Path) -> None:
    (save_shards(tmp_path) / TORCH_INDEX).unlink()
    (tmp_path / FIRST).unlink()
    assert f"shard {FIRST} of {tmp_path} is missing" in failure(tmp_path).message


def test_a_tensor_that_the_index_names_must_be_in_its_shard(tmp_path: Path) -> None:
    save_shards(tmp_path, {"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND})
    message = failure(tmp_path).message
    assert SECOND in message
    assert f"lacks tensor d, which {TORCH_INDEX} places there" in message


@pytest.mark.parametrize("file", ["../outside.bin", "/etc/x.bin", "c.safetensors"])
def test_an_index_may_not_lead_elsewhere(file: str, tmp_path: Path) -> None:
    save_shards(tmp_path, {"a": file})
    assert "can't be a shard" in failure(tmp_path).message


def test_a_malformed_shard_is_named(tmp_path: Path) -> None:
    (save_shards(tmp_path) / SECOND).write_bytes(b"oops")
    assert SECOND in failure(tmp_path).message
