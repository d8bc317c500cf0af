"""`repack`: store blocks in another form. Ids, commits and contents stay as they are.

Works commit by commit; each is one transaction, so that an interrupted run has done some commits
and not others, and the next one goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mergegit.dtypes import DTYPES
from mergegit.objects import BlockId, Manifest, Tensor
from mergegit.pipeline import ordered_map
from mergegit.repository.rewriting import copy_records, is_worth_rewriting, records_of
from mergegit.storage import delta
from mergegit.storage.pack import Encoding, Header, Kind
from mergegit.storage.prepared import PreparedBlock, raw_block
from mergegit.storage.store import Store
from mergegit.storage.transaction import Transaction

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Job:
    block: BlockId
    base: BlockId | None
    dtype: str
    size: int


@dataclass(slots=True)
class Repacked:
    """What a repack of one commit did: blocks stored anew, and their bytes before and after."""

    blocks: int = 0
    before: int = 0
    after: int = 0


def repack_manifest(
    store: Store,
    manifest: Manifest,
    base: Manifest | None,
    *,
    plainly: bool,
    threads: int,
    progress: Progress,
) -> Repacked:
    """Store a manifest's blocks as deltas from ``base``'s, or plainly."""
    jobs = list(_plain_jobs(store, manifest) if plainly else _delta_jobs(store, manifest, base))
    done = Repacked()
    if not jobs:
        return done
    total, at = sum(job.size for job in jobs), 0
    superseded: set[tuple[bytes, Encoding]] = set()

    def encode(job: _Job) -> tuple[_Job, PreparedBlock]:
        data = store.read_block(job.block)
        if job.base is None:
            return job, raw_block(job.block, job.dtype, data)
        base_data = store.read_block(job.base)
        encoded = delta.encode(data, base_data, job.dtype)
        segments = encoded.segments if encoded else ()
        return job, PreparedBlock(job.block, job.dtype, segments, len(data), job.base, base_data)

    with store.transaction() as transaction:
        for job, prepared in ordered_map(encode, jobs, threads=threads):
            at += job.size
            progress(at, total)
            if not prepared.segments:
                continue
            old = Encoding.DELTA if plainly else Encoding.RAW
            forms = store.forms([job.block])[job.block]
            transaction.write_block(prepared)
            superseded.add((job.block, old))
            done.blocks += 1
            done.before += sum(form.nbytes for form in forms if form.encoding is old)
            done.after += prepared.stored_bytes
        if done.blocks:
            transaction.publish(drop=_replace_packs(store, transaction, superseded))
    return done


def _pairs(
    store: Store, manifest: Manifest, base: Manifest | None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The float tensors of a model with the base's of the same name, shape and dtype, if any."""
    for name, tensor_id in manifest.tensors.items():
        tensor = store.tensor(tensor_id)
        if not DTYPES[tensor.dtype].is_float:
            continue
        other = None
        if base is not None and name in base.tensors:
            candidate = store.tensor(base.tensors[name])
            if candidate.shape == tensor.shape and delta.can_encode(tensor.dtype, candidate.dtype):
                other = candidate
        yield tensor, other


def _delta_jobs(store: Store, manifest: Manifest, base: Manifest | None) -> Iterator[_Job]:
    """Blocks stored plainly that are no base of others and have another block in their place."""
    bases = _blocks_that_are_bases(store)
    seen: set[BlockId] = set()
    for tensor, other in _pairs(store, manifest, base):
        if other is None:
            continue
        forms = store.forms(tensor.blocks())
        for index, block in enumerate(tensor.blocks()):
            below = other.block(index)
            is_delta = any(form.encoding is Encoding.DELTA for form in forms[block])
            if block != below and block not in seen and not is_delta and block not in bases:
                seen.add(block)
                yield _Job(block, below, tensor.dtype, tensor.block_nbytes(index))


def _plain_jobs(store: Store, manifest: Manifest) -> Iterator[_Job]:
    """Blocks stored as deltas alone."""
    seen: set[BlockId] = set()
    for tensor, _ in _pairs(store, manifest, None):
        forms = store.forms(tensor.blocks())
        for index, block in enumerate(tensor.blocks()):
            is_raw = any(form.encoding is Encoding.RAW for form in forms[block])
            if not is_raw and block not in seen:
                seen.add(block)
                yield _Job(block, None, tensor.dtype, tensor.block_nbytes(index))


def _blocks_that_are_bases(store: Store) -> set[bytes]:
    return {
        form.base
        for _, forms in store.catalog.blocks()
        for form in forms
        if form.encoding is Encoding.DELTA
    }


def _replace_packs(
    store: Store, transaction: Transaction, superseded: set[tuple[bytes, Encoding]]
) -> Mapping[int, Sequence[Header]]:
    """Packs that mostly hold superseded forms; what else they hold is copied into new ones."""
    touched = {
        place.pack
        for block, encoding in superseded
        for form in store.forms([BlockId(block)])[BlockId(block)]
        if form.encoding is encoding
        for place in form.places
    }
    drop: dict[int, Sequence[Header]] = {}

    def is_needed(header: Header, _offset: int) -> bool:
        return (header.key, header.encoding) not in superseded

    for number in sorted(touched):
        file = store.catalog.pack(number)
        assert file is not None
        records = records_of(store, number)
        dead = sum(h.length for h, _ in records if (h.key, h.encoding) in superseded)
        blocks_alone = all(header.kind is Kind.SEGMENT for header, _ in records)
        if blocks_alone and is_worth_rewriting(dead, file.length):
            for _ in copy_records(store, transaction, number, records, is_needed):
                pass
            drop[number] = [header for header, _ in records]
    return drop
