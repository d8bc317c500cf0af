"""How tensors are laid out over shards."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergegit.checkpoint.layout import aligned, index_bytes, plan_shards, shard_paths

SIZES = st.lists(st.integers(0, 50), max_size=30)


def shards_of(sizes: list[int], shard_bytes: int) -> list[list[int]]:
    """The sizes of the tensors of each shard."""
    named = [(f"t{place}", nbytes) for place, nbytes in enumerate(sizes)]
    by_name = dict(named)
    return [[by_name[name] for name in names] for _, names in plan_shards(named, shard_bytes)]


def test_a_shard_is_filled_to_the_last_byte() -> None:
    assert shards_of([4, 6, 1], 10) == [[4, 6], [1]]
    assert shards_of([4, 7, 1], 10) == [[4], [7, 1]]


def test_a_tensor_larger_than_a_shard_has_one_of_its_own() -> None:
    assert shards_of([1, 99, 1, 1], 10) == [[1], [99], [1, 1]]
    assert shards_of([99, 99], 10) == [[99], [99]]


def test_a_tensor_without_bytes_makes_no_shard() -> None:
    assert shards_of([10, 0], 10) == [[10, 0]]


def test_what_follows_a_larger_tensor_starts_a_shard_even_without_bytes() -> None:
    assert shards_of([99, 0], 10) == [[99], [0]]


def test_without_tensors_there_are_no_shards() -> None:
    assert plan_shards([], 10) == ()


def test_one_shard_is_called_as_a_model_in_one_file() -> None:
    assert plan_shards([("a", 1), ("b", 2)], 10) == (("model.safetensors", ("a", "b")),)


def test_several_shards_are_numbered() -> None:
    assert plan_shards([("b", 6), ("a", 6)], 10) == (
        ("model-00001-of-00002.safetensors", ("b",)),
        ("model-00002-of-00002.safetensors", ("a",)),
    )


def test_numbers_beyond_five_digits_are_written_whole() -> None:
    paths = shard_paths(100_000)
    assert paths[0] == "model-00001-of-100000.safetensors"
    assert paths[-1] == "model-100000-of-100000.safetensors"


@pytest.mark.parametrize("shard_bytes", [0, -1])
def test_shards_that_hold_nothing_are_refused(shard_bytes: int) -> None:
    with pytest.raises(ValueError, match="hold nothing"):
        plan_shards([("a", 1)], shard_bytes)


@given(SIZES, st.integers(1, 60))
def test_all_tensors_stay_in_order_and_no_shard_is_too_large(
    sizes: list[int], shard_bytes: int
) -> None:
    shards = shards_of(sizes, shard_bytes)
    assert [nbytes for shard in shards for nbytes in shard] == sizes
    assert all(shard for shard in shards)
    assert all(sum(shard) <= shard_bytes or len(shard) == 1 for shard in shards)


@given(SIZES, st.integers(1, 60))
def test_no_shard_could_take_the_first_tensor_of_the_next(
    sizes: list[int], shard_bytes: int
) -> None:
    shards = shards_of(sizes, shard_bytes)
    for shard, after in itertools.pairwise(shards):
        assert sum(shard) + after[0] > shard_bytes


def test_the_widest_elements_come_first_and_else_nothing_moves() -> None:
    tensors = [("b", "BF16"), ("flags", "U8"), ("a", "BF16"), ("ids", "I64"), ("w", "F32")]
    assert aligned(tensors) == ("ids", "w", "b", "a", "flags")
    assert aligned([("b", "F16"), ("c", "BF16"), ("a", "I16")]) == ("b", "c", "a")


def test_elements_of_a_part_of_a_byte_come_last() -> None:
    assert aligned([("f4", "F4"), ("f6", "F6_E2M3"), ("u8", "U8")]) == ("u8", "f6", "f4")


def test_the_index_names_the_file_of_every_tensor_and_the_size_of_all() -> None:
    index = json.loads(index_bytes([("one", ("b", "a")), ("two", ("c",))], 123))
    assert index == {
        "metadata": {"total_size": 123},
        "weight_map": {"a": "one", "b": "one", "c": "two"},
    }
    assert list(index["weight_map"]) == ["a", "b", "c"]


def test_the_index_keeps_names_beyond_ascii_readable() -> None:
    assert "größe" in index_bytes([("one", ("größe",))], 1).decode()
