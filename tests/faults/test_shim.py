"""The layer sees every call by which Python and LMDB write, and does what it is told."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from mergegit.storage.catalog import Catalog
from tests.families import Family
from tests.faults.cases import CASES, directory_of, filled, prepare
from tests.faults.conftest import Driver, armed, command
from tests.faults.disk import EVERYTHING, LOST, Disk
from tests.faults.shim import Call, Fault, Kind, Operation, calls_of, environment
from tests.trees import tree_of

MAPPED = "lock.mdb"
"""LMDB keeps its readers' places there, in memory that processes share; it means nothing after."""


@pytest.mark.parametrize("name", CASES)
def test_the_log_of_a_command_tells_every_byte_that_it_wrote(
    name: str, driver: Driver, tiny_family: Family, memory: Path
) -> None:
    """What the calls did, done again from the log alone, gives the very same files. A write that
    the layer did not see, of Python or of LMDB, would be missing."""
    case, work = CASES[name], memory / "work"
    prepare(case, driver, tiny_family, work)
    disk = Disk(work)
    line = filled(case.line, tiny_family)
    done = driver.steps(
        armed(work, memory / "log", Fault()), command(line, directory_of(line, work))
    )
    assert done[-1]["code"] == 0
    disk.follow(calls_of(memory / "log"))
    disk.write(memory / "again", EVERYTHING)
    found, expected = tree_of(memory / "again"), tree_of(work)
    assert found.keys() == expected.keys()
    for path, data in expected.items():
        assert found[path] == data or path.endswith(MAPPED), path


def calls_of_process(
    library: Path, memory: Path, script: str, fault: Fault | None = None
) -> tuple[int, list[Call]]:
    """A process of its own that is under the layer from its start: exit code and calls."""
    root = memory / "root"
    root.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=root,
        env=environment(library, root, memory / "log", fault),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, list(calls_of(memory / "log"))


LMDB = """
import lmdb
environment = lmdb.open("catalog", map_size=1 << 20)
with environment.begin(write=True) as transaction:
    transaction.put(b"key", b"value" * 100)
"""


def test_lmdb_writes_then_syncs_then_writes_durably(library: Path, memory: Path) -> None:
    """No map is written to, and no sync is left out: pages are written and synced before the page
    that names them is, which is written to a file that is open for durable writes."""
    code, calls = calls_of_process(library, memory, LMDB)
    assert code == 0
    data = [call for call in calls if call.path.endswith("data.mdb")]
    *_, pages, sync, meta = data
    assert pages.operation is Operation.WRITE
    assert b"value" * 100 in b"".join(call.data for call in data if call.data)
    assert sync.operation is Operation.SYNC
    assert (meta.operation, bool(meta.flags)) == (Operation.WRITE, True)
    assert len(meta.data) < 512, "a page that names others is written inside one sector"


def test_the_catalog_is_opened_so(tmp_path: Path) -> None:
    """As above: with LMDB's syncs and locks, and without a map that is written to."""
    with closing(Catalog(tmp_path / "catalog")) as catalog:
        flags = catalog._env.flags()
    assert {name for name in ("sync", "metasync", "lock") if flags[name]} == {
        "sync", "metasync", "lock"
    }  # fmt: skip
    assert not flags["writemap"]
    assert not flags["map_async"]


PLAIN = """
import os
with open("a", "wb", buffering=0) as file:
    file.write(b"x" * 1000)
    os.fsync(file.fileno())
os.rename("a", "b")
"""


@pytest.mark.parametrize(
    ("kind", "length"), [(Kind.KILL, 0), (Kind.TEAR, 500)], ids=["before", "in the middle"]
)
def test_a_process_is_killed_at_a_write(
    kind: Kind, length: int, library: Path, memory: Path
) -> None:
    code, _ = calls_of_process(library, memory, PLAIN, Fault(kind, 1))
    assert code == -signal.SIGKILL
    assert (memory / "root" / "a").stat().st_size == length


def test_a_call_fails_as_told_and_changes_nothing(library: Path, memory: Path) -> None:
    fault = Fault(Kind.FAIL, 3, errno.EIO)
    code, calls = calls_of_process(library, memory, PLAIN, fault)
    assert code == 1
    assert (calls[3].operation, calls[3].error) == (Operation.RENAME, errno.EIO)
    assert os.listdir(memory / "root") == ["a"]


def test_a_full_disk_stays_full(library: Path, memory: Path) -> None:
    script = """
import os
for name in ("a", "b"):
    try:
        open(name, "wb", buffering=0).write(bytes(1000))
    except OSError as error:
        assert error.errno == 28
    else:
        assert os.stat(name).st_size == 500
os.unlink("a")
assert os.statvfs(".").f_bavail == 0
"""
    code, calls = calls_of_process(library, memory, script, Fault(Kind.SHORTEN, 1, errno.ENOSPC))
    assert code == 0
    assert [call.operation.name for call in calls] == ["OPEN", "WRITE", "OPEN", "UNLINK"]


def test_after_a_power_cut_what_was_not_synced_may_be_gone(library: Path, memory: Path) -> None:
    root = memory / "root"
    root.mkdir()
    disk = Disk(root)
    code, calls = calls_of_process(library, memory, PLAIN)
    assert code == 0
    disk.follow(calls)
    disk.write(memory / "lost", LOST)
    assert tree_of(memory / "lost") == {}, "its name was never synced"


def test_after_a_power_cut_what_was_synced_is_there(library: Path, memory: Path) -> None:
    root = memory / "root"
    root.mkdir()
    disk = Disk(root)
    sync = "os.fsync(os.open('.', os.O_RDONLY))\nopen('b', 'ab', buffering=0).write(b'more')"
    code, calls = calls_of_process(library, memory, PLAIN + sync)
    assert code == 0
    disk.follow(calls)
    disk.write(memory / "lost", LOST)
    assert tree_of(memory / "lost") == {"b": b"x" * 1000}
    disk.write(memory / "kept", EVERYTHING)
    assert tree_of(memory / "kept") == {"b": b"x" * 1000 + b"more"}
