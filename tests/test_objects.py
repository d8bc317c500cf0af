"""The nouns: the grid of blocks, and what manifests and commits say of themselves."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergegit.objects import (
    BLOCK_ELEMENTS,
    Commit,
    CommitId,
    Manifest,
    ManifestId,
    Shard,
    Tensor,
    TensorId,
    block_count,
    block_elements,
)


def an_id(letter: str) -> TensorId:
    return TensorId(letter.encode() * 32)


def test_a_block_has_two_to_the_nineteenth_elements() -> None:
    assert BLOCK_ELEMENTS == 524_288


@given(st.integers(0, 1 << 40))
def test_blocks_cover_a_tensor_exactly(elements: int) -> None:
    count = block_count(elements)
    last = block_elements(elements, count - 1) if count else 0
    assert (count - 1) * BLOCK_ELEMENTS + last == elements if count else elements == 0


@given(st.integers(1, 1 << 40))
def test_only_the_last_block_is_short_and_it_is_not_empty(elements: int) -> None:
    count = block_count(elements)
    assert 0 < block_elements(elements, count - 1) <= BLOCK_ELEMENTS
    assert all(block_elements(elements, i) == BLOCK_ELEMENTS for i in range(min(count - 1, 3)))


def test_a_scalar_is_one_block() -> None:
    scalar = Tensor("F32", (), an_id("a"))
    assert (scalar.elements, scalar.nbytes, len(scalar)) == (1, 4, 1)


def test_a_tensor_with_an_empty_dimension_has_no_blocks() -> None:
    tensor = Tensor("BF16", (3, 0, 5), b"")
    assert (tensor.elements, tensor.nbytes, list(tensor.blocks())) == (0, 0, [])


def test_blocks_are_the_ids_in_their_order() -> None:
    tensor = Tensor("U8", (2 * BLOCK_ELEMENTS + 1,), an_id("a") + an_id("b") + an_id("c"))
    assert list(tensor.blocks()) == [an_id("a"), an_id("b"), an_id("c")]
    assert tensor.block(1) == an_id("b")


@pytest.mark.parametrize(("dtype", "full", "rest"), [("F64", 4 << 20, 24), ("BF16", 1 << 20, 6)])
def test_a_short_last_block_has_fewer_bytes(dtype: str, full: int, rest: int) -> None:
    tensor = Tensor(dtype, (BLOCK_ELEMENTS + 3,), an_id("a") + an_id("b"))
    assert [tensor.block_nbytes(i) for i in range(2)] == [full, rest]
    assert tensor.nbytes == full + rest


def test_a_stray_stands_before_the_tensor_of_its_name() -> None:
    shard = Shard("extra.safetensors", an_id("h"), ("w", "v"), {"w": an_id("s")})
    manifest = Manifest({"w": an_id("w"), "v": an_id("v")}, (shard,), {})
    assert manifest.tensor_of(shard, "w") == an_id("s")
    assert manifest.tensor_of(shard, "v") == an_id("v")


def test_a_name_that_the_manifest_lacks_is_not_found() -> None:
    shard = Shard("model.safetensors", an_id("h"), ("w",))
    with pytest.raises(KeyError):
        Manifest({}, (shard,), {}).tensor_of(shard, "w")


def test_a_manifest_needs_its_tensors_headers_strays_and_files() -> None:
    shard = Shard("model.safetensors", an_id("h"), ("w",), {"w": an_id("s")})
    manifest = Manifest({"v": an_id("v")}, (shard,), {"config.json": an_id("c")})
    assert set(manifest.tensor_ids()) == {an_id(letter) for letter in "vhsc"}


@pytest.mark.parametrize(
    ("names", "strays", "belongs"),
    [
        ((), {}, True),
        (("w",), {}, True),
        (("w", "v"), {"w"}, True),
        (("w", "v"), {"w", "v"}, False),
    ],
)
def test_a_shard_of_strays_alone_is_not_the_models(
    names: tuple[str, ...], strays: set[str], belongs: bool
) -> None:
    shard = Shard("x.safetensors", an_id("h"), names, dict.fromkeys(strays, an_id("s")))
    assert shard.belongs_to_model is belongs


def test_a_title_is_the_first_line_of_the_message() -> None:
    commit = Commit(ManifestId(bytes(32)), (), "Ada", 0, "add math\n\nwith care\n")
    assert commit.title == "add math"


def test_objects_do_not_change() -> None:
    commit = Commit(ManifestId(bytes(32)), (CommitId(bytes(32)),), "Ada", 0, "add math")
    with pytest.raises(dataclasses.FrozenInstanceError):
        commit.message = "another"  # type: ignore[misc]
