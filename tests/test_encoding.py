"""Objects as canonical bytes: round trips, one spelling, frozen ids, and hostile bytes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegit.dtypes import DTYPES, byte_length
from mergegit.encoding import (
    FORMAT_VERSION,
    Object,
    canonical_json,
    decode,
    encode,
    hash_block,
    hash_object,
    round_error,
)
from mergegit.errors import Damaged
from mergegit.objects import (
    BLOCK_ELEMENTS,
    Commit,
    CommitId,
    ExpertPlan,
    Manifest,
    ManifestId,
    Plan,
    PlanId,
    Shard,
    Tensor,
    TensorId,
    block_count,
)

IDS = st.binary(min_size=32, max_size=32)
TEXTS = st.text(max_size=12)
SIZES = st.integers(0, 1 << 50)
ERRORS = st.floats(0, 2, allow_nan=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
FACTS = st.dictionaries(TEXTS, JSON, max_size=3)


def _fills_bytes(dtype: str, shape: tuple[int, ...]) -> bool:
    return math.prod(shape) * DTYPES[dtype].bits % 8 == 0


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 1500), max_size=3)))
    if not _fills_bytes(dtype, shape):
        dtype = "BF16"
    count = block_count(math.prod(shape)) if math.prod(shape) < 8 * BLOCK_ELEMENTS else 0
    if count == 0 and math.prod(shape):
        shape, count = (7,), 1
        dtype = "U8"
    return Tensor(dtype, shape, draw(st.binary(min_size=32 * count, max_size=32 * count)))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    ids = st.dictionaries(TEXTS, IDS.map(TensorId), max_size=3)
    model = draw(ids)
    shards = []
    for _ in range(draw(st.integers(0, 2))):
        strays = draw(ids)
        names = draw(st.permutations(sorted({*model, *strays})))
        path = draw(TEXTS)
        shards.append(Shard(path, TensorId(draw(IDS)), tuple(names), strays))
    return Manifest(model, tuple(shards), draw(ids), tuple(draw(st.lists(TEXTS, max_size=2))))


COMMITS = st.builds(
    Commit,
    IDS.map(ManifestId),
    st.lists(IDS.map(CommitId), max_size=3).map(tuple),
    TEXTS,
    st.integers(-(1 << 40), 1 << 40),
    st.text(max_size=40),
    st.none() | FACTS,
    st.none() | IDS.map(PlanId),
    st.none() | FACTS,
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    blocks = draw(st.integers(0, 5))
    expert = st.builds(
        ExpertPlan,
        TEXTS,
        IDS.map(CommitId),
        SIZES,
        SIZES,
        st.lists(SIZES, max_size=4).map(tuple),
        SIZES,
        SIZES,
        SIZES,
        ERRORS,
        st.binary(min_size=blocks, max_size=blocks),
    )
    return Plan(
        draw(FACTS),
        CommitId(draw(IDS)),
        tuple(draw(st.lists(TEXTS, max_size=3))),
        draw(st.dictionaries(TEXTS, TEXTS, max_size=3)),
        draw(SIZES),
        draw(st.none() | SIZES),
        draw(SIZES),
        draw(SIZES),
        draw(SIZES),
        draw(ERRORS),
        draw(ERRORS),
        draw(st.none() | ERRORS),
        tuple(draw(st.lists(expert, max_size=3))),
    )


OBJECTS: st.SearchStrategy[Object] = st.one_of(tensors(), manifests(), COMMITS, plans())

TENSOR = Tensor("BF16", (2, BLOCK_ELEMENTS // 2 + 1), b"\x01" * 32 + b"\x02" * 32)
MANIFEST = Manifest(
    tensors={"w": TensorId(b"\x03" * 32), "é": TensorId(b"\x04" * 32)},
    shards=(
        Shard("model.safetensors", TensorId(b"\x05" * 32), ("é", "w")),
        Shard("b/x.safetensors", TensorId(b"\x06" * 32), ("w",), {"w": TensorId(b"\x07" * 32)}),
    ),
    files={"config.json": TensorId(b"\x08" * 32)},
    directories=("empty",),
)
COMMIT = Commit(
    manifest=ManifestId(b"\x09" * 32),
    parents=(CommitId(b"\x0a" * 32), CommitId(b"\x0b" * 32)),
    author="Ada <ada@example.org>",
    time=1_700_000_000,
    message="merge math and code\n\nwith ties",
    recipe={"method": "ties", "parameters": {"density": 0.5}},
    plan=PlanId(b"\x0c" * 32),
    execution={"seconds": 1.5, "read_bytes": 1024},
)
PLAN = Plan(
    recipe={"method": "ties"},
    base=CommitId(b"\x0d" * 32),
    tensors=("w", "é"),
    kept={"ids": "its dtype is I64"},
    raw_bytes=4096,
    budget_bytes=512,
    planned_bytes=500,
    base_bytes=2048,
    write_bytes=2048,
    merged_norm=1.5,
    predicted_error=0.125,
    error_bound=None,
    experts=(
        ExpertPlan(
            ref="math",
            commit=CommitId(b"\x0e" * 32),
            raw_bytes=4096,
            planned_bytes=500,
            layer_bytes=(400, 100),
            blocks_read=2,
            blocks_free=1,
            blocks_skipped=0,
            predicted_error=0.25,
            layers=b"\x02\x01\x00",
        ),
    ),
)
EVERY_KIND: tuple[Object, ...] = (TENSOR, MANIFEST, COMMIT, PLAN)

every_kind = pytest.mark.parametrize(
    "value", EVERY_KIND, ids=lambda value: type(value).__name__.lower()
)


def respelled(value: Object, **facts: object) -> bytes:
    """The bytes of an object with some facts replaced."""
    first, line, payload = encode(value).split(b"\n", 2)
    return b"\n".join((first, canonical_json({**json.loads(line), **facts}), payload))


@settings(max_examples=150, deadline=None)
@given(OBJECTS)
def test_what_is_encoded_comes_back(value: Object) -> None:
    assert decode(encode(value)) == value


@settings(max_examples=50, deadline=None)
@given(OBJECTS)
def test_what_comes_back_has_the_same_id(value: Object) -> None:
    data = encode(value)
    assert hash_object(encode(decode(data))) == hash_object(data)


@settings(max_examples=30, deadline=None)
@given(manifests(), st.randoms())
def test_the_order_of_a_mapping_does_not_change_the_id(value: Manifest, random: Any) -> None:
    items = list(value.tensors.items())
    random.shuffle(items)
    assert encode(replace(value, tensors=dict(items))) == encode(value)


def test_the_order_of_shards_and_parents_changes_the_id() -> None:
    shards = MANIFEST.shards[::-1]
    assert encode(replace(MANIFEST, shards=shards)) != encode(MANIFEST)
    assert encode(replace(COMMIT, parents=COMMIT.parents[::-1])) != encode(COMMIT)


def test_objects_of_different_kinds_never_share_bytes() -> None:
    assert [encode(value).split(b" ")[0] for value in EVERY_KIND] == [
        b"tensor",
        b"manifest",
        b"commit",
        b"plan",
    ]


# -- frozen by these: a change here makes every repository unreadable ------------------------------


def test_the_bytes_of_a_tensor_are_frozen() -> None:
    assert encode(TENSOR) == (
        b'tensor 1\n{"dtype":"BF16","shape":[2,262145]}\n' + b"\x01" * 32 + b"\x02" * 32
    )


def test_the_bytes_of_a_commit_are_frozen() -> None:
    assert encode(COMMIT) == (
        b'commit 1\n{"author":"Ada <ada@example.org>",'
        b'"execution":{"read_bytes":1024,"seconds":1.5},'
        b'"manifest":"' + b"09" * 32 + b'","message":"merge math and code\\n\\nwith ties",'
        b'"parents":["' + b"0a" * 32 + b'","' + b"0b" * 32 + b'"],'
        b'"plan":"' + b"0c" * 32 + b'",'
        b'"recipe":{"method":"ties","parameters":{"density":0.5}},"time":1700000000}\n'
    )


def test_the_bytes_of_a_manifest_are_frozen() -> None:
    assert encode(MANIFEST) == (
        b'manifest 1\n{"directories":["empty"],"files":{"config.json":"' + b"08" * 32 + b'"},'
        b'"shards":[{"header":"' + b"05" * 32 + b'","names":["\xc3\xa9","w"],'
        b'"path":"model.safetensors","strays":{}},'
        b'{"header":"' + b"06" * 32 + b'","names":["w"],"path":"b/x.safetensors",'
        b'"strays":{"w":"' + b"07" * 32 + b'"}}],'
        b'"tensors":{"w":"' + b"03" * 32 + b'","\xc3\xa9":"' + b"04" * 32 + b'"}}\n'
    )


def test_the_bytes_of_a_plan_are_frozen() -> None:
    assert encode(PLAN) == (
        b'plan 1\n{"base":"' + b"0d" * 32 + b'","base_bytes":2048,"budget_bytes":512,'
        b'"error_bound":null,"experts":[{"blocks_free":1,"blocks_read":2,"blocks_skipped":0,'
        b'"commit":"' + b"0e" * 32 + b'","layer_bytes":[400,100],"planned_bytes":500,'
        b'"predicted_error":0.25,"raw_bytes":4096,"ref":"math"}],'
        b'"kept":{"ids":"its dtype is I64"},"merged_norm":1.5,"planned_bytes":500,'
        b'"predicted_error":0.125,"raw_bytes":4096,"recipe":{"method":"ties"},"tensors":["w","\xc3\xa9"],'
        b'"write_bytes":2048}\n\x02\x01\x00'
    )


@pytest.mark.parametrize(
    ("value", "object_id"),
    [
        (TENSOR, "ca8def7f1993f1707aa8a79648c938e395cc521663aa1642776dc07f72bc4d27"),
        (MANIFEST, "c1f1ef6292d0a0b46593b5e483822ae2704e15a5e379eb8929a29797f866d7bc"),
        (COMMIT, "3e2d537d452d1518c63f9548f09fa78e2ec020b3456df4405d3c1186b8dde5d6"),
        (PLAN, "4a0366decbbebd15f01cc4c327fd10793d953b3ece956bbb845e5ed885756bc4"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__.lower(),
)
def test_ids_are_frozen(value: Object, object_id: str) -> None:
    assert hash_object(encode(value)).hex() == object_id


def test_a_blocks_id_is_the_blake3_hash_of_its_bytes() -> None:
    assert (
        hash_block(b"").hex() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    )
    assert (
        hash_block(memoryview(b"abc")).hex()
        == "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
    )


def test_the_format_is_version_one() -> None:
    assert FORMAT_VERSION == 1


# -- one spelling ---------------------------------------------------------------------------------


def test_json_is_sorted_and_tight_and_keeps_its_letters() -> None:
    assert canonical_json({"b": [1, 2.5], "a": "é"}) == b'{"a":"\xc3\xa9","b":[1,2.5]}'


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_json_has_no_numbers_that_json_lacks(number: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"a": number})


@every_kind
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b" 1\n", b" 01\n"),
        (b" 1\n", b" +1\n"),
        (b" 1\n", b" 1\r\n"),
        (b"\n{", b"\n {"),
        (b'":', b'": '),
        (b"}\n", b"} \n"),
        (b'"\\u', b'"\\U'),
    ],
)
def test_another_spelling_of_the_same_facts_is_refused(
    value: Object, old: bytes, new: bytes
) -> None:
    data = encode(value)
    if old not in data:
        data, old, new = data, b'"', b'"\\u0000'
    with pytest.raises(Damaged):
        decode(data.replace(old, new, 1))


def test_keys_out_of_order_are_refused() -> None:
    payload = b"\x01" * 32
    with pytest.raises(Damaged):
        decode(b'tensor 1\n{"shape":[1],"dtype":"U8"}\n' + payload)


def test_a_key_that_stands_twice_is_refused() -> None:
    with pytest.raises(Damaged):
        decode(b'tensor 1\n{"dtype":"F32","dtype":"U8","shape":[1]}\n' + b"\x01" * 32)


def test_a_key_that_means_nothing_is_refused() -> None:
    with pytest.raises(Damaged):
        decode(respelled(TENSOR, more=1))


def test_ids_in_capitals_are_refused() -> None:
    with pytest.raises(Damaged):
        decode(respelled(COMMIT, manifest="0A" * 32))


def test_a_number_stands_for_itself_alone() -> None:
    with pytest.raises(Damaged):
        decode(respelled(COMMIT, time="1700000000"))


def test_whole_numbers_among_errors_are_written_as_the_floats_they_are() -> None:
    plan = replace(PLAN, merged_norm=2, predicted_error=0, error_bound=1)
    assert decode(encode(plan)) == plan


# -- hostile bytes --------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [TENSOR, MANIFEST, COMMIT, replace(PLAN, experts=())])
def test_a_payload_that_does_not_belong_is_refused(value: Object) -> None:
    with pytest.raises(Damaged):
        decode(encode(value) + b"!!")


@every_kind
def test_every_truncation_of_the_facts_is_refused(value: Object) -> None:
    data = encode(value)
    for length in range(data.rindex(b"}\n") + 1):
        with pytest.raises(Damaged):
            decode(data[:length])


@every_kind
def test_a_newer_version_is_refused(value: Object) -> None:
    with pytest.raises(Damaged, match="version 2"):
        decode(encode(value).replace(b" 1\n", b" 2\n", 1))


@every_kind
def test_every_missing_fact_is_noticed(value: Object) -> None:
    first, line, payload = encode(value).split(b"\n", 2)
    facts = json.loads(line)
    for key in facts:
        rest = {name: fact for name, fact in facts.items() if name != key}
        with pytest.raises(Damaged):
            decode(b"\n".join((first, canonical_json(rest), payload)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n\n",
        b"tensor\n{}\n",
        b"tree 1\n{}\n",
        b"tensor 1\n[]\n",
        b"tensor 1\nnull\n",
        b"\xff\xfe 1\n{}\n",
        b"commit 1\n" + b"[" * 100_000 + b"\n",
        b"commit 1\n" + b'{"a":' * 100_000 + b"\n",
        b'tensor 1\n{"dtype":"U8","shape":[' + b"9" * 5000 + b"]}\n",
    ],
    ids=lambda data: repr(data[:14]),
)
def test_bytes_that_are_no_object_are_refused(data: bytes) -> None:
    with pytest.raises(Damaged):
        decode(data)


@pytest.mark.parametrize(
    "facts",
    [
        {"dtype": "F128"},
        {"dtype": ["BF16"]},
        {"shape": [-1, -524290]},
        {"shape": [2.0, 262145.0]},
        {"shape": [True, 524290]},
        {"shape": 524290},
        {"shape": [1 << 300]},
        {"shape": [3]},
    ],
    ids=str,
)
def test_a_tensor_that_can_not_be_is_refused(facts: dict[str, object]) -> None:
    with pytest.raises(Damaged):
        decode(respelled(TENSOR, **facts))


def test_a_tensor_that_lacks_a_block_is_refused() -> None:
    with pytest.raises(Damaged, match="blocks"):
        decode(encode(TENSOR)[:-32])


def test_a_tensor_that_ends_inside_a_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="whole bytes"):
        byte_length("F4", 3)
    with pytest.raises(Damaged):
        decode(b'tensor 1\n{"dtype":"F4","shape":[3]}\n' + b"\x01" * 32)


@pytest.mark.parametrize(
    "facts",
    [
        {"tensors": {"w": "03" * 31}},
        {"tensors": {"w": 3}},
        {"tensors": {"é": "04" * 32}},
        {"tensors": []},
        {"shards": {"a": 1}},
        {"shards": [{"path": 1, "header": "05" * 32, "names": [], "strays": {}}]},
        {"shards": [{"path": "x", "header": "zz" * 32, "names": [], "strays": {}}]},
        {"shards": [{"path": "x", "header": "05" * 32, "names": [1], "strays": {}}]},
        {"shards": [{"path": "x", "header": "05" * 32, "names": ["gone"], "strays": {}}]},
        {"directories": "empty"},
        {"directories": [None]},
    ],
    ids=str,
)
def test_a_manifest_that_can_not_be_is_refused(facts: dict[str, object]) -> None:
    with pytest.raises(Damaged):
        decode(respelled(MANIFEST, **facts))


@pytest.mark.parametrize(
    "facts",
    [
        {"manifest": None},
        {"manifest": "09" * 33},
        {"parents": "0a" * 32},
        {"parents": ["0a"]},
        {"author": 7},
        {"time": 1.5},
        {"time": None},
        {"message": ["a"]},
        {"plan": 12},
        {"plan": ""},
    ],
    ids=str,
)
def test_a_commit_that_can_not_be_is_refused(facts: dict[str, object]) -> None:
    with pytest.raises(Damaged):
        decode(respelled(COMMIT, **facts))


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"NaN", b"Infinity"])
@pytest.mark.parametrize("fact", [b'"time":1700000000', b'"read_bytes":1024'])
def test_a_commit_with_a_number_without_end_is_refused(number: bytes, fact: bytes) -> None:
    name = fact.partition(b":")[0]
    data = encode(COMMIT)
    assert fact in data
    with pytest.raises(Damaged):
        decode(data.replace(fact, name + b":" + number))


def test_half_a_surrogate_pair_is_refused() -> None:
    data = encode(COMMIT)
    with pytest.raises(Damaged):
        decode(data.replace(b"merge math", b"\\ud800 math"))


@pytest.mark.parametrize(
    "facts",
    [
        {"experts": []},
        {"experts": {"a": 1}},
        {"experts": [{}]},
        {"experts": "math"},
        {"kept": []},
        {"kept": {"ids": 1}},
        {"budget_bytes": "all"},
        {"predicted_error": "none"},
        {"tensors": [1]},
    ],
    ids=str,
)
def test_a_plan_that_can_not_be_is_refused(facts: dict[str, object]) -> None:
    with pytest.raises(Damaged):
        decode(respelled(PLAN, **facts))


def test_a_plan_whose_layers_can_not_be_shared_out_is_refused() -> None:
    plan = replace(PLAN, experts=PLAN.experts * 2)
    with pytest.raises(Damaged, match="layers"):
        decode(encode(plan)[:-1])


def _decodes_or_is_damaged(data: bytes) -> None:
    """Decoding gives the one object that these bytes spell, or ``Damaged``; nothing else."""
    try:
        value = decode(data)
    except Damaged:
        return
    assert encode(value) == data


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_changed_bytes_never_raise_anything_else(data: st.DataObject) -> None:
    raw = bytearray(encode(data.draw(st.sampled_from(EVERY_KIND))))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        length = data.draw(st.integers(0, 4))
        raw[at : at + length] = data.draw(st.binary(max_size=4))
    _decodes_or_is_damaged(bytes(raw))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(EVERY_KIND), st.data())
def test_changed_facts_never_raise_anything_else(value: Object, data: st.DataObject) -> None:
    first, line, payload = encode(value).split(b"\n", 2)
    facts = json.loads(line)
    key = data.draw(st.sampled_from(sorted(facts)))
    facts[key] = data.draw(JSON)
    payload = data.draw(st.just(payload) | st.binary(max_size=64))
    _decodes_or_is_damaged(b"\n".join((first, canonical_json(facts), payload)))


# -- errors as plans state them -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "stated"),
    [(0.123456789, 0.123457), (0.0, 0.0), (1e-9, 1e-9), (math.inf, 1.0), (math.nan, 1.0)],
)
def test_an_error_has_six_digits_and_is_never_without_end(value: float, stated: float) -> None:
    assert round_error(value) == stated
