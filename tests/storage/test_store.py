"""The store: all of a command or nothing, each thing once, and never a wrong byte."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mergegit.encoding import encode, hash_block, hash_object
from mergegit.errors import Damaged, MergegitError, NoSpace, RefConflict
from mergegit.objects import BlockId, CommitId, Manifest, ManifestId, PlanId, Tensor, TensorId
from mergegit.storage import transaction as transaction_module
from mergegit.storage.catalog import Catalog, StoredForm
from mergegit.storage.location import Location
from mergegit.storage.pack import scan
from mergegit.storage.prepared import raw_block
from mergegit.storage.reader import ByteCount
from mergegit.storage.refs import Refs
from mergegit.storage.store import DamagedBlock, Store
from mergegit.storage.workspace import sweep
from tests.storage.samples import an_id, commit, flip, move, publish_blocks, put, some_bytes


def pack_files(location: Location) -> list[Path]:
    return sorted(location.packs.glob("*.pack"))


def is_untouched(location: Location) -> bool:
    """Whether nothing is left of any command."""
    return os.listdir(location.packs) == os.listdir(location.temporary) == []


def bf16_pair(seed: int = 0, elements: int = 3000) -> tuple[bytes, bytes]:
    """A block of a fine-tune and of its base, in bf16."""
    random_numbers = np.random.default_rng(seed)
    base = (random_numbers.standard_normal(elements) * 0.02).astype(np.float32)
    expert = base + random_numbers.standard_normal(elements).astype(np.float32) * np.float32(1e-3)
    halves = ((x.view(np.uint32) >> np.uint32(16)).astype(np.uint16) for x in (expert, base))
    one, other = (half.tobytes() for half in halves)
    return one, other


def read_some(store: Store, block: BlockId, layers: int, base: bytes) -> bytes:
    """The delta of a block as far as its first layers tell."""
    data, is_delta = store.read_layers(block, layers, hash_block(base), base, 0.0)
    assert is_delta
    return bytes(data)


# -- blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "data"),
    [
        ("BF16", some_bytes(1, 5000)),
        ("F32", bytes(4096)),
        ("U8", b"\0"),
        ("I64", bytes(8000)),
        ("F4", some_bytes(2, 3)),
        ("BOOL", b"\1\0" * 999),
    ],
)
def test_a_block_comes_back_as_it_was(dtype: str, data: bytes, store: Store) -> None:
    with store.transaction() as transaction:
        block = put(store, transaction, data, dtype)
        transaction.publish()
    assert block == hash_block(data)
    assert store.read_block(block) == data


def test_a_block_against_a_base_comes_back_as_it_was_and_takes_less(store: Store) -> None:
    expert, base = bf16_pair()
    (base_id,) = publish_blocks(store, base)
    with store.transaction() as transaction:
        block = put(store, transaction, expert, base=base)
        stored = transaction.block_bytes
        transaction.publish()
    (form,) = store.forms([block])[block]
    assert form.base == base_id
    assert form.nbytes == stored < len(expert)
    assert store.read_block(block) == expert


def test_what_is_read_is_counted_in_stored_bytes(store: Store) -> None:
    data = some_bytes(1)
    (block,) = publish_blocks(store, data)
    count = ByteCount()
    store.read_block(block, count=count)
    assert count.total == len(data)


def test_compressed_blocks_are_counted_as_they_are_stored(store: Store) -> None:
    with store.transaction() as transaction:
        block = put(store, transaction, bytes(100_000), "I32")
        stored = transaction.block_bytes
        transaction.publish()
    count = ByteCount()
    assert store.read_block(block, count=count) == bytes(100_000)
    assert count.total == stored < 1000


def test_threads_read_blocks_together(store: Store) -> None:
    contents = [some_bytes(number) for number in range(8)]
    blocks = publish_blocks(store, *contents)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: store.read_block(blocks[i % 8]), range(200)))
    assert found == [contents[i % 8] for i in range(200)]


def test_a_block_that_is_not_there_is_damage(store: Store) -> None:
    (here,) = publish_blocks(store, b"12")
    gone = hash_block(b"gone")
    with pytest.raises(Damaged, match=gone.hex()[:12]):
        store.read_block(gone)
    with pytest.raises(Damaged, match=gone.hex()[:12]):
        store.forms([here, gone])


# -- objects --------------------------------------------------------------------------------------


def a_tensor(seed: int = 0) -> Tensor:
    return Tensor("U8", (4,), some_bytes(seed, 32))


def test_objects_come_back_as_they_were(store: Store) -> None:
    with store.transaction() as transaction:
        tensor_id = transaction.write_tensor(a_tensor())
        manifest = Manifest({"w": tensor_id}, (), {})
        manifest_id = transaction.write_manifest(manifest)
        commit_id = transaction.write_commit(commit(recipe={"method": "ties"}))
        transaction.publish()
    assert store.tensor(tensor_id) == a_tensor()
    assert store.manifest(manifest_id) == manifest
    assert store.commit(commit_id) == commit(recipe={"method": "ties"})
    assert store.object(tensor_id) == a_tensor()
    assert store.object_bytes(tensor_id) == encode(a_tensor())
    assert tensor_id == hash_object(encode(a_tensor()))


def test_a_large_object_comes_back_as_it_was(store: Store) -> None:
    manifest = Manifest({f"layer.{i}": TensorId(an_id(i % 7)) for i in range(3000)}, (), {})
    with store.transaction() as transaction:
        manifest_id = transaction.write_manifest(manifest)
        transaction.publish()
    assert store.manifest(manifest_id) == manifest


def test_an_object_that_is_not_there_is_damage(store: Store) -> None:
    assert not store.has_object(an_id(1))
    with pytest.raises(Damaged, match=an_id(1).hex()[:12]):
        store.object(an_id(1))


def test_an_object_of_another_kind_is_damage(store: Store) -> None:
    with store.transaction() as transaction:
        tensor_id = transaction.write_tensor(a_tensor())
        transaction.publish()
    for look, kind in (
        (lambda: store.commit(CommitId(tensor_id)), "commit"),
        (lambda: store.manifest(ManifestId(tensor_id)), "manifest"),
        (lambda: store.plan(PlanId(tensor_id)), "plan"),
    ):
        with pytest.raises(Damaged, match=f"is a tensor, not a {kind}"):
            look()


def test_statistics_come_back_as_they_were(store: Store) -> None:
    tensor = TensorId(an_id(1))
    with store.transaction() as transaction:
        transaction.write_statistics(tensor, an_id(2), bytes(1000))
        transaction.write_statistics(tensor, an_id(3), some_bytes(3))
        transaction.publish()
    assert store.read_statistics(tensor, an_id(2)) == bytes(1000)
    assert store.read_statistics(tensor, an_id(3)) == some_bytes(3)
    assert store.read_statistics(tensor, an_id(4)) is None


# -- transactions ---------------------------------------------------------------------------------


def write_some(store: Store, transaction: Any) -> tuple[BlockId, bytes]:
    """A block, a compressed block, an object and statistics; returns the block and the object."""
    block = put(store, transaction, some_bytes(1))
    put(store, transaction, bytes(10_000), "U8")
    object_id = transaction.write_tensor(a_tensor())
    transaction.write_statistics(object_id, an_id(2), some_bytes(5))
    return block, object_id


def test_nothing_is_seen_before_it_is_published(store: Store, location: Location) -> None:
    with store.transaction() as transaction:
        block, object_id = write_some(store, transaction)
        assert store.catalog.forms(block) == []
        assert not store.has_object(object_id)
        assert pack_files(location) == []
        transaction.publish()
    assert store.read_block(block) == some_bytes(1)
    assert store.has_object(object_id)


def test_a_transaction_that_is_not_published_leaves_nothing(
    store: Store, location: Location
) -> None:
    with store.transaction() as transaction:
        block, object_id = write_some(store, transaction)
    assert is_untouched(location)
    assert store.catalog.forms(block) == []
    assert not store.has_object(object_id)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=repr)
def test_a_transaction_that_fails_leaves_nothing(
    error: BaseException, store: Store, location: Location
) -> None:
    def fail() -> None:
        with store.transaction() as transaction:
            write_some(store, transaction)
            raise error

    with pytest.raises(type(error)):
        fail()
    assert is_untouched(location)


def test_a_published_transaction_leaves_no_temporary_files(
    store: Store, location: Location
) -> None:
    with store.transaction() as transaction:
        write_some(store, transaction)
        transaction.publish()
    assert os.listdir(location.temporary) == []
    assert all(path.stat().st_mode & 0o777 == 0o444 for path in pack_files(location))


def test_publishing_nothing_writes_nothing(store: Store, location: Location) -> None:
    with store.transaction() as transaction:
        transaction.publish()
    assert is_untouched(location)
    assert store.catalog.counts()["packs"] == 0


def test_publishing_moves_the_ref(store: Store) -> None:
    with store.transaction() as transaction:
        commit_id = transaction.write_commit(commit())
        transaction.publish(move("main", None, commit_id))
    assert store.refs.read("heads", "main") == commit_id


def test_a_ref_may_move_without_anything_new(store: Store) -> None:
    with store.transaction() as transaction:
        transaction.publish(move("main", None, an_id(1)))
    assert store.refs.read("heads", "main") == an_id(1)


def test_the_loser_of_a_swap_is_told_and_moves_nothing(store: Store) -> None:
    def lose() -> None:
        with store.transaction() as transaction:
            commit_id = transaction.write_commit(commit())
            store.refs.update(move("main", None, an_id(1)))
            transaction.publish(move("main", None, commit_id))

    with pytest.raises(RefConflict):
        lose()
    assert store.refs.read("heads", "main") == an_id(1)


def test_everything_is_there_after_reopening(store: Store, location: Location) -> None:
    with store.transaction() as transaction:
        block, object_id = write_some(store, transaction)
        transaction.publish()
    store.close()
    for read_only in (False, True):
        with closing(Store(location, read_only=read_only)) as again:
            assert again.read_block(block) == some_bytes(1)
            assert again.tensor(TensorId(object_id)) == a_tensor()
            assert again.read_statistics(TensorId(object_id), an_id(2)) == some_bytes(5)


def test_packs_say_themselves_what_is_in_them(store: Store, location: Location) -> None:
    with store.transaction() as transaction:
        block, object_id = write_some(store, transaction)
        transaction.publish()
    keys = {header.key for path in pack_files(location) for header, _ in scan(path)}
    assert keys == {block, object_id, hash_block(bytes(10_000))}


def test_a_full_pack_is_closed_and_the_next_begun(
    store: Store, location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_module, "PACK_BYTES", 4000)
    contents = [some_bytes(number) for number in range(10)]
    blocks = publish_blocks(store, *contents)
    assert len(pack_files(location)) == 3
    assert all(path.stat().st_size < 4000 + 2000 for path in pack_files(location))
    assert [store.read_block(block) for block in blocks] == contents


# -- each thing once ------------------------------------------------------------------------------


def test_a_block_is_stored_once_in_a_transaction(store: Store) -> None:
    with store.transaction() as transaction:
        prepared = store.prepare_block(hash_block(some_bytes(1)), "BF16", some_bytes(1))
        assert transaction.write_block(prepared)
        assert not transaction.write_block(prepared)
        assert transaction.block_bytes == 1024
        transaction.publish()
    assert store.catalog.counts()["blocks"] == 1


def test_a_block_is_stored_once_across_transactions(store: Store, location: Location) -> None:
    publish_blocks(store, some_bytes(1))
    before = pack_files(location)
    with store.transaction() as transaction:
        prepared = store.prepare_block(hash_block(some_bytes(1)), "BF16", some_bytes(1))
        assert not transaction.write_block(prepared)
        assert transaction.block_bytes == 0
        transaction.publish()
    assert pack_files(location) == before


def test_an_object_is_stored_once(store: Store, location: Location) -> None:
    for _ in range(2):
        with store.transaction() as transaction:
            assert transaction.write_tensor(a_tensor()) == transaction.write_tensor(a_tensor())
            transaction.publish()
    (path,) = pack_files(location)
    assert len(list(scan(path))) == 1


def test_statistics_are_stored_once(store: Store, location: Location) -> None:
    for _ in range(2):
        with store.transaction() as transaction:
            for _ in range(2):
                transaction.write_statistics(TensorId(an_id(1)), an_id(2), b"statistics")
            transaction.publish()
    (path,) = pack_files(location)
    assert len(list(scan(path))) == 1


def test_the_same_written_by_two_at_once_is_one_pack(store: Store, location: Location) -> None:
    with store.transaction() as one, store.transaction() as two:
        for transaction in (one, two):
            put(store, transaction, some_bytes(1))
        one.publish()
        two.publish()
    assert len(pack_files(location)) == store.catalog.counts()["packs"] == 1
    assert store.read_block(hash_block(some_bytes(1))) == some_bytes(1)


def test_transactions_side_by_side_do_not_disturb_one_another(
    store: Store, location: Location
) -> None:
    with store.transaction() as one:
        first = put(store, one, some_bytes(1))
        with store.transaction() as two:
            second = put(store, two, some_bytes(2))
        one.publish()
    assert store.read_block(first) == some_bytes(1)
    assert store.catalog.forms(second) == []
    assert len(pack_files(location)) == 1


def _store_blocks(root: Path, worker: int) -> None:
    """Publish blocks of one's own and one that all share, several times."""
    with closing(Store(Location(root))) as store:
        for number in range(4):
            publish_blocks(store, some_bytes(100 + worker * 10 + number), some_bytes(99))


def test_processes_that_write_at_once_lose_nothing(store: Store, location: Location) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_store_blocks, args=(location.root, worker)) for worker in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    seeds = [99, *(100 + worker * 10 + number for worker in range(2) for number in range(4))]
    assert store.catalog.counts()["blocks"] == len(seeds)
    for seed in seeds:
        assert store.read_block(hash_block(some_bytes(seed))) == some_bytes(seed)
    assert os.listdir(location.temporary) == []


def test_a_pack_is_replaced_by_what_was_copied_out_of_it(store: Store, location: Location) -> None:
    kept, left = publish_blocks(store, some_bytes(1), some_bytes(2))
    (path,) = pack_files(location)
    (number,) = store.catalog.packs()
    records = list(scan(path))
    data = path.read_bytes()
    with store.transaction() as transaction:
        for header, offset in records:
            if header.key == kept:
                transaction.copy_record(header, data[offset : offset + header.length])
        assert path.exists()
        transaction.publish(drop={number: [header for header, _ in records]})
    (new,) = pack_files(location)
    assert new != path
    assert store.read_block(kept) == some_bytes(1)
    assert store.catalog.forms(left) == []


def test_a_pack_that_is_written_again_while_it_is_dropped_stays(
    store: Store, location: Location
) -> None:
    """Two packs hold a block; what is copied out of one is the other, name and all."""
    with store.transaction() as one, store.transaction() as two:
        kept = put(store, one, some_bytes(1))
        put(store, one, some_bytes(2))
        one.publish()
        two.write_block(raw_block(kept, "BF16", some_bytes(1)))
        two.publish()
    packs = {number: list(scan(location.packs / f"{pack.name}.pack"))
             for number, pack in store.catalog.packs().items()}  # fmt: skip
    assert sorted(map(len, packs.values())) == [1, 2]
    (place,) = store.catalog.forms(kept)[0].places
    with store.transaction() as transaction:
        (header,) = [header for header, _ in packs[place.pack] if header.key == kept]
        transaction.copy_record(header, some_bytes(1))
        drop = {number: [header for header, _ in records] for number, records in packs.items()}
        transaction.publish(drop=drop)
    assert store.read_block(kept) == some_bytes(1)
    assert len(pack_files(location)) == store.catalog.counts()["packs"] == 1


def test_a_reader_whose_pack_was_replaced_meanwhile_looks_again(
    store: Store, location: Location
) -> None:
    """The place is looked up, the pack is replaced, and only then is the place read."""
    kept, _ = publish_blocks(store, some_bytes(1), some_bytes(2))
    (number,) = store.catalog.packs()
    (path,) = pack_files(location)
    records = list(scan(path))
    (header,) = [header for header, _ in records if header.key == kept]
    forms_of = store.catalog.forms_of
    replaced = []

    def forms_before_the_pack_leaves(blocks: Iterable[bytes]) -> dict[bytes, list[StoredForm]]:
        found = forms_of(blocks)
        if not replaced:
            replaced.append(True)
            with store.transaction() as transaction:
                transaction.copy_record(header, some_bytes(1))
                transaction.publish(drop={number: [header for header, _ in records]})
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.catalog, "forms_of", forms_before_the_pack_leaves)
        assert store.read_block(kept) == some_bytes(1)
    assert replaced
    assert not path.exists()


# -- damage ---------------------------------------------------------------------------------------

Read = Callable[[Store], object]


def fill(store: Store) -> dict[str, tuple[Read, object]]:
    """Things of every kind in the store: how each is read, and what it is."""
    expert, base = bf16_pair(1, 700)
    with store.transaction() as transaction:
        raw = put(store, transaction, base)
        packed = put(store, transaction, b"again and " * 30, "U8")
        tensor = transaction.write_tensor(a_tensor())
        manifest = transaction.write_manifest(
            Manifest({f"w.{i}": TensorId(an_id(i)) for i in range(5)}, (), {})
        )
        transaction.write_statistics(tensor, an_id(2), some_bytes(5, 100) + bytes(200))
        transaction.publish()
    with store.transaction() as transaction:
        delta = put(store, transaction, expert, base=base)
        transaction.publish()
    assert store.forms([delta])[delta][0].base == raw
    reads: Mapping[str, Read] = {
        "raw block": lambda store: store.read_block(raw),
        "packed block": lambda store: store.read_block(packed),
        "delta block": lambda store: store.read_block(delta),
        "first layer": lambda store: read_some(store, delta, 1, base),
        "three layers": lambda store: read_some(store, delta, 3, base),
        "tensor": lambda store: store.tensor(tensor),
        "manifest": lambda store: store.manifest(manifest),
        "statistics": lambda store: store.read_statistics(tensor, an_id(2)),
    }
    return {what: (read, read(store)) for what, read in reads.items()}


def read_all(store: Store, things: Mapping[str, tuple[Read, object]]) -> set[str]:
    """Read everything; returns what is damaged. What is not must be what it was."""
    damaged = set()
    for what, (read, expected) in things.items():
        try:
            found = read(store)
        except Damaged:
            damaged.add(what)
        else:
            assert found == expected, f"a wrong {what}"
    return damaged


def is_sound(path: Path) -> bool:
    """Whether a pack's headers are what they were."""
    try:
        list(scan(path))
    except Damaged:
        return False
    return True


def test_a_flipped_byte_anywhere_never_gives_a_wrong_answer(
    store: Store, location: Location
) -> None:
    things = fill(store)
    store.close()
    ever_damaged: set[str] = set()
    for path in pack_files(location):
        size = path.stat().st_size
        places = random.Random(7).sample(range(size), min(size, 90))
        for offset in [*range(16), *places]:
            flip(path, offset)
            with closing(Store(location)) as again:
                damaged = read_all(again, things)
            assert damaged or not is_sound(path)
            ever_damaged |= damaged
            flip(path, offset)
    assert ever_damaged == set(things)
    with closing(Store(location)) as again:
        assert read_all(again, things) == set()


def test_every_byte_of_a_blocks_payload_counts(store: Store, location: Location) -> None:
    data = some_bytes(1, 100)
    (block,) = publish_blocks(store, data)
    (path,) = pack_files(location)
    ((_, offset),) = scan(path)
    for place in range(offset, offset + len(data)):
        flip(path, place)
        with pytest.raises(DamagedBlock, match=path.stem) as caught:
            store.read_block(block)
        assert caught.value.block == block
        flip(path, place)
    assert store.read_block(block) == data


def test_damage_of_any_layer_names_the_block_and_the_layers_pack(
    store: Store, location: Location
) -> None:
    expert, base = bf16_pair()
    publish_blocks(store, base)
    before = set(pack_files(location))
    with store.transaction() as transaction:
        block = put(store, transaction, expert, base=base)
        transaction.publish()
    layers = set(pack_files(location)) - before
    assert len(layers) == len(store.forms([block])[block][0].places) > 1
    for path in layers:
        ((header, offset),) = scan(path)
        for place in (offset, offset + header.length // 2, offset + header.length - 1):
            flip(path, place)
            reads = [lambda: store.read_block(block)]
            if header.layer < header.layers - 1:
                seen = header.layer + 1
                reads.append(lambda seen=seen: read_some(store, block, seen, base))
            for read in reads:
                with pytest.raises(DamagedBlock, match=path.stem) as caught:
                    read()
                assert caught.value.block == block
            flip(path, place)
    assert store.read_block(block) == expert


def test_damage_of_a_layer_that_is_not_read_stops_nobody(store: Store, location: Location) -> None:
    expert, base = bf16_pair()
    publish_blocks(store, base)
    with store.transaction() as transaction:
        block = put(store, transaction, expert, base=base)
        transaction.publish()
    before = read_some(store, block, 2, base)
    for path in pack_files(location):
        ((header, offset),) = scan(path)
        if header.key == block and header.layer >= 2:
            flip(path, offset)
    assert read_some(store, block, 2, base) == before


def test_a_pack_that_is_cut_short_never_gives_a_wrong_answer(
    store: Store, location: Location
) -> None:
    things = fill(store)
    store.close()
    ever_damaged: set[str] = set()
    for path in pack_files(location):
        whole = path.read_bytes()
        path.chmod(0o644)
        for share in (0.0, 0.3, 0.6, 0.9):
            path.write_bytes(whole[: int(len(whole) * share)])
            with closing(Store(location)) as again:
                ever_damaged |= read_all(again, things)
        path.write_bytes(whole)
    assert ever_damaged == set(things)


def test_a_pack_that_is_missing_damages_what_it_held_and_nothing_else(
    store: Store, location: Location
) -> None:
    publish_blocks(store, some_bytes(1))
    (lost,) = pack_files(location)
    publish_blocks(store, some_bytes(2))
    lost.unlink()
    with pytest.raises(Damaged, match=f"pack {lost.stem} is missing"):
        store.read_block(hash_block(some_bytes(1)))
    assert store.read_block(hash_block(some_bytes(2))) == some_bytes(2)


def test_two_blocks_that_changed_places_are_noticed(store: Store, location: Location) -> None:
    one, two = publish_blocks(store, some_bytes(1), some_bytes(2))
    (path,) = pack_files(location)
    places = [offset for _, offset in scan(path)]
    data = bytearray(path.read_bytes())
    for place, seed in zip(places, (2, 1), strict=True):
        data[place : place + 1024] = some_bytes(seed)
    path.chmod(0o644)
    path.write_bytes(data)
    for block in (one, two):
        with pytest.raises(DamagedBlock):
            store.read_block(block)


# -- a full disk ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("good_writes", [0, 1, 4])
def test_a_full_disk_is_told_as_such_and_leaves_nothing(
    number: int,
    good_writes: int,
    store: Store,
    location: Location,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writev, left = os.writev, good_writes

    def fill_up(fd: int, parts: Sequence[bytes]) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(number, os.strerror(number))
        return writev(fd, parts)

    def store_until_full() -> None:
        with store.transaction() as transaction:
            write_some(store, transaction)
            transaction.publish(move("main", None, an_id(1)))

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", fill_up)
        with pytest.raises(NoSpace) as caught:
            store_until_full()
    assert str(location.root) in caught.value.message
    assert is_untouched(location)
    assert store.refs.all("heads") == {}
    store_until_full()
    assert store.read_block(hash_block(some_bytes(1))) == some_bytes(1)


def test_another_error_of_the_disk_stays_what_it_is(
    store: Store, location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int, parts: Sequence[bytes]) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", fail)
        with pytest.raises(OSError, match="Input/output"):
            publish_blocks(store, some_bytes(1))
    assert is_untouched(location)


# -- the order of publication ---------------------------------------------------------------------


def test_packs_are_durable_before_the_catalog_and_the_catalog_before_the_ref(
    store: Store, location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, object]] = []
    fsync, rename, enter, update = os.fsync, os.rename, Catalog.enter, Refs.update

    def record_fsync(fd: int) -> None:
        events.append(("sync", os.fstat(fd).st_ino))
        fsync(fd)

    def record_rename(source: Path, target: Path) -> None:
        events.append(("rename", source.stat().st_ino))
        rename(source, target)

    def record_enter(self: Catalog, *arguments: Any) -> None:
        events.append(("enter", None))
        enter(self, *arguments)

    def record_update(self: Refs, *arguments: Any, **options: Any) -> None:
        events.append(("ref", store.catalog.counts()["objects"]))
        update(self, *arguments, **options)

    with store.transaction() as transaction:
        write_some(store, transaction)
        commit_id = transaction.write_commit(commit())
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", record_fsync)
            patch.setattr(os, "rename", record_rename)
            patch.setattr(Catalog, "enter", record_enter)
            patch.setattr(Refs, "update", record_update)
            transaction.publish(move("main", None, commit_id))
    entered = events.index(("enter", None))
    packs = [path.stat().st_ino for path in pack_files(location)]
    assert len(packs) == 2
    for inode in packs:
        synced, renamed = events.index(("sync", inode)), events.index(("rename", inode))
        assert synced < renamed < entered
    last_rename = max(i for i, (what, _) in enumerate(events) if what == "rename")
    directory_synced = events.index(("sync", location.packs.stat().st_ino), last_rename)
    assert last_rename < directory_synced < entered < events.index(("ref", 2))


CRASH = """
import os, signal, sys
from pathlib import Path
from mergegit.storage.catalog import Catalog
from mergegit.storage.location import Location
from mergegit.storage.refs import Refs
from mergegit.storage.store import Store
from tests.storage.samples import commit, move, put, some_bytes

def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

store = Store(Location(Path(sys.argv[1])))
point = sys.argv[2]
with store.transaction() as transaction:
    put(store, transaction, some_bytes(1))
    commit_id = transaction.write_commit(commit())
    if point == "writing":
        die()
    if point == "renaming":
        os.rename = die
    if point == "entering":
        Catalog.enter = die
    if point == "moving":
        Refs.update = die
    transaction.publish(move("main", None, commit_id))
    die()
"""


@pytest.mark.parametrize("point", ["writing", "renaming", "entering", "moving", "done"])
def test_a_command_killed_anywhere_is_done_or_can_be_run_again(
    point: str, location: Location
) -> None:
    root = Path(__file__).parents[2]
    killed = subprocess.run(
        [sys.executable, "-c", CRASH, location.root, point], check=False, cwd=root
    )
    assert killed.returncode == -signal.SIGKILL
    with closing(Store(location)) as store:
        is_done = store.refs.read("heads", "main") is not None
        assert is_done == (point == "done")
        if is_done:
            assert store.commit(store.refs.require("heads", "main")) == commit()
        else:
            with store.transaction() as transaction:
                put(store, transaction, some_bytes(1))
                commit_id = transaction.write_commit(commit())
                transaction.publish(move("main", None, commit_id))
            assert store.commit(commit_id) == commit()
        assert store.read_block(hash_block(some_bytes(1))) == some_bytes(1)
    sweep(location)
    assert os.listdir(location.temporary) == []


def test_an_error_between_packs_and_catalog_shows_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Catalog, *arguments: Any) -> None:
        raise OSError(errno.EIO, "the catalog's disk")

    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "enter", fail)
        with pytest.raises(OSError, match="catalog's disk"):
            publish_blocks(store, some_bytes(1))
    assert store.catalog.counts()["blocks"] == 0
    publish_blocks(store, some_bytes(1))
    assert store.read_block(hash_block(some_bytes(1))) == some_bytes(1)


LIMITED = """
import resource, sys
from pathlib import Path
from mergegit.errors import MergegitError
from mergegit.storage.location import Location
from mergegit.storage.store import Store
from tests.storage.samples import publish_blocks, some_bytes

store = Store(Location(Path(sys.argv[1])))
publish_blocks(store, some_bytes(0, 8))
resource.setrlimit(resource.RLIMIT_FSIZE, (128 << 10, 128 << 10))
try:
    publish_blocks(store, *(some_bytes(number, 8) for number in range(1, 900)))
except MergegitError as error:
    print(error.hint)
assert store.catalog.counts()["blocks"] == 1
assert store.read_block(next(store.catalog.blocks())[0]) == some_bytes(0, 8)
"""


def test_a_catalog_that_can_not_grow_is_told_as_such_and_stays_as_it_was(
    location: Location,
) -> None:
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, location.root],
        check=True,
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert "free space" in result.stdout


def test_errors_of_the_store_say_what_to_do(store: Store) -> None:
    for error in (DamagedBlock(BlockId(an_id(1)), "abc"), NoSpace("full", hint="free some")):
        assert isinstance(error, MergegitError)
        assert error.hint
        assert "\n" not in error.message
