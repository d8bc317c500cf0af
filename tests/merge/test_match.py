from __future__ import annotations

from collections.abc import Mapping

import pytest

from mergegit.errors import Mismatch
from mergegit.merge.match import Matching, Model, match
from mergegit.objects import ID_BYTES, Tensor, TensorId, block_count


def tensor(dtype: str = "BF16", shape: tuple[int, ...] = (4, 3), contents: int = 0) -> Tensor:
    blank = Tensor(dtype, shape, b"")
    return Tensor(dtype, shape, bytes([contents]) * ID_BYTES * block_count(blank.elements))


def model(ref: str, tensors: Mapping[str, Tensor]) -> Model:
    ids = {name: TensorId(repr(value).encode()) for name, value in tensors.items()}
    return Model(ref, tensors, ids)


def matched(base: Mapping[str, Tensor], *experts: Mapping[str, Tensor], **rest: bool) -> Matching:
    models = [model(f"expert{place}", tensors) for place, tensors in enumerate(experts)]
    return match(model("base", base), models, ignore_extra=rest.get("ignore_extra", False))


def test_tensors_of_all_are_merged_in_the_order_of_their_names() -> None:
    names = {"b": tensor(), "a": tensor(), "a.10": tensor(), "a.9": tensor()}
    found = matched(names, {name: tensor(contents=1) for name in names})
    assert found.merged == ("a", "a.10", "a.9", "b")
    assert found.kept == {}


def test_the_order_of_the_models_own_tensors_plays_no_part() -> None:
    base = {"a": tensor(), "b": tensor("I8"), "c": tensor()}
    expert = {"c": tensor(contents=1), "b": tensor("I8")}
    backwards = dict(reversed(base.items())), dict(reversed(expert.items()))
    assert matched(base, expert) == matched(*backwards)


def test_a_tensor_that_no_expert_has_is_the_bases() -> None:
    found = matched({"a": tensor(), "b": tensor()}, {"a": tensor()}, {"a": tensor()})
    assert found.merged == ("a",)
    assert found.kept == {"b": "no expert has it: the base's"}


def test_a_tensor_that_some_experts_lack_is_merged_and_they_are_named() -> None:
    found = matched({"a": tensor()}, {}, {"a": tensor(contents=1)}, {})
    assert found.merged == ("a",)
    assert found.kept["a"] == "expert0, expert2 lack it and count with the base's"


@pytest.mark.parametrize("dtype", ["I64", "U8", "BOOL", "C64", "F8_E8M0", "F8_E4M3FNUZ"])
def test_a_tensor_of_a_dtype_without_arithmetic_is_the_bases(dtype: str) -> None:
    base = {"a": tensor(dtype)}
    assert matched(base, base).kept == {"a": f"{dtype} can't be merged: the base's"}
    assert matched(base, base).merged == ()


def test_experts_whose_integers_differ_are_named() -> None:
    base = {"a": tensor("I64")}
    found = matched(base, base, {"a": tensor("I64", contents=1)})
    assert found.kept == {"a": "I64 can't be merged: the base's, though expert1 differ"}


def test_an_expert_may_have_another_float_dtype() -> None:
    assert matched({"a": tensor("BF16")}, {"a": tensor("F32")}).merged == ("a",)


def test_an_expert_with_integers_in_place_of_floats_is_refused() -> None:
    with pytest.raises(Mismatch, match="tensor a is I8 in expert1") as error:
        matched({"a": tensor()}, {"a": tensor()}, {"a": tensor("I8")})
    assert "unquantised" in error.value.hint


@pytest.mark.parametrize("other", [(3, 4), (12,), (4, 3, 1), (4, 4), ()])
def test_another_shape_is_refused_with_both_shapes(other: tuple[int, ...]) -> None:
    with pytest.raises(Mismatch) as error:
        matched({"a": tensor()}, {"a": tensor(shape=other)})
    message = error.value.message
    assert "tensor a is [4, 3] in base" in message
    assert f"{list(other)} in expert0" in message


def test_a_longer_vocabulary_gets_a_hint_of_its_own() -> None:
    with pytest.raises(Mismatch) as error:
        matched({"embed": tensor(shape=(4, 3))}, {"embed": tensor(shape=(5, 3))})
    assert "vocabulary" in error.value.hint
    with pytest.raises(Mismatch) as error:
        matched({"embed": tensor(shape=(4, 3))}, {"embed": tensor(shape=(4, 2))})
    assert "--base" in error.value.hint


def test_another_shape_of_an_integer_tensor_is_refused_too() -> None:
    with pytest.raises(Mismatch, match="tensor a is"):
        matched({"a": tensor("I64")}, {"a": tensor("I64", shape=(9,))})


def test_an_extra_tensor_is_refused_by_name() -> None:
    with pytest.raises(Mismatch, match="expert expert0 has tensor b, which base base lacks") as e:
        matched({"a": tensor()}, {"a": tensor(), "b": tensor()})
    assert "--ignore-extra" in e.value.hint


def test_many_extra_tensors_are_counted() -> None:
    extra = {f"x{number}": tensor() for number in range(5)}
    with pytest.raises(Mismatch, match=r"tensor x0 and 4 more"):
        matched({"a": tensor()}, {"a": tensor(), **extra})


def test_the_expert_that_is_named_has_the_tensor_that_is_named() -> None:
    one, two = {"a": tensor(), "x": tensor()}, {"a": tensor(), "x": tensor(), "b": tensor()}
    with pytest.raises(Mismatch, match="expert expert0 has tensor x and 1 more"):
        matched({"a": tensor()}, one, two)


def test_extra_tensors_can_be_left_out_and_are_accounted_for() -> None:
    found = matched(
        {"a": tensor()}, {"a": tensor(), "x": tensor()}, {"a": tensor(), "y": tensor("I8")},
        ignore_extra=True,
    )  # fmt: skip
    assert found.merged == ("a",)
    assert found.kept == {
        "x": "only expert0 has it: left out",
        "y": "only expert1 has it: left out",
    }


def test_every_input_tensor_is_accounted_for() -> None:
    base = {"float": tensor(), "int": tensor("I8"), "lonely": tensor()}
    one = {"float": tensor(), "int": tensor("I8"), "x": tensor()}
    two = {"float": tensor(), "y": tensor()}
    found = matched(base, one, two, ignore_extra=True)
    assert set(found.merged) | set(found.kept) == set(base) | set(one) | set(two)


def test_an_extra_tensor_of_several_experts_names_them_all() -> None:
    extra = {"a": tensor(), "x": tensor()}
    found = matched({"a": tensor()}, extra, extra, ignore_extra=True)
    assert found.kept == {"x": "only expert0, expert1 have it: left out"}


def test_scalars_and_empty_tensors_are_matched_like_others() -> None:
    shapes = {"scalar": tensor(shape=()), "empty": tensor(shape=(0, 3))}
    assert matched(shapes, shapes).merged == ("empty", "scalar")


def test_only_those_who_take_part_in_a_tensor_are_asked_for_it() -> None:
    """Slices merge other experts into each layer; the others lack it and count for nothing."""
    both = {"a": tensor(contents=1), "b": tensor(contents=1)}
    models = [model("expert0", {"a": both["a"]}), model("expert1", both)]
    base = model("base", {"a": tensor(), "b": tensor()})
    parts = {"a": (0, 1), "b": (1,)}
    found = match(base, models, ignore_extra=False, participants=parts.__getitem__)
    assert found == Matching(("a", "b"), {})


def test_a_shape_of_who_does_not_take_part_plays_no_part() -> None:
    base = model("base", {"a": tensor()})
    models = [model("expert0", {"a": tensor(shape=(9, 9))}), model("expert1", {"a": tensor()})]
    assert match(base, models, ignore_extra=False, participants=lambda _: (1,)).merged == ("a",)
    with pytest.raises(Mismatch):
        match(base, models, ignore_extra=False, participants=lambda _: (0, 1))


def test_a_tensor_of_the_base_alone_is_merged_where_dtypes_change() -> None:
    base = model("base", {"a": tensor(), "b": tensor(), "n": tensor("I64")})
    found = match(base, [model("expert0", {"a": tensor()})], ignore_extra=False, converts=True)
    assert found.merged == ("a", "b")
    assert found.kept == {
        "b": "no expert has it: the base's",
        "n": "I64 can't be merged: the base's",
    }


def test_a_tensor_has_the_name_that_its_model_gives_it() -> None:
    moved = Model("expert", {}, {}, own_names={"layers.4.w": "layers.1.w"})
    assert moved.own_name("layers.4.w") == "layers.1.w"
    assert moved.own_name("norm.w") == "norm.w"
