"""`checkout`: the files of a commit, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mergegit import Repository
from mergegit.errors import BadTarget, Damaged, UnknownRef
from tests.families import Family, tiny_checkpoint
from tests.repository.damage import flip
from tests.trees import tree_of


def merge(repository: Repository, *experts: str, branch: str = "merged", **options: object) -> None:
    recipe = repository.recipe(experts, **options)  # type: ignore[arg-type]
    repository.merge(repository.plan(recipe), branch=branch)


def load(path: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def test_it_reports_what_it_wrote(tiny: Repository, tiny_family: Family, tmp_path: Path) -> None:
    report = tiny.checkout("math", tmp_path / "out")
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert report.commit == tiny.resolve("math")
    assert report.files == len(files)
    assert report.nbytes == sum(path.stat().st_size for path in files)


def test_the_directories_above_the_target_are_made(tiny: Repository, tmp_path: Path) -> None:
    tiny.checkout("base", tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c" / "config.json").is_file()


def test_an_empty_directory_is_a_good_target(
    tiny: Repository, tiny_family: Family, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    tiny.checkout("base", tmp_path / "out")
    assert tree_of(tmp_path / "out") == tree_of(tiny_family.base)


def test_a_directory_with_anything_in_it_is_refused_and_stays(
    tiny: Repository, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(BadTarget, match="not empty"):
        tiny.checkout("base", tmp_path / "out")
    assert tree_of(tmp_path / "out") == {"mine.txt": b"mine"}


def test_a_file_in_the_way_is_refused_and_stays(tiny: Repository, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(BadTarget, match="not a directory"):
        tiny.checkout("base", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_a_link_is_not_followed_to_where_it_leads(tiny: Repository, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to("elsewhere")
    with pytest.raises(BadTarget):
        tiny.checkout("base", tmp_path / "out")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_target_below_a_file_is_refused(tiny: Repository, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadTarget):
        tiny.checkout("base", tmp_path / "file" / "out")


def test_an_unknown_ref_makes_no_directory(tiny: Repository, tmp_path: Path) -> None:
    with pytest.raises(UnknownRef):
        tiny.checkout("nothing", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_stopped_half_way_it_leaves_nothing(
    error: type[BaseException], loaded: Repository, tmp_path: Path
) -> None:
    target = tmp_path / "targets" / "out"
    target.parent.mkdir()

    def stop(_what: str, done: int, total: int) -> None:
        if done > total / 2:
            raise error

    with pytest.raises(error):
        loaded.checkout("math", target, progress=stop)
    assert list(target.parent.iterdir()) == []
    loaded.checkout("math", target)
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_what_a_killed_checkout_left_beside_the_target_is_removed(
    tiny: Repository, tmp_path: Path
) -> None:
    leftover = tmp_path / ".out.0123abcd.mergegit"
    leftover.mkdir()
    (leftover / "half.safetensors").touch()
    (tmp_path / ".other.0123abcd.mergegit").mkdir()
    tiny.checkout("base", tmp_path / "out")
    assert not leftover.exists()
    assert (tmp_path / ".other.0123abcd.mergegit").exists()


def test_a_damaged_block_stops_it_and_names_what_is_affected(
    tiny: Repository, tmp_path: Path
) -> None:
    """A flip in the embedding of the base, which its checkout reads and names."""
    tensor = tiny.tensor(tiny.manifest("base").tensors["model.embed_tokens.weight"])
    block = tensor.block(0)
    form = tiny.store.forms([block])[block][0]
    pack = tiny.store.location.packs / f"{tiny.store.reader.pack_name(form.places[0])}.pack"
    flip(pack, form.places[0].offset)
    with pytest.raises(Damaged, match=r"model\.embed_tokens\.weight of .*base"):
        tiny.checkout("base", tmp_path / "targets" / "out")
    assert list((tmp_path / "targets").iterdir()) == []


def test_a_commit_can_be_checked_out_by_any_of_its_names(
    tiny: Repository, tiny_family: Family, tmp_path: Path
) -> None:
    commit = tiny.create_tag("v1", "math")
    for place, ref in enumerate(("math", "v1", commit.hex(), commit.hex()[:12])):
        tiny.checkout(ref, tmp_path / str(place))
        assert tree_of(tmp_path / str(place)) == tree_of(tiny_family.experts[0])
    tiny.checkout("math~1", tmp_path / "below")
    assert tree_of(tmp_path / "below") == tree_of(tiny_family.base)


# -- merged ----------------------------------------------------------------------------------------


def test_a_merged_checkpoint_loads_and_has_the_layout_of_its_base(
    loaded: Repository, family: Family, tmp_path: Path
) -> None:
    merge(loaded, "math", "code")
    loaded.checkout("merged", tmp_path / "out")
    files = {path.relative_to(family.base) for path in family.base.rglob("*") if path.is_file()}
    out = tmp_path / "out"
    assert {path.relative_to(out) for path in out.rglob("*") if path.is_file()} == files
    base, math, code, merged = map(load, (family.base, *family.experts[:2], out))
    assert list(merged) == list(base)
    for name, tensor in base.items():
        expected = tensor.float() + (math[name].float() - tensor.float())
        expected += code[name].float() - tensor.float()
        assert merged[name].dtype == torch.bfloat16
        torch.testing.assert_close(merged[name].float(), expected, rtol=1e-2, atol=1e-4)


def test_load_gives_what_a_checkout_gives(loaded: Repository, tmp_path: Path) -> None:
    merge(loaded, "math", "code", method="ties", parameters={"density": 0.5})
    loaded.checkout("merged", tmp_path / "out")
    on_disk, loaded_at_once = load(tmp_path / "out"), loaded.load("merged")
    assert on_disk.keys() == loaded_at_once.keys()
    for name, tensor in on_disk.items():
        assert torch.equal(tensor, loaded_at_once[name])


def test_the_card_says_what_was_merged_and_how(tiny: Repository, tmp_path: Path) -> None:
    merge(tiny, "math", "code", method="ties", parameters={"math.weight": 0.5})
    tiny.checkout("merged", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    front, _, body = card.removeprefix("---\n").partition("\n---\n")
    assert "- merge" in front.splitlines()
    assert "license: apache-2.0" in front.splitlines()
    for word in ("`ties`", "| math |", "| code |", "weight 0.5", "normalize: true"):
        assert word in body
    assert tiny.commit("base").manifest.hex()[:16] in body


def test_another_dtype_shows_in_config_index_and_headers(
    loaded: Repository, tmp_path: Path
) -> None:
    merge(loaded, "math", "code", dtype="F32")
    loaded.checkout("merged", tmp_path / "out")
    out = tmp_path / "out"
    merged = load(out)
    assert {tensor.dtype for tensor in merged.values()} == {torch.float32}
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in merged.values())
    for name, file in index["weight_map"].items():
        with safe_open(out / file, "pt") as shard:
            assert name in shard.keys()  # noqa: SIM118 (not a mapping)
            assert shard.metadata() == {"format": "pt"}


def test_second_files_of_weights_do_not_come_along_into_a_merge(
    repository: Repository, tmp_path: Path
) -> None:
    base = tiny_checkpoint(tmp_path / "base")
    expert = tiny_checkpoint(tmp_path / "expert", moved=0)
    (base / "pytorch_model.bin").write_bytes(b"the base's weights")
    (base / "consolidated.safetensors").write_bytes((base / "model.safetensors").read_bytes())
    repository.add(base)
    repository.add(expert)
    merge(repository, "expert")
    repository.checkout("merged", tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in names
    assert "config.json" in names
    assert not names & {"pytorch_model.bin", "consolidated.safetensors"}


def test_a_merges_card_ends_with_the_commit_that_it_is(tiny: Repository, tmp_path: Path) -> None:
    merge(tiny, "math", "code")
    tiny.checkout("merged", tmp_path / "out")
    last = (tmp_path / "out" / "README.md").read_text().splitlines()[-1]
    assert last == f"Checked out from mergegit commit `{tiny.resolve('merged').hex()}`."
    again = tiny.checkout("merged", tmp_path / "out", update=True)
    assert again.files == 0
