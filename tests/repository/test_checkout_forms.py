"""`checkout` in another dtype, or with shards of another size."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mergegit import Repository
from mergegit.errors import BadRecipe, Damaged, Mismatch, NotFinite
from mergegit.objects import BLOCK_ELEMENTS
from tests.families import Family, base_tensors, save_checkpoint, tiny_checkpoint
from tests.repository.damage import flip
from tests.trees import tree_of

INDEX = "model.safetensors.index.json"
PT = {"format": "pt"}


def load(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found = load_file(file)
        assert not found.keys() & tensors.keys()
        tensors.update(found)
    return tensors


def header_of(path: Path) -> dict[str, object]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header: dict[str, object] = json.loads(data[8 : 8 + length])
    return header


def json_of(path: Path) -> dict[str, object]:
    value: dict[str, object] = json.loads(path.read_text())
    return value


def added(
    repository: Repository, path: Path, tensors: Mapping[str, torch.Tensor], **config: object
) -> Path:
    """A checkpoint of one file in the repository, with a config that states float32."""
    path.mkdir(parents=True)
    save_file(dict(tensors), path / "model.safetensors", metadata=PT)
    (path / "config.json").write_text(json.dumps({"torch_dtype": "float32", **config}))
    repository.add(path, no_base=True)
    return path


@pytest.fixture
def wide(repository: Repository, tmp_path: Path) -> Repository:
    """A repository with a float32 model in two shards on the branch ``wide``."""
    repository.add(save_checkpoint(tmp_path / "wide", base_tensors(), torch.float32))
    return repository


# -- another dtype --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"),
    [("float16", torch.float16), ("bf16", torch.bfloat16), ("F64", torch.float64)],
)
def test_floating_tensors_are_rounded_once_and_everything_says_so(
    dtype: str, torch_dtype: torch.dtype, wide: Repository, tmp_path: Path
) -> None:
    wide.checkout("wide", tmp_path / "out", dtype=dtype)
    out = load(tmp_path / "out")
    expected = {name: tensor.to(torch_dtype) for name, tensor in base_tensors().items()}
    assert out.keys() == expected.keys()
    assert all(torch.equal(out[name], tensor) for name, tensor in expected.items())
    name = str(torch_dtype).removeprefix("torch.")
    before, after = json_of(tmp_path / "wide" / INDEX), json_of(tmp_path / "out" / INDEX)
    assert json_of(tmp_path / "out" / "config.json")["torch_dtype"] == name
    assert after["metadata"] == {"total_size": sum(t.nbytes for t in expected.values())}
    assert after["weight_map"] == before["weight_map"]


def test_all_other_files_stay_as_they_are(wide: Repository, tmp_path: Path) -> None:
    report = wide.checkout("wide", tmp_path / "out", dtype="float16")
    before, after = tree_of(tmp_path / "wide"), tree_of(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {path for path in before if before[path] != after[path]}
    assert changed == {"config.json", INDEX, *(path for path in before if ".safetensors" in path)}
    assert report.notes == ()
    assert report.nbytes == sum(map(len, filter(None, after.values())))


def test_the_dtype_that_it_has_gives_back_every_byte(
    tiny: Repository, tiny_family: Family, tmp_path: Path
) -> None:
    tiny.checkout("base", tmp_path / "out", dtype="bfloat16")
    assert tree_of(tmp_path / "out") == tree_of(tiny_family.base)


def test_what_is_no_float_keeps_its_bits_and_every_tensor_is_aligned(
    repository: Repository, tmp_path: Path
) -> None:
    tensors = {
        "ids": torch.arange(-2, 3),
        "mask": torch.tensor([True, False, True]),
        "phase": torch.tensor([1 + 2j], dtype=torch.complex64),
        "w": torch.randn(3, 5),
        "double": torch.randn(3, dtype=torch.float64),
    }
    added(repository, tmp_path / "mixed", tensors)
    repository.checkout("mixed", tmp_path / "out", dtype="float16")
    out = load(tmp_path / "out")
    for name, tensor in tensors.items():
        is_float = tensor.is_floating_point()
        assert torch.equal(out[name], tensor.float().half() if is_float else tensor)
    header = header_of(tmp_path / "out" / "model.safetensors")
    for name, tensor in out.items():
        entry = header[name]
        assert isinstance(entry, dict)
        assert entry["data_offsets"][0] % tensor.element_size() == 0


def test_tensors_of_many_blocks_are_converted_whole(repository: Repository, tmp_path: Path) -> None:
    tensor = torch.linspace(-1, 1, 2 * BLOCK_ELEMENTS + 5)
    added(repository, tmp_path / "long", {"w": tensor, "scale": torch.tensor(0.1)})
    repository.checkout("long", tmp_path / "out", dtype="bfloat16")
    assert torch.equal(load(tmp_path / "out")["w"], tensor.bfloat16())


def test_a_number_beyond_the_range_is_refused_with_its_tensors_name(
    repository: Repository, tmp_path: Path
) -> None:
    tensors = {"fine": torch.ones(3), "layers.3.big": torch.tensor([1.0, 70_000.0])}
    added(repository, tmp_path / "model", tensors)
    target = tmp_path / "targets" / "out"
    target.parent.mkdir()
    with pytest.raises(NotFinite, match=r"tensor layers\.3\.big .* range of float16") as caught:
        repository.checkout("model", target, dtype="float16")
    assert "bfloat16" in caught.value.hint
    assert list(target.parent.iterdir()) == []
    repository.checkout("model", target, dtype="bfloat16")


def test_what_was_infinite_or_not_a_number_stays_so(repository: Repository, tmp_path: Path) -> None:
    infinite = [float("inf"), float("-inf")]
    added(repository, tmp_path / "model", {"w": torch.tensor([*infinite, float("nan"), -0.0])})
    repository.checkout("model", tmp_path / "out", dtype="float16")
    w = load(tmp_path / "out")["w"]
    assert w[:2].tolist() == infinite
    assert w[2].isnan()
    assert w[3].signbit()


def test_quantised_weights_mean_nothing_in_another_dtype(
    repository: Repository, tmp_path: Path
) -> None:
    tensors = {"w": torch.zeros(4).to(torch.float8_e4m3fn), "w_scale": torch.ones(1)}
    added(repository, tmp_path / "model", tensors, quantization_config={"quant_method": "fp8"})
    with pytest.raises(Mismatch, match="quantised"):
        repository.checkout("model", tmp_path / "out", dtype="bfloat16")
    repository.checkout("model", tmp_path / "out", shard_size="1GB")
    assert load(tmp_path / "out").keys() == tensors.keys()


def test_a_model_without_a_config_can_be_converted(repository: Repository, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "math.safetensors")
    repository.add(tmp_path / "math.safetensors")
    repository.checkout("math", tmp_path / "out", dtype="float16")
    assert load_file(tmp_path / "out" / "math.safetensors")["w"].dtype == torch.float16


@pytest.mark.parametrize("dtype", ["int8", "float", "", "F4"])
def test_no_dtype_of_floats_is_refused(dtype: str, tiny: Repository, tmp_path: Path) -> None:
    with pytest.raises(BadRecipe, match="no dtype to check out in") as caught:
        tiny.checkout("base", tmp_path / "out", dtype=dtype)
    assert "bfloat16" in caught.value.hint
    assert not (tmp_path / "out").exists()


# -- shards of another size -----------------------------------------------------------------------


def test_tensors_keep_their_order_and_bytes_in_new_shards(wide: Repository, tmp_path: Path) -> None:
    wide.checkout("wide", tmp_path / "out", shard_size="1MB")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    count = len(files)
    assert count > 3
    assert [file.name for file in files] == [
        f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)
    ]
    stored = [
        name
        for file in sorted((tmp_path / "wide").glob("*.safetensors"))
        for name in header_of(file)
        if name != "__metadata__"
    ]
    new, weight_map = [], {}
    for file in files:
        header = header_of(file)
        assert header.pop("__metadata__") == PT
        new += list(header)
        weight_map.update(dict.fromkeys(header, file.name))
        tensors = load_file(file)
        assert sum(t.nbytes for t in tensors.values()) <= 1_000_000 or len(tensors) == 1
    assert new == stored
    total = sum(t.nbytes for t in base_tensors().values())
    assert json_of(tmp_path / "out" / INDEX) == {
        "metadata": {"total_size": total},
        "weight_map": weight_map,
    }
    out = load(tmp_path / "out")
    assert all(torch.equal(out[name], tensor) for name, tensor in base_tensors().items())


def test_one_shard_that_holds_everything_needs_no_index(wide: Repository, tmp_path: Path) -> None:
    report = wide.checkout("wide", tmp_path / "out", shard_size="5GB")
    assert [file.name for file in (tmp_path / "out").glob("model*")] == ["model.safetensors"]
    assert load(tmp_path / "out").keys() == base_tensors().keys()
    assert report.files == sum(path.is_file() for path in (tmp_path / "out").rglob("*"))
    config = tree_of(tmp_path / "wide")["config.json"]
    assert tree_of(tmp_path / "out")["config.json"] == config


def test_a_tensor_that_is_larger_has_a_shard_of_its_own(
    repository: Repository, tmp_path: Path
) -> None:
    tensors = {"a": torch.ones(2), "b": torch.ones(100), "c": torch.ones(2), "d": torch.ones(2)}
    added(repository, tmp_path / "model", tensors)
    repository.checkout("model", tmp_path / "out", shard_size=16)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [set(load_file(file)) for file in files] == [{"a"}, {"b"}, {"c", "d"}]


def test_sizes_are_those_of_the_dtype_that_is_written(wide: Repository, tmp_path: Path) -> None:
    nbytes = sum(tensor.nbytes for tensor in base_tensors().values())
    wide.checkout("wide", tmp_path / "whole", shard_size=nbytes // 2, dtype="float16")
    assert [path.name for path in (tmp_path / "whole").glob("model*")] == ["model.safetensors"]
    wide.checkout("wide", tmp_path / "split", shard_size=nbytes // 2 - 1, dtype="float16")
    assert len(list((tmp_path / "split").glob("*.safetensors"))) == 2
    config = json_of(tmp_path / "split" / "config.json")
    index = json_of(tmp_path / "split" / INDEX)
    assert config["torch_dtype"] == "float16"
    assert index["metadata"] == {"total_size": nbytes // 2}


def test_what_is_laid_out_anew_is_aligned_too(repository: Repository, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for number, name in enumerate(("flags", "w")):
        tensors = {name: torch.zeros(3, dtype=[torch.uint8, torch.float32][number])}
        save_file(tensors, tmp_path / "model" / f"{number}.safetensors", metadata=PT)
    repository.add(tmp_path / "model")
    repository.checkout("model", tmp_path / "out", shard_size="1GB")
    assert list(header_of(tmp_path / "out" / "model.safetensors"))[1:] == ["w", "flags"]


def test_what_all_headers_say_is_kept(repository: Repository, tmp_path: Path) -> None:
    for branch, notes in (("same", ("mlx", "mlx")), ("other", ("mlx", "pt")), ("none", (None,))):
        path = tmp_path / branch
        path.mkdir()
        for number, note in enumerate(notes):
            metadata = {"format": note} if note else None
            save_file({f"w{number}": torch.ones(3)}, path / f"{number}.safetensors", metadata)
        repository.add(path, no_base=True)
        repository.checkout(branch, tmp_path / "out" / branch, shard_size="1GB")
    found = {}
    for branch in ("same", "other", "none"):
        with safe_open(tmp_path / "out" / branch / "model.safetensors", "pt") as file:
            found[branch] = file.metadata()
    assert found == {"same": {"format": "mlx"}, "other": PT, "none": PT}


@pytest.mark.parametrize("size", ["10%", "0", "-1", "big", "", 0, -5])
def test_no_size_is_refused(size: str | int, tiny: Repository, tmp_path: Path) -> None:
    with pytest.raises(BadRecipe, match="not a shard size") as caught:
        tiny.checkout("base", tmp_path / "out", shard_size=size)
    assert "5GB" in caught.value.hint
    assert not (tmp_path / "out").exists()


# -- what lies beside the model -------------------------------------------------------------------


@pytest.mark.parametrize("form", [{"dtype": "float32"}, {"shard_size": "1kB"}])
def test_weights_beside_the_model_are_left_out_and_named(
    form: dict[str, str], repository: Repository, tmp_path: Path
) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    (path / "pytorch_model.bin").write_bytes(b"weights")
    (path / "model-00001-of-00002.safetensors").write_bytes(
        (path / "model.safetensors").read_bytes()
    )
    (path / INDEX).write_text("stale")
    repository.add(path)
    report = repository.checkout("model", tmp_path / "out", **form)  # type: ignore[arg-type]
    assert report.notes == (
        "left out: model-00001-of-00002.safetensors",
        "left out: pytorch_model.bin",
    )
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()
    assert load(tmp_path / "out").keys() == load_file(path / "model.safetensors").keys()
    repository.checkout("model", tmp_path / "as it was")
    assert tree_of(tmp_path / "as it was") == tree_of(path)


def test_an_index_decides_which_of_two_tensors_of_one_name_is_laid_out(
    repository: Repository, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    path.mkdir()
    save_file({"a": torch.ones(3), "b": torch.zeros(3)}, path / "x.safetensors", metadata=PT)
    save_file({"a": torch.zeros(3), "c": torch.ones(1)}, path / "y.safetensors", metadata=PT)
    weight_map = {"a": "x.safetensors", "b": "x.safetensors", "c": "y.safetensors"}
    (path / INDEX).write_text(json.dumps({"metadata": None, "weight_map": weight_map}))
    repository.add(path)
    repository.checkout("model", tmp_path / "new", shard_size="1GB")
    out = load(tmp_path / "new")
    assert out["a"].tolist() == [1, 1, 1]
    assert out.keys() == {"a", "b", "c"}
    repository.checkout("model", tmp_path / "half", dtype="float16")
    assert load_file(tmp_path / "half" / "y.safetensors")["a"].dtype == torch.float16
    assert json_of(tmp_path / "half" / INDEX)["metadata"] == {"total_size": 2 * 7}


# -- as any other checkout ------------------------------------------------------------------------


def test_any_number_of_threads_writes_the_same(wide: Repository, tmp_path: Path) -> None:
    for threads in (1, 3):
        wide.threads = threads
        wide.checkout("wide", tmp_path / str(threads), dtype="float16", shard_size="1MB")
    assert tree_of(tmp_path / "1") == tree_of(tmp_path / "3")


def test_progress_ends_with_all_that_is_written(wide: Repository, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []

    def watch(what: str, done: int, total: int) -> None:
        seen.append((what, done, total))

    report = wide.checkout("wide", tmp_path / "out", dtype="float16", progress=watch)
    assert seen[-1] == ("checking out wide", report.nbytes, report.nbytes)
    assert {total for _, _, total in seen} == {report.nbytes}


def stop(_what: str, done: int, total: int) -> None:
    if done > total / 2:
        raise KeyboardInterrupt


def test_stopped_half_way_it_leaves_nothing(wide: Repository, tmp_path: Path) -> None:
    target = tmp_path / "targets" / "out"
    target.parent.mkdir()
    with pytest.raises(KeyboardInterrupt):
        wide.checkout("wide", target, dtype="float16", shard_size="1MB", progress=stop)
    assert list(target.parent.iterdir()) == []


def test_a_damaged_block_is_named_with_its_tensor(tiny: Repository, tmp_path: Path) -> None:
    tensor = tiny.tensor(tiny.manifest("base").tensors["model.embed_tokens.weight"])
    form = tiny.store.forms([tensor.block(0)])[tensor.block(0)][0]
    pack = tiny.store.location.packs / f"{tiny.store.reader.pack_name(form.places[0])}.pack"
    flip(pack, form.places[0].offset)
    with pytest.raises(Damaged, match=r"model\.embed_tokens\.weight of .*base"):
        tiny.checkout("base", tmp_path / "out", dtype="float32")
    assert not (tmp_path / "out").exists()


def by_dtype(repository: Repository, path: Path) -> None:
    repository.checkout("wide", path, dtype="float16")


def by_shards(repository: Repository, path: Path) -> None:
    repository.checkout("wide", path, shard_size="2MB")


@pytest.mark.parametrize("check_out", [by_dtype, by_shards])
def test_what_was_checked_out_can_be_added_and_comes_back(
    check_out: Callable[[Repository, Path], None], wide: Repository, tmp_path: Path
) -> None:
    check_out(wide, tmp_path / "again")
    report = wide.add(tmp_path / "again")
    assert report.base_ref == "wide"
    wide.checkout("again", tmp_path / "out")
    assert tree_of(tmp_path / "out") == tree_of(tmp_path / "again")
