"""A process that dies while it opens the catalog misleads nobody who opens it as well."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from mergegit.storage.catalog import Catalog, PackFile
from mergegit.storage.pack import Header, Kind
from tests.faults.shim import Fault, Operation, calls_of, environment
from tests.faults.shim import Kind as Fate

OPEN = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from mergegit.storage.catalog import Catalog
print("opening", flush=True)
print(Catalog(Path(sys.argv[1])).counts()["objects"], flush=True)
"""
ROOT = Path(__file__).parents[2]


def enter(catalog: Catalog, number: int) -> None:
    """A pack with one object."""
    pack = PackFile(number.to_bytes(16, "big").hex(), 1000)
    catalog.enter({pack: [(Header(Kind.OBJECT, number.to_bytes(32, "big"), 10, 10), 144)]})


def opening(path: Path, variables: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OPEN, path, ROOT],
        stdout=subprocess.PIPE,
        text=True,
        env=variables,
    )


def state_of(process: subprocess.Popen[str]) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for(process: subprocess.Popen[str], state: str) -> None:
    deadline = time.monotonic() + 60
    while state_of(process) != state:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(params=[5, 6])
def path(request: pytest.FixtureRequest, memory: Path) -> Path:
    """A catalog with some objects; LMDB's newest state is in either of its two places."""
    with closing(Catalog(memory / "catalog")) as catalog:
        for number in range(request.param):
            enter(catalog, number + 1)
    return memory / "catalog"


def test_who_waits_for_a_process_that_dies_sees_the_newest_state(
    path: Path, library: Path, memory: Path
) -> None:
    with closing(Catalog(path)) as catalog:
        before = catalog.counts()["objects"]
    with opening(path, environment(library, path, memory / "log")) as undisturbed:
        assert undisturbed.communicate()[0] == f"opening\n{before}\n"
    names = [(call.operation, Path(call.path).name) for call in calls_of(memory / "log")]
    point = names.index((Operation.OPEN, "data.mdb"))  # what all share is set up, but not filled
    fault = Fault(Fate.HALT, point)
    with opening(path, environment(library, path, memory / "log", fault)) as dying:
        wait_for(dying, "T")
        with opening(path) as waiting:
            assert waiting.stdout is not None
            assert waiting.stdout.readline() == "opening\n"
            time.sleep(0.3)
            assert waiting.poll() is None, "it waits for the other"
            dying.kill()
            assert waiting.communicate()[0] == f"{before}\n"
    with closing(Catalog(path)) as catalog:
        enter(catalog, 99)
        assert catalog.counts()["objects"] == before + 1
