"""`fsck` beyond the packs: the catalog, records that nobody reads, logs, and refs that are lost."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import closing

from mergegit import Repository
from mergegit.storage.catalog import Catalog, PackFile
from mergegit.storage.pack import HEADER, PREAMBLE, scan
from tests.repository.damage import flip, records_of
from tests.repository.test_checking import texts


def test_damaged_pages_of_the_catalog_are_one_problem_with_the_way_out(merged: Repository) -> None:
    root = merged.store.location.root
    record = records_of(merged, "commit")[-1]
    merged.close()
    file = root / "catalog" / "data.mdb"
    data = file.read_bytes()
    for start in range(0, len(data), 4096):
        if record.header.key in data[start : start + 4096]:
            flip(file, start + 12)  # the bounds of every page that has it, or had it before
    with Repository.open(root.parent) as reopened:
        (problem,) = reopened.fsck().problems
    assert "the catalog is damaged: page" in problem.what
    assert "fsck --rebuild-catalog" in problem.what
    Repository.rebuild_catalog(root.parent)
    with Repository.open(root.parent) as reopened:
        assert reopened.fsck().is_clean


def test_a_damaged_entry_of_the_catalog_is_a_problem_of_the_catalog(merged: Repository) -> None:
    root = merged.store.location.root
    record = records_of(merged, "commit")[-1]
    merged.close()
    file = root / "catalog" / "data.mdb"
    for found in re.finditer(re.escape(record.header.key), file.read_bytes()):
        flip(file, found.end() + 4)  # wherever it is, or was before
    with Repository.open(root.parent) as reopened:
        (problem,) = reopened.fsck().problems
    assert "the catalog" in problem.what
    assert "can't be read" in problem.what


def test_an_entry_that_the_pack_does_not_confirm_is_a_problem(merged: Repository) -> None:
    """Sound by itself, and yet not what the pack says of itself."""
    pack = records_of(merged, "commit")[0].pack
    records = [(header, offset + 1) for header, offset in scan(pack)]
    merged.store.catalog.enter({PackFile(pack.stem, pack.stat().st_size): records})
    assert any("the catalog is wrong about" in text for text in texts(merged.fsck()))


def test_a_catalog_of_before_checksums_is_a_note(merged: Repository) -> None:
    root = merged.store.location.root
    packs = {path.stem: list(scan(path)) for path in merged.store.location.packs.glob("*.pack")}
    merged.close()
    shutil.rmtree(root / "catalog")
    with closing(Catalog(root / "catalog")) as catalog:
        with catalog._begin(write=True) as txn:
            txn.delete(b"sealed", db=catalog._meta)
        catalog._sealed = False
        for name, records in packs.items():
            length = (root / "packs" / f"{name}.pack").stat().st_size
            catalog.enter({PackFile(name, length): records})
    with Repository.open(root.parent) as reopened:
        report = reopened.fsck()
        assert report.is_clean
        (note,) = report.notes
    assert "without checksums" in note
    Repository.rebuild_catalog(root.parent)
    with Repository.open(root.parent) as reopened:
        assert reopened.fsck().notes == []


def test_a_record_that_is_stored_twice_is_checked_in_both_places(merged: Repository) -> None:
    """A catalog that is made anew may take the one that nobody reads now."""
    packs = merged.store.location.packs
    before = set(packs.glob("*.pack"))
    record = next(r for r in records_of(merged, "raw") if len(list(scan(r.pack))) > 1)
    payload = record.pack.read_bytes()[record.offset :][: record.header.length]
    with merged.store.transaction() as transaction:
        transaction.copy_record(record.header, payload)
        transaction.publish()
    (unread,) = set(packs.glob("*.pack")) - before
    assert merged.fsck().is_clean
    flip(unread, PREAMBLE.size + HEADER.size + 1)
    assert any(unread.stem in text for text in texts(merged.fsck()))


def test_a_log_that_can_not_be_read_is_a_problem_that_names_the_file(merged: Repository) -> None:
    log = merged.store.location.logs / "heads" / "math.log"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(["nonsense\n", *lines]))
    (problem,) = merged.fsck().problems
    assert os.fspath(log) in problem.what
    assert "remove the line" in problem.what
    assert problem.commits == ("math",)


def test_a_ref_whose_file_is_lost_is_a_note_that_says_where_it_stood(merged: Repository) -> None:
    stood = merged.resolve("math")
    (merged.store.location.refs / "heads" / "math").unlink()
    report = merged.fsck()
    assert report.is_clean
    (note,) = report.notes
    assert "math" in note
    assert stood.hex()[:10] in note


def test_a_ref_that_stands_elsewhere_than_its_log_says_is_a_note(merged: Repository) -> None:
    other = merged.resolve("code")
    (merged.store.location.refs / "heads" / "math").write_text(f"{other.hex()}\n")
    (note,) = merged.fsck().notes
    assert f"math stands at {other.hex()[:10]}" in note


def test_refs_that_moved_and_went_are_no_note(merged: Repository) -> None:
    merged.reset_branch("math", "code")
    merged.rename_branch("math", "x/y")
    merged.delete_branch("x/y")
    merged.create_tag("v1", "code")
    assert merged.fsck().notes == []
