"""`checkout --update`: what differs is rewritten, the rest left alone, and nothing is lost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mergegit import Repository
from mergegit.checkpoint import writer
from mergegit.errors import BadTarget, Damaged
from tests.families import base_tensors, save_checkpoint
from tests.trees import tree_of


def stamps(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}


def test_a_directory_becomes_another_commits(merged: Repository, tmp_path: Path) -> None:
    merged.checkout("base", tmp_path / "there")
    merged.checkout("math", tmp_path / "fresh")
    report = merged.checkout("math", tmp_path / "there", update=True)
    assert tree_of(tmp_path / "there") == tree_of(tmp_path / "fresh")
    assert report.files + report.unchanged == len(list((tmp_path / "fresh").iterdir()))


def test_files_that_are_the_commits_already_are_not_touched(
    merged: Repository, tmp_path: Path
) -> None:
    merged.checkout("math", tmp_path / "there")
    before = stamps(tmp_path / "there")
    report = merged.checkout("math", tmp_path / "there", update=True)
    assert (report.files, report.nbytes) == (0, 0)
    assert stamps(tmp_path / "there") == before


@pytest.mark.parametrize("change", ["flipped", "cut", "longer", "missing"])
def test_a_file_that_was_changed_is_made_right(
    merged: Repository, tmp_path: Path, change: str
) -> None:
    merged.checkout("math", tmp_path / "there")
    merged.checkout("math", tmp_path / "fresh")
    file = max((tmp_path / "there").glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    if change == "missing":
        file.unlink()
    else:
        data[-1] ^= 1
        changed = {"flipped": bytes(data), "cut": data[:-1], "longer": data + b"x"}[change]
        file.write_bytes(changed)
    report = merged.checkout("math", tmp_path / "there", update=True)
    assert report.files == 1
    assert tree_of(tmp_path / "there") == tree_of(tmp_path / "fresh")


def test_shards_of_another_layout_go_where_the_repository_has_them(
    repository: Repository, tmp_path: Path
) -> None:
    repository.add(save_checkpoint(tmp_path / "base", base_tensors(), shards=3))
    repository.add(save_checkpoint(tmp_path / "single", base_tensors(1), shards=1), no_base=True)
    repository.checkout("base", tmp_path / "there")
    report = repository.checkout("single", tmp_path / "there", update=True)
    assert tree_of(tmp_path / "there") == tree_of(tmp_path / "single")
    assert len([note for note in report.notes if note.startswith("removed model-")]) == 3


def test_weights_that_are_nowhere_else_stop_the_update(merged: Repository, tmp_path: Path) -> None:
    merged.checkout("math", tmp_path / "there")
    stranger = tmp_path / "there" / "pytorch_model.bin"
    stranger.write_bytes(b"somebody's only copy")
    before = stamps(tmp_path / "there")
    with pytest.raises(BadTarget, match=r"holds pytorch_model\.bin"):
        merged.checkout("base", tmp_path / "there", update=True)
    assert stamps(tmp_path / "there") == before


def test_other_files_stay_and_are_named(merged: Repository, tmp_path: Path) -> None:
    merged.checkout("math", tmp_path / "there")
    (tmp_path / "there" / "notes.txt").write_text("mine")
    report = merged.checkout("base", tmp_path / "there", update=True)
    assert report.notes == ("notes.txt is none of the commit's, and stays",)
    assert (tmp_path / "there" / "notes.txt").read_text() == "mine"


def test_a_run_that_was_cut_off_is_finished_by_the_next(
    merged: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged.checkout("base", tmp_path / "there")
    merged.checkout("math", tmp_path / "fresh")
    real, calls = os.replace, []

    def dies(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            # As a kill leaves it: the temporary file stays.
            shutil.copy(source, f"{source}.mergegit")
            raise KeyboardInterrupt
        real(source, target)

    (tmp_path / "there" / "config.json").write_text("{}")
    (tmp_path / "there" / "README.md").unlink(missing_ok=True)
    for file in (tmp_path / "there").glob("*.safetensors"):
        file.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(writer.os, "replace", dies)
        with pytest.raises(KeyboardInterrupt):
            merged.checkout("math", tmp_path / "there", update=True)
    merged.checkout("math", tmp_path / "there", update=True)
    assert tree_of(tmp_path / "there") == tree_of(tmp_path / "fresh")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_symbolic_links_lead_nowhere(merged: Repository, tmp_path: Path, kind: str) -> None:
    merged.checkout("math", tmp_path / "there")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "config.json").write_text("mine")
    if kind == "file":
        (tmp_path / "there" / "config.json").unlink()
        (tmp_path / "there" / "config.json").symlink_to(outside / "config.json")
        target = tmp_path / "there"
    else:
        target = tmp_path / "link"
        target.symlink_to(outside)
    with pytest.raises(BadTarget):
        merged.checkout("base", target, update=True)
    assert (outside / "config.json").read_text() == "mine"


def test_a_directory_that_is_not_there_is_not_updated(merged: Repository, tmp_path: Path) -> None:
    with pytest.raises(BadTarget, match="is no directory to update"):
        merged.checkout("math", tmp_path / "nowhere", update=True)


def test_a_damaged_block_leaves_the_file_as_it_was(merged: Repository, tmp_path: Path) -> None:
    merged.checkout("base", tmp_path / "there")
    for pack in merged.store.location.packs.glob("*.pack"):
        data = bytearray(pack.read_bytes())
        data[len(data) // 3 :] = bytes(len(data) - len(data) // 3)
        pack.chmod(0o644)
        pack.write_bytes(data)
    merged.store.forget()
    before = tree_of(tmp_path / "there")
    with pytest.raises(Damaged):
        merged.checkout("prose", tmp_path / "there", update=True)
    # Some files may be new by then; none is cut off, and nothing temporary stays.
    assert set(tree_of(tmp_path / "there")) == set(before)
