"""The executor, with blocks in memory: what it reads, what it writes, and what it holds."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from blake3 import blake3

from mergegit.dtypes import byte_length
from mergegit.kernels.combine import Coefficients
from mergegit.merge.execute import Base, TensorJob, execute
from mergegit.merge.plan import Planner
from mergegit.objects import BLOCK_ELEMENTS, BlockId, Tensor
from tests.families import generator
from tests.merge.problems import ladders, layers_of, problem_of
from tests.merge.reference import ulps
from tests.merge.tensors import (
    BY_NAME,
    NAMES,
    coefficients_of,
    from_bytes,
    merge_tensor,
    recipe_of,
    to_bytes,
)

BLOCK = BLOCK_ELEMENTS


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged block as it was handed out to be written."""

    block: BlockId
    dtype: str
    data: bytes
    base: Base | None


class Blocks:
    """Blocks by id, and a record of all that is read and written."""

    def __init__(self) -> None:
        self.data: dict[BlockId, bytes] = {}
        self.base_reads: list[BlockId] = []
        self.expert_reads: list[tuple[BlockId, int]] = []
        self.written: list[tuple[BlockId, str]] = []
        self.progress = 0
        self._lock = threading.Lock()

    def put(self, tensor: torch.Tensor) -> Tensor:
        data = to_bytes(tensor).tobytes()
        width = tensor.dtype.itemsize * BLOCK
        ids = []
        for start in range(0, len(data), width):
            block = BlockId(blake3(data[start : start + width]).digest())
            self.data[block] = data[start : start + width]
            ids.append(block)
        return Tensor(NAMES[tensor.dtype], tuple(tensor.shape), b"".join(ids))

    def get(self, tensor: Tensor) -> torch.Tensor:
        data = b"".join(self.data[block] for block in tensor.blocks())
        return from_bytes(data, BY_NAME[tensor.dtype]).reshape(tensor.shape)

    def base(self, block: BlockId) -> bytes:
        with self._lock:
            self.base_reads.append(block)
        return self.data[block]

    def expert(
        self, block: BlockId, layers: int, base: Base, threshold: float
    ) -> tuple[bytes, bool]:
        with self._lock:
            self.expert_reads.append((block, layers))
        assert base.data == self.data[base.block]
        return self.data[block], False

    def prepare(self, block: BlockId, dtype: str, data: bytes, base: Base | None) -> Merged:
        assert blake3(data).digest() == block
        return Merged(block, dtype, data, base)

    def write(self, merged: Merged) -> None:
        self.written.append((merged.block, merged.dtype))
        self.data[merged.block] = merged.data

    @property
    def expert_bytes(self) -> int:
        return sum(len(self.data[block]) for block, _ in self.expert_reads)

    def run(self, jobs: Sequence[TensorJob] | Iterator[TensorJob], threads: int = 2) -> dict:
        def advance(nbytes: int) -> None:
            self.progress += nbytes

        return dict(
            execute(
                jobs,
                reader=self,
                again=self,
                prepare=self.prepare,
                write=self.write,
                threads=threads,
                progress=advance,
            )
        )


def job(
    blocks: Blocks,
    base: torch.Tensor,
    experts: Sequence[torch.Tensor | None],
    *,
    name: str = "weight",
    method: str = "task_arithmetic",
    layers: np.ndarray | None = None,
    dtype: str | None = None,
    **options: object,
) -> TensorJob:
    """A job that reads everything, or what ``layers`` says."""
    stored = blocks.put(base)
    present = [expert if expert is not None else base for expert in experts]
    recipe = recipe_of(method, len(experts), **options)  # type: ignore[arg-type]
    coefficients = coefficients_of(
        recipe, base.flatten(), [expert.flatten() for expert in present], name=name
    )
    tensors = [blocks.put(expert) if expert is not None else None for expert in experts]
    if layers is None:
        layers = np.array(
            [
                [t is not None and t.block(i) != stored.block(i) for i in range(len(stored))]
                for t in tensors
            ],
            np.uint8,
        ).reshape(len(experts), len(stored))
    return TensorJob(
        name=name,
        dtype=dtype or stored.dtype,
        base=stored,
        experts=tensors,
        layers=layers,
        rule=lambda found: coefficients,
    )


def model(*key: object, n: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(n, generator=generator(*key)) * 0.02).to(dtype)


def moved(base: torch.Tensor, *key: object, blocks: Sequence[int] | None = None) -> torch.Tensor:
    """An expert that moved in some blocks of its base."""
    delta = torch.randn(base.shape, generator=generator(*key)) * 5e-3
    if blocks is not None:
        place = torch.arange(base.numel()).reshape(base.shape) // BLOCK
        delta[~torch.isin(place, torch.tensor(blocks))] = 0.0
    return (base.float() + delta).to(base.dtype)


# -- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "ties", "dare_linear"])
def test_blocks_together_are_the_merge_of_the_whole_tensor(method: str) -> None:
    base = model("whole", n=BLOCK + 777)
    experts = [moved(base, "whole", k) for k in range(3)]
    options: dict[str, Sequence[float]] = {"weights": [0.5, 0.3, -0.2]}
    if method in ("ties", "dare_linear"):
        options["densities"] = [0.3, 0.5, 0.7]
    blocks = Blocks()
    merged = blocks.run([job(blocks, base, experts, method=method, **options)])["weight"]
    want = merge_tensor(method, base, experts, **options)  # type: ignore[arg-type]
    assert torch.equal(blocks.get(merged).view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_nothing(threads: int) -> None:
    def run(count: int) -> tuple[dict[str, Tensor], list[tuple[BlockId, str]], Counter]:
        blocks = Blocks()
        jobs = []
        for number, n in enumerate((BLOCK + 5, 100, 2 * BLOCK, 1, 0, 4096)):
            base = model("threads", number, n=n)
            experts = [moved(base, "threads", number, k) for k in range(3)]
            jobs.append(
                job(
                    blocks, base, experts, name=f"t{number}", method="dare_ties",
                    densities=[0.4, 0.6, 1.0],
                )
            )  # fmt: skip
        return blocks.run(jobs, threads=count), blocks.written, Counter(blocks.expert_reads)

    assert run(threads) == run(3)


def test_tensors_come_out_in_the_order_of_the_jobs() -> None:
    blocks = Blocks()
    jobs = []
    for number, n in enumerate((BLOCK + 1, 0, 3, 0, 1)):
        base = model("order", number, n=n)
        jobs.append(job(blocks, base, [moved(base, "order e", number)], name=f"t{number}"))
    assert list(blocks.run(jobs, threads=5)) == [f"t{number}" for number in range(5)]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (1,), (2, 3, 5)])
def test_tensors_of_any_shape_are_merged(shape: tuple[int, ...]) -> None:
    base = torch.randn(shape, generator=generator("shape", shape)) + 1
    expert = base + 1
    blocks = Blocks()
    merged = blocks.run([job(blocks, base, [expert], weights=[0.5])])["weight"]
    assert merged.shape == shape
    assert torch.allclose(blocks.get(merged), base + 0.5)


def test_no_jobs_give_no_tensors() -> None:
    assert Blocks().run([]) == {}


def test_an_expert_that_lacks_the_tensor_counts_with_the_bases() -> None:
    base = model("lacks", n=5000)
    expert = moved(base, "lacks", 1)
    blocks = Blocks()
    merged = blocks.run([job(blocks, base, [None, expert, None], method="linear")])["weight"]
    want = merge_tensor("linear", base, [base, expert, base])
    assert int(ulps(blocks.get(merged), want).max()) == 0


def test_experts_of_other_dtypes_are_merged_in_float32() -> None:
    base = model("mixed", n=BLOCK + 100)
    experts = [
        moved(base, "mixed", k).float().add(1e-4).to(dtype)
        for k, dtype in enumerate((torch.float32, torch.float16, torch.float8_e5m2))
    ]
    blocks = Blocks()
    merged = blocks.run([job(blocks, base, experts)])["weight"]
    assert merged.dtype == "BF16"
    assert torch.equal(blocks.get(merged), merge_tensor("task_arithmetic", base, experts))


@pytest.mark.parametrize("dtype", ["F32", "F16", "F8_E4M3", "F64"])
def test_the_output_may_have_another_dtype(dtype: str) -> None:
    base = model("output", n=BLOCK + 3)
    expert = moved(base, "output", 1, blocks=[0])
    blocks = Blocks()
    merged = blocks.run([job(blocks, base, [expert], dtype=dtype)])["weight"]
    want = merge_tensor("task_arithmetic", base, [expert], dtype=BY_NAME[dtype])
    assert merged.dtype == dtype
    assert to_bytes(blocks.get(merged)).tobytes() == to_bytes(want).tobytes()
    assert {written for _, written in blocks.written} == {dtype}


# -- reads and writes ----------------------------------------------------------------------------


def test_a_block_to_which_no_expert_contributes_is_neither_read_nor_written() -> None:
    base = model("quiet", n=3 * BLOCK)
    experts = [moved(base, "quiet", k, blocks=[1]) for k in range(2)]
    blocks = Blocks()
    work = job(blocks, base, experts, method="ties", densities=[0.5, 0.5])
    merged = blocks.run([work])["weight"]
    assert [merged.block(i) == work.base.block(i) for i in range(3)] == [True, False, True]
    assert blocks.base_reads == [work.base.block(1)]
    assert [block for block, _ in blocks.written] == [merged.block(1)]
    assert len(blocks.expert_reads) == 2


def test_a_block_that_is_not_planned_is_not_read() -> None:
    base = model("unplanned", n=2 * BLOCK)
    expert = moved(base, "unplanned", 1)
    blocks = Blocks()
    work = job(blocks, base, [expert], layers=np.array([[0, 1]], np.uint8))
    merged = blocks.run([work])["weight"]
    assert [block for block, _ in blocks.expert_reads] == [work.experts[0].block(1)]  # type: ignore[union-attr]
    assert merged.block(0) == work.base.block(0)


def test_deltas_are_merged_like_the_blocks_that_they_are_of() -> None:
    base = model("deltas", n=BLOCK + 9)
    experts = [moved(base, "deltas", k) for k in range(2)]
    blocks = Blocks()
    work = job(blocks, base, experts, method="ties", densities=[0.4, 0.6])
    want = blocks.run([work])
    read = blocks.expert

    def read_deltas(
        block: BlockId, layers: int, base: Base, threshold: float
    ) -> tuple[bytes, bool]:
        data, _ = read(block, layers, base, threshold)
        pair = (from_bytes(raw, torch.bfloat16).float() for raw in (data, base.data))
        expert, reference = pair
        delta = expert - reference
        kept = delta.abs() >= threshold
        trimmed, shares = torch.where(kept, delta, 0.0), kept.float()
        return to_bytes(trimmed).tobytes() + to_bytes(shares).tobytes(), True

    blocks.expert = read_deltas  # type: ignore[method-assign]
    assert blocks.run([work]) == want


def test_experts_are_read_with_the_thresholds_that_they_are_trimmed_at() -> None:
    base = model("thresholds", n=2 * BLOCK)
    one = moved(base, "thresholds", 1)
    experts = [one, moved(base, "thresholds", 2), one]
    blocks = Blocks()
    work = job(blocks, base, experts, method="ties", densities=[0.2, 0.5, 0.6])
    seen: Counter[tuple[BlockId, float]] = Counter()
    read = blocks.expert

    def read_expert(
        block: BlockId, layers: int, base: Base, threshold: float
    ) -> tuple[bytes, bool]:
        seen[block, threshold] += 1
        return read(block, layers, base, threshold)

    blocks.expert = read_expert  # type: ignore[method-assign]
    blocks.run([work])
    rule = work.rule(None)
    assert isinstance(rule, Coefficients)
    thresholds = rule.thresholds
    assert len({*thresholds.tolist()}) == 3
    # The same block is read again where it is trimmed at another threshold.
    assert seen == Counter(
        (tensor.block(index), float(threshold))
        for tensor, threshold in zip(work.experts, thresholds, strict=True)
        if tensor is not None
        for index in range(2)
    )


def test_the_base_is_handed_to_who_prepares_a_block_of_its_dtype() -> None:
    base = model("prepare", n=2 * BLOCK)
    for dtype, expected in ((None, True), ("F32", False)):
        blocks = Blocks()
        work = job(blocks, base, [moved(base, "prepare", 1)], dtype=dtype)
        seen = []
        blocks.write = seen.append  # type: ignore[method-assign]
        blocks.run([work])
        assert [merged.base is not None for merged in seen] == [expected] * 2
        if expected:
            assert [merged.base.block for merged in seen] == list(work.base.blocks())


def test_a_merged_block_that_is_the_bases_is_not_written() -> None:
    base = model("same", n=1000)
    experts = [moved(base, "same", 1), moved(base, "same", 1)]
    blocks = Blocks()
    work = job(blocks, base, experts, weights=[1.0, -1.0])
    merged = blocks.run([work])["weight"]
    assert blocks.written == []
    assert merged == work.base


def test_a_base_that_is_scaled_is_computed_without_any_expert() -> None:
    base = model("scaled", n=BLOCK + 1)
    blocks = Blocks()
    work = job(
        blocks, base, [base], method="linear", weights=[0.5], parameters={"normalize": False}
    )
    merged = blocks.run([work])["weight"]
    assert torch.equal(blocks.get(merged), (base.float() * 0.5).to(base.dtype))
    assert blocks.expert_reads == []
    assert sorted(blocks.base_reads) == sorted(work.base.blocks())


def test_a_change_of_dtype_alone_reads_the_base_alone() -> None:
    base = model("retyped", n=BLOCK + 1)
    blocks = Blocks()
    merged = blocks.run([job(blocks, base, [base], dtype="F32")])["weight"]
    assert torch.equal(blocks.get(merged), base.float())
    assert blocks.expert_reads == []
    assert len(blocks.base_reads) == 2


def test_experts_that_share_a_block_share_one_read() -> None:
    base = model("shared", n=2 * BLOCK)
    one = moved(base, "shared", 1)
    other = one.clone()
    other[BLOCK:] = moved(base, "shared", 2)[BLOCK:]
    blocks = Blocks()
    work = job(blocks, base, [one, other, one], weights=[0.3, 0.4, 0.2])
    merged = blocks.run([work])["weight"]
    want = merge_tensor("task_arithmetic", base, [one, other, one], weights=[0.3, 0.4, 0.2])
    assert torch.equal(blocks.get(merged), want)
    reads = Counter(block for block, _ in blocks.expert_reads)
    assert set(reads.values()) == {1}
    assert len(reads) == 3


def test_equal_bytes_of_different_dtypes_are_read_for_each() -> None:
    # Blocks of zeros have one id in every dtype of their width.
    base = model("zeros", n=1000)
    experts = [torch.zeros(1000, dtype=torch.float16), torch.zeros(1000, dtype=torch.bfloat16)]
    blocks = Blocks()
    merged = blocks.run([job(blocks, base, experts, weights=[0.25, 0.5])])["weight"]
    want = merge_tensor("task_arithmetic", base, experts, weights=[0.25, 0.5])
    assert torch.equal(blocks.get(merged), want)
    assert len(blocks.expert_reads) == 2


def test_the_number_of_layers_is_handed_to_the_reader() -> None:
    base = model("layers", n=3 * BLOCK)
    expert = moved(base, "layers", 1)
    blocks = Blocks()
    work = job(blocks, base, [expert], layers=np.array([[3, 0, 1]], np.uint8))
    blocks.run([work], threads=1)
    tensor = work.experts[0]
    assert tensor is not None
    assert blocks.expert_reads == [(tensor.block(0), 3), (tensor.block(2), 1)]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.35, 0.8, 1.0])
def test_reads_sum_to_the_plan(share: float) -> None:
    sizes = {"a": 2 * BLOCK + 50, "b": BLOCK, "c": 700}
    bases = {name: model("plan", name, n=n) for name, n in sizes.items()}
    experts = [
        {name: moved(base, "plan", name, k) for name, base in bases.items()} for k in range(3)
    ]
    experts[1]["a"][:BLOCK] = bases["a"][:BLOCK]
    experts[2]["b"] = experts[0]["b"]
    blocks = Blocks()
    plan, layers = _planned(blocks, bases, experts, share)
    jobs, at = [], 0
    for name, base in bases.items():
        count = -(-base.numel() // BLOCK)
        jobs.append(
            job(
                blocks, base, [expert[name] for expert in experts], name=name,
                layers=layers[:, at : at + count],
            )
        )  # fmt: skip
        at += count
    blocks.run(jobs)
    assert blocks.expert_bytes == plan.planned_bytes
    assert sum(len(blocks.data[block]) for block in blocks.base_reads) == plan.base_bytes
    assert (share == 0) == (not blocks.expert_reads)


def _planned(
    blocks: Blocks,
    bases: Mapping[str, torch.Tensor],
    experts: Sequence[Mapping[str, torch.Tensor]],
    share: float,
):  # type: ignore[no-untyped-def]
    """The plan of these models at a share of their bytes: whole blocks or none."""
    base_ids = [b for base in bases.values() for b in blocks.put(base).blocks()]
    found, owners = [], {}
    for k, expert in enumerate(experts):
        ids = [b for name in bases for b in blocks.put(expert[name]).blocks()]
        energies = [
            float((x.float() - y.float()).square().sum())
            for name in bases
            for x, y in zip(expert[name].split(BLOCK), bases[name].split(BLOCK), strict=True)
        ]
        leaders = [owners.setdefault((place, block), k) for place, block in enumerate(ids)]
        found.append(
            ladders(
                k,
                [[len(blocks.data[block])] for block in ids],
                [[energy, 0.0] for energy in energies],
                depths=[block != other for block, other in zip(ids, base_ids, strict=True)],
                leaders=leaders,
            )
        )
    base_bytes = [len(blocks.data[block]) for block in base_ids]
    problem = problem_of(found, base_bytes=base_bytes, write_bytes=base_bytes)
    raw = sum(byte_length("BF16", base.numel()) for base in bases.values()) * len(experts)
    plan = Planner(problem).plan(int(share * raw))
    return plan, layers_of(plan)


# -- memory, progress, errors --------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_bounded_number_of_blocks_is_in_flight(threads: int) -> None:
    blocks = Blocks()
    started = 0

    def jobs() -> Iterator[TensorJob]:
        nonlocal started
        for number in range(60):
            base = model("flight", number, n=64)
            started += 1
            yield job(blocks, base, [moved(base, "flight", number, 1)], name=f"t{number}")

    ahead = []
    merged = execute(
        jobs(),
        reader=blocks,
        again=blocks,
        prepare=blocks.prepare,
        write=blocks.write,
        threads=threads,
        progress=lambda _: None,
    )
    for finished, _ in enumerate(merged):
        ahead.append(started - finished)
    assert len(ahead) == 60
    assert max(ahead) <= threads + 3


def test_a_tensor_is_written_before_the_last_is_read() -> None:
    """Nothing is held back until the end."""
    blocks = Blocks()
    jobs = []
    for number in range(30):
        base = model("stream", number, n=64)
        jobs.append(job(blocks, base, [moved(base, "stream", number, 1)], name=f"t{number}"))
    seen = []
    write = blocks.write

    def count_and_write(merged: Merged) -> None:
        seen.append(len(blocks.expert_reads))
        write(merged)

    blocks.write = count_and_write  # type: ignore[method-assign]
    blocks.run(jobs, threads=2)
    assert seen[0] < 10


def test_blocks_are_written_in_order_by_the_callers_thread() -> None:
    blocks = Blocks()
    base = model("writes", n=3 * BLOCK)
    callers = []
    write = blocks.write

    def note_and_write(merged: Merged) -> None:
        callers.append(threading.current_thread())
        write(merged)

    blocks.write = note_and_write  # type: ignore[method-assign]
    merged = blocks.run([job(blocks, base, [moved(base, "writes", 1)])], threads=5)["weight"]
    assert set(callers) == {threading.current_thread()}
    assert [block for block, _ in blocks.written] == list(merged.blocks())


def test_progress_adds_up_to_the_bytes_of_the_base() -> None:
    blocks = Blocks()
    jobs = []
    for number, n in enumerate((BLOCK + 5, 0, 17)):
        base = model("progress", number, n=n)
        jobs.append(job(blocks, base, [moved(base, "progress", number, 1)], name=f"t{number}"))
    blocks.run(jobs)
    assert blocks.progress == 2 * (BLOCK + 5 + 17)


@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_of_a_read_ends_the_merge(threads: int) -> None:
    blocks = Blocks()
    base = model("error", n=4 * BLOCK)
    work = job(blocks, base, [moved(base, "error", 1)])
    broken = work.experts[0].block(2)  # type: ignore[union-attr]
    read = blocks.expert

    def read_expert(
        block: BlockId, layers: int, base: Base, threshold: float
    ) -> tuple[bytes, bool]:
        if block == broken:
            raise OSError("the disk is gone")
        return read(block, layers, base, threshold)

    blocks.expert = read_expert  # type: ignore[method-assign]
    with pytest.raises(OSError, match="the disk is gone"):
        blocks.run([work], threads=threads)
    assert len(blocks.written) <= 2
