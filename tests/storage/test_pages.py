"""The pages of an LMDB file: sound ones pass, whatever was done to them; damaged ones do not."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from mergegit.storage.pages import Unsound, check, check_beginning

PAGE = 4096


@contextmanager
def environment(path: Path) -> Iterator[lmdb.Environment]:
    environment = lmdb.open(str(path), map_size=1 << 28, max_dbs=8)
    try:
        yield environment
    finally:
        environment.close()


def fill(path: Path, rounds: int, seed: int = 0) -> None:
    """Transactions that put and delete, short values and long ones, in several tables."""
    draw = random.Random(seed)
    with environment(path) as env:
        tables = [env.open_db(name) for name in (b"one", b"two", b"three")]
        there: list[tuple[bytes, lmdb._Database]] = []
        for _ in range(rounds):
            with env.begin(write=True) as txn:
                for _ in range(60):
                    key, table = draw.randbytes(32), draw.choice(tables)
                    txn.put(key, draw.randbytes(draw.choice((24, 40, 200, 9000))), db=table)
                    there.append((key, table))
                for _ in range(draw.randrange(50)):
                    key, table = there.pop(draw.randrange(len(there)))
                    txn.delete(key, db=table)


def newest(path: Path) -> int:
    with environment(path) as env:
        number: int = env.info()["last_txnid"]
        return number


def look(path: Path) -> None:
    assert check(path / "data.mdb", newest_of(path / "data.mdb"))


def damage_of(path: Path) -> str:
    """What is found; nothing for damage of a page that is not in use."""
    try:
        look(path)
    except Unsound as error:
        return str(error)
    return ""


def newest_of(file: Path) -> int:
    """The newest state's number, from the file itself."""
    data = file.read_bytes()[: 2 * PAGE]
    return max(struct.unpack_from("<Q", data, PAGE * n + 16 + 24 + 96 + 8)[0] for n in range(2))


@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 40])
def test_what_lmdb_writes_is_sound(rounds: int, tmp_path: Path) -> None:
    fill(tmp_path, rounds)
    assert newest(tmp_path) == newest_of(tmp_path / "data.mdb")
    check_beginning(tmp_path / "data.mdb")
    look(tmp_path)


def test_a_state_is_checked_while_others_write(tmp_path: Path) -> None:
    fill(tmp_path, 5)
    with environment(tmp_path) as env:
        table = env.open_db(b"one")
        with env.begin() as txn:
            assert check(tmp_path / "data.mdb", txn.id())
            for number in range(3):
                with env.begin(write=True) as other:
                    other.put(bytes([number]), b"x" * 5000, db=table)
            assert not check(tmp_path / "data.mdb", txn.id()), "it is gone from the file by now"


def test_an_empty_file_is_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").touch()
    check_beginning(tmp_path / "data.mdb")


def test_a_file_of_another_version_of_lmdb_passes(tmp_path: Path) -> None:
    """How its pages look is not known here: LMDB will say whether it can read it."""
    fill(tmp_path, 2)
    file = tmp_path / "data.mdb"
    data = bytearray(file.read_bytes())
    for page in range(2):
        data[page * PAGE + 20] = 2
    data[2 * PAGE :] = bytes(len(data) - 2 * PAGE)
    file.write_bytes(data)
    check_beginning(file)
    assert check(file, 1)


def pages_of(file: Path) -> list[int]:
    """The pages of trees, of the newest state or an older one."""
    data = file.read_bytes()
    return [
        n for n in range(2, len(data) // PAGE)
        if struct.unpack_from("<Q", data, n * PAGE)[0] == n
        and struct.unpack_from("<H", data, n * PAGE + 10)[0] in (1, 2)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "offset", "data"),
    [
        ("is not a page of a tree", 0, b"\xff\xff"),
        ("is not a page of a tree", 10, b"\x04\x00"),
        ("has no sound bounds", 12, b"\x0f\x00"),
        ("has no sound bounds", 14, b"\xff\xff"),
        ("has nodes outside of itself", 16, b"\xff\xff"),
        ("has nodes outside of itself", 16, b"\x00\x00"),
    ],
)
def test_a_damaged_page_is_found(what: str, offset: int, data: bytes, tmp_path: Path) -> None:
    """In every page that is in use, and in no other."""
    fill(tmp_path, 4)
    file = tmp_path / "data.mdb"
    whole = file.read_bytes()
    found = 0
    for page in pages_of(file):
        at = page * PAGE + offset
        file.write_bytes(whole[:at] + data + whole[at + len(data) :])
        found += what in damage_of(tmp_path)
    assert found >= 5


def test_a_tree_that_leads_back_to_itself_is_not_followed_for_ever(tmp_path: Path) -> None:
    fill(tmp_path, 30)
    file = tmp_path / "data.mdb"
    whole = bytearray(file.read_bytes())
    branches = [n for n in pages_of(file) if whole[n * PAGE + 10] == 1]
    assert branches
    for page in branches:
        data = bytearray(whole)
        first = page * PAGE + struct.unpack_from("<H", data, page * PAGE + 16)[0]
        data[first : first + 6] = page.to_bytes(6, "little")
        file.write_bytes(data)
        if "named twice" in damage_of(tmp_path):
            return
    pytest.fail("no branch was in use")


def test_pages_that_changed_places_are_found(tmp_path: Path) -> None:
    fill(tmp_path, 10)
    file = tmp_path / "data.mdb"
    data = bytearray(file.read_bytes())
    one, two = pages_of(file)[-2:]
    for page, other in ((one, two), (two, one)):
        whole = file.read_bytes()
        data[page * PAGE : (page + 1) * PAGE] = whole[other * PAGE : (other + 1) * PAGE]
    file.write_bytes(data)
    with pytest.raises(Unsound):
        look(tmp_path)


@pytest.mark.parametrize("length", [0, 10, 100, PAGE, 2 * PAGE, 3 * PAGE])
def test_a_file_that_is_cut_off_is_found(length: int, tmp_path: Path) -> None:
    fill(tmp_path, 4)
    file = tmp_path / "data.mdb"
    number = newest_of(file)
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(Unsound):
        check(file, number)
    if length:
        with pytest.raises(Unsound):
            check_beginning(file)


@pytest.mark.parametrize("offset", [0, 10, 16, 16 + 24, 16 + 24 + 48 + 40])
def test_a_beginning_that_leads_astray_is_found(offset: int, tmp_path: Path) -> None:
    """Number, kind, magic, size of pages, and the root of the tables."""
    fill(tmp_path, 4)
    file = tmp_path / "data.mdb"
    data = bytearray(file.read_bytes())
    for page in range(2):
        data[page * PAGE + offset : page * PAGE + offset + 2] = b"\x77\x77"
    file.write_bytes(data)
    with pytest.raises(Unsound):
        check_beginning(file)


def test_any_damage_is_found_or_harms_nothing(tmp_path: Path) -> None:
    """Whatever passes, LMDB reads to the end without a crash."""
    (tmp_path / "whole").mkdir()
    fill(tmp_path / "whole", 12)
    whole = (tmp_path / "whole" / "data.mdb").read_bytes()
    draw = random.Random(0)
    passed = 0
    (tmp_path / "work").mkdir()
    for _ in range(300):
        data = bytearray(whole)
        at = draw.randrange(len(data))
        data[at : at + draw.choice((1, 1, 8, 500))] = b""
        data[at:at] = draw.randbytes(len(whole) - len(data))
        file = tmp_path / "work" / "data.mdb"
        file.write_bytes(data)
        try:
            check_beginning(file)
            if not check(file, newest_of(file)):
                continue
        except Unsound:
            continue
        passed += 1
        with environment(tmp_path / "work") as env:
            for name in (b"one", b"two", b"three"):
                table = env.open_db(name, create=False)
                with env.begin() as txn:
                    assert sum(1 for _ in txn.cursor(table)) == txn.stat(table)["entries"]
    assert passed >= 10
