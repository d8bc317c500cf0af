"""Whatever is damaged, nothing wrong is ever handed out.

Any run of bytes of any file of a repository is flipped, zeroed, overwritten with other bytes of the
file, repeated, or cut off, or the file is removed. Then every ref is checked out, and experts are
merged under a budget: what comes is right, or an error that says where the damage is. What the
damage does not concern stays usable. `fsck` finds it.

MERGEGIT_DAMAGE says how many damages are tried.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mergegit import Repository
from mergegit.storage.pack import Header
from tests.families import EXPERTS, Family
from tests.faults.conftest import Driver, command
from tests.faults.contents import contents
from tests.memory import directory_in_memory
from tests.repository.damage import records

DAMAGES: Final = int(os.environ.get("MERGEGIT_DAMAGE", "50"))
REFS: Final = ("base", *EXPERTS, "merged", "v1")
MERGE: Final = ("merge", "math", "prose", "--base", "base", "--budget", "70%", "-b", "again")


@dataclass(frozen=True, slots=True)
class Damage:
    """What happens to a file, at which parts of its length."""

    what: str
    file: float
    start: float
    length: float
    other: float

    def apply(self, root: Path) -> tuple[str, bytes, bytes | None]:
        """Damage a repository; the file, and its bytes before and after."""
        files = sorted(
            path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()
        )
        name = files[int(self.file * len(files))]
        path = root / name
        before = path.read_bytes()
        after = self.of(before)
        os.chmod(path, 0o644)
        if after is None:
            path.unlink()
        else:
            path.write_bytes(after)
        return name, before, after

    def of(self, data: bytes) -> bytes | None:
        size = len(data.rstrip(b"\0"))  # the file of the catalog ends with nothing
        start, other = int(self.start * size), int(self.other * size)
        # Short runs and long ones: single bytes are as telling as half a file.
        end = min(size, start + max(1, int(size**self.length)))
        run = data[start:end]
        match self.what:
            case "flip":
                return data[:start] + bytes(byte ^ 1 << end % 8 for byte in run) + data[end:]
            case "zero":
                return data[:start] + bytes(len(run)) + data[end:]
            case "copy":
                return (data[:other] + run + data[other + len(run) :])[: max(size, 1)]
            case "repeat":
                return data[:end] + run + data[end:]
            case "drop":
                return data[:start] + data[end:]
            case "truncate":
                return data[:start]
            case _:
                return None


part = st.floats(0, 1, exclude_max=True)
damages = st.builds(
    Damage,
    what=st.sampled_from(("flip", "zero", "copy", "repeat", "drop", "truncate", "delete")),
    file=part,
    start=part,
    length=part,
    other=part,
)


@dataclass(frozen=True, slots=True)
class Sound:
    """A repository without damage, and what it holds."""

    root: Path
    trees: dict[str, dict[str, str | None]]
    again: str | None
    """The weights of one more merge."""
    needs: dict[str, set[bytes]]
    """The objects and blocks that the checkout of each ref may read."""
    places: list[tuple[str, int, Header]]
    """Every record: the name of its pack's file, and the offset of its payload."""


def needed(repository: Repository, ref: str) -> set[bytes]:
    """Ids of all that a commit's checkout may read, with the bases of deltas."""
    commit_id = repository.resolve(ref)
    manifest = repository.manifest(ref)
    keys: set[bytes] = {commit_id, repository.commit(ref).manifest, *manifest.tensor_ids()}
    blocks = {b for t in manifest.tensor_ids() for b in repository.tensor(t).blocks()}
    forms = repository.store.catalog.forms_of(blocks)
    return keys | blocks | {form.base for found in forms.values() for form in found}


@pytest.fixture(scope="module")
def sound(plain_driver: Driver, tiny_family: Family) -> Iterator[Sound]:
    with directory_in_memory() as memory:
        path = memory / "repository"
        plain_driver.run(memory, ("init", str(path)))
        plain_driver.run(
            path,
            *(("add", str(p)) for p in (tiny_family.base, *tiny_family.experts)),
            ("add", str(tiny_family.experts[2]), "--name", "math"),
            ("merge", "math", "code", "--base", "base", "--budget", "50%", "-b", "merged"),
            ("tag", "v1", "math"),
            ("branch", "gone", "merged"),
            ("branch", "-d", "gone"),
            ("plan", *MERGE[1:-2]),
        )
        trees = {}
        for ref in REFS:
            plain_driver.run(path, ("checkout", ref, str(memory / "out")))
            trees[ref] = contents(memory / "out")
            shutil.rmtree(memory / "out")
        shutil.copytree(path, memory / "other")
        plain_driver.run(memory / "other", MERGE, ("checkout", "again", str(memory / "out")))
        again = contents(memory / "out")["model.safetensors"]
        with Repository.open(path) as repository:
            needs = {ref: needed(repository, ref) for ref in REFS}
            places = [(r.pack.name, r.offset, r.header) for r in records(repository)]
        yield Sound(path, trees, again, needs, places)


def damaged_keys(sound: Sound, name: str, before: bytes, after: bytes | None) -> set[bytes]:
    """The ids of the records whose payloads are not what they were."""
    keys = set()
    for pack, offset, header in sound.places:
        if name == f"packs/{pack}":
            end = offset + header.length
            if after is None or before[offset:end] != after[offset:end]:
                keys.add(header.key)
    return keys


def check_damage(sound: Sound, driver: Driver, memory: Path, damage: Damage) -> None:
    work, out = memory / "work", memory / "out"
    shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(sound.root, work)
    name, before, after = damage.apply(work / ".mergegit")
    where = f"{damage}: {name}"
    is_pack = name.startswith("packs/")
    if is_pack and after is not None and len(after) >= 16:
        # what a pack begins with is looked at when it is opened
        whole = before[:16] == after[:16]
    else:
        whole = not is_pack
    hit = damaged_keys(sound, name, before, after)
    steps = []
    for ref in REFS:
        steps.append(command(("checkout", ref, str(out / ref)), work))
        steps.append({"step": "contents", "path": out / ref})
    steps += [
        command(("fsck",), work),
        command(("reflog",), work),
        command(MERGE, work),
        command(("checkout", "again", str(out / "again")), work),
        {"step": "contents", "path": out / "again"},
    ]
    answer = driver.ask(*steps)
    assert "done" in answer, f"{where}: {answer}"
    *seen, fsck, reflog, merge, checkout, again = answer["done"]
    failed = False
    for ref, done, tree in zip(REFS, seen[::2], seen[1::2], strict=True):
        text = f"{where}: {ref}: {done['out']}{done['err']}"
        if done["code"] == 0:
            assert tree == sound.trees[ref], f"{text}: WRONG BYTES"
            continue
        failed = True
        assert tree == {}, text
        told(done, text)
        if is_pack:
            assert not whole or hit & sound.needs[ref], f"{text}: not concerned"
            assert Path(name).stem in done["err"], text
    if reflog["code"]:
        failed = True
        told(reflog, where)
    if merge["code"] == 0 and checkout["code"] == 0:
        assert again["model.safetensors"] == sound.again, f"{where}: WRONG MERGE"
    else:
        failed = True
        told(merge if merge["code"] else checkout, where)
    text = f"{where}: fsck: {fsck['out']}{fsck['err']}"
    assert "Traceback" not in fsck["err"], text
    assert fsck["code"] in (0, 1), text
    if name.startswith("refs/") and after is None:
        # No file tells that there was another, but its log does; an interrupted command leaves the
        # same, so that it is no more than a note.
        assert name.split("/", 2)[2] in fsck["err"], text
    elif failed or (is_pack and after != before):
        assert fsck["code"] == 1, text


def told(done: dict[str, Any], text: str) -> None:
    assert done["code"] == 1, text
    assert "Traceback" not in done["err"], f"{text}\n{done['err']}"
    *_, error, hint = done["err"].splitlines()
    assert error.startswith("error: "), text
    assert hint.startswith(" hint: "), text


def test_damage_is_found_and_never_handed_out(sound: Sound, plain_driver: Driver) -> None:
    with directory_in_memory() as memory:

        @settings(
            max_examples=DAMAGES,
            deadline=None,
            derandomize=DAMAGES <= 100,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(damages)
        def check(damage: Damage) -> None:
            check_damage(sound, plain_driver, memory, damage)

        check()
