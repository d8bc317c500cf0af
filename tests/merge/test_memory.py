"""Keys of merged blocks and tensors: equal for the same, and other for anything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from mergegit.kernels.combine import ALWAYS, Coefficients
from mergegit.merge.memory import WHOLE, block_key, tensor_key
from mergegit.merge.method import ExpertTensor, TensorContext, weighted
from mergegit.objects import BLOCK_ELEMENTS, Tensor

N = 2 * BLOCK_ELEMENTS


def tensor(number: int, dtype: str = "BF16") -> Tensor:
    return Tensor(dtype, (N,), bytes([number]) * 32 + bytes([number, 1]) * 16)


BASE, EXPERTS = tensor(0), (tensor(1), tensor(2))
COEFFICIENTS = weighted([0.5, 0.3])
LAYERS = np.array([WHOLE, 2], np.uint8)


def key(
    coefficients: Coefficients = COEFFICIENTS,
    base: Tensor = BASE,
    experts: tuple[Tensor | None, ...] = EXPERTS,
    index: int = 0,
    layers: np.ndarray = LAYERS,
    dtype: str = "BF16",
) -> bytes:
    return block_key(coefficients, base, experts, index, layers, dtype)


def test_the_same_has_the_same_key() -> None:
    assert key() == key(coefficients=weighted([0.5, 0.3]))
    assert len(key()) == 32


@pytest.mark.parametrize(
    "change",
    [
        lambda: key(weighted([0.5, 0.4])),
        lambda: key(weighted([0.3, 0.5])),
        lambda: key(weighted([0.5, 0.3], factor=0.5)),
        lambda: key(weighted([0.5, 0.3], base_scale=0.5)),
        lambda: key(weighted([0.5, 0.3], normalize=True)),
        lambda: key(replace(COEFFICIENTS, elect=True)),
        lambda: key(replace(COEFFICIENTS, thresholds=np.array([0, 1e-3], np.float32))),
        lambda: key(replace(COEFFICIENTS, ceilings=np.array([1, 1], np.float32))),
        lambda: key(replace(COEFFICIENTS, scales=np.array([1, 2], np.float32))),
        lambda: key(base=tensor(9)),
        lambda: key(base=tensor(0, "F16")),
        lambda: key(experts=(tensor(1), tensor(3))),
        lambda: key(experts=(tensor(1), tensor(2, "F32"))),
        lambda: key(experts=(tensor(2), tensor(1))),
        lambda: key(layers=np.array([WHOLE, 3], np.uint8)),
        lambda: key(layers=np.array([WHOLE, WHOLE], np.uint8)),
        lambda: key(layers=np.array([WHOLE, 0], np.uint8)),
        lambda: key(dtype="F32"),
        lambda: key(index=1),
    ],
)
def test_whatever_else_goes_in_makes_another_key(change: Callable[[], bytes]) -> None:
    assert change() != key()


def test_an_expert_that_is_not_read_counts_by_its_weight_where_weights_are_summed() -> None:
    layers = np.array([WHOLE, 0], np.uint8)
    plain = [key(weighted([0.5, w]), layers=layers) for w in (0.3, 0.9)]
    assert plain[0] == plain[1]
    summed = [key(weighted([0.5, w], normalize=True), layers=layers) for w in (0.3, 0.9)]
    assert summed[0] != summed[1]


def test_random_draws_depend_on_the_stream_and_on_the_place() -> None:
    def drawn(stream: int, index: int, blocks: Tensor) -> bytes:
        some = replace(
            COEFFICIENTS,
            keep=np.array([ALWAYS // 2, ALWAYS], np.uint64),
            keys=np.array([stream, 0], np.uint64),
        )
        return key(some, experts=(blocks, EXPERTS[1]), index=index)

    same = replace(tensor(1), block_ids=bytes([1]) * 64)
    twin = replace(BASE, block_ids=bytes(64))
    assert drawn(7, 0, same) != drawn(8, 0, same)
    # The same blocks in another place of the tensor draw other numbers.
    both = [
        block_key(
            replace(COEFFICIENTS, keep=np.array([ALWAYS // 2] * 2, np.uint64)),
            twin, (same, same), index, LAYERS, "BF16",
        )
        for index in (0, 1)
    ]  # fmt: skip
    assert both[0] != both[1]
    plain = [block_key(COEFFICIENTS, twin, (same, same), i, LAYERS, "BF16") for i in (0, 1)]
    assert plain[0] == plain[1]


def context(**changes: object) -> TensorContext:
    experts = [ExpertTensor({"weight": w}, None, b"e%d" % k) for k, w in enumerate((0.5, 0.3))]
    made = TensorContext("weight", (N,), {"lambda": 1.0}, 3, experts)
    return replace(made, **changes)  # type: ignore[arg-type]


def whole_key(context: TensorContext, method: str = "sce", dtype: str = "BF16") -> bytes:
    layers = np.full((2, 2), WHOLE, np.uint8)
    return tensor_key(method, context, BASE, EXPERTS, layers, dtype)


def test_a_tensor_has_the_key_of_all_that_its_rule_may_look_at() -> None:
    keys = [
        whole_key(context()),
        whole_key(context(), method="della"),
        whole_key(context(), dtype="F32"),
        whole_key(context(parameters={"lambda": 0.5})),
        whole_key(context(seed=4)),
        whole_key(context(name="bias")),
        whole_key(context(depth=0.5)),
        whole_key(context(in_layers=False)),
        whole_key(context(shape=(2, N // 2))),
        whole_key(context(experts=context().experts[:1])),
    ]
    assert len(set(keys)) == len(keys)
    assert whole_key(context()) == keys[0]
