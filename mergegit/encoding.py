"""Objects as canonical bytes, and ids.

An object is one line that names its kind and version, one line of canonical JSON (sorted keys, no
spaces, UTF-8), and for some kinds a payload of bytes. Its id is the BLAKE3 hash of the whole. A
block's id is the hash of its raw bytes alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from blake3 import blake3

from mergegit.dtypes import DTYPES, byte_length
from mergegit.errors import Damaged
from mergegit.objects import (
    ID_BYTES,
    BlockId,
    Commit,
    CommitId,
    ExpertPlan,
    Manifest,
    ManifestId,
    ObjectId,
    Plan,
    PlanId,
    Shard,
    Tensor,
    TensorId,
    block_count,
)

FORMAT_VERSION: Final = 1
"""Version of everything in ``.mergegit``. A repository with a higher one is refused."""

OBJECT_VERSION: Final = 1
MAX_OBJECT_BYTES: Final = 1 << 30
"""The largest object that is read. A tensor of 10^12 elements needs 61 MB."""

Object = Tensor | Manifest | Commit | Plan


def hash_block(data: bytes | bytearray | memoryview) -> BlockId:
    """The id of a block with these raw little-endian bytes."""
    return BlockId(blake3(data).digest())


def hash_object(data: bytes) -> bytes:
    """The id of an object with these canonical bytes."""
    return blake3(data).digest()


def canonical_json(value: object) -> bytes:
    """JSON with one spelling: sorted keys, no spaces, UTF-8, no NaN."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def encode(value: Object) -> bytes:
    """The canonical bytes of an object."""
    kind = type(value).__name__.lower()
    facts, payload = _ENCODERS[kind](value)
    return b"%s %d\n%s\n%s" % (kind.encode(), OBJECT_VERSION, canonical_json(facts), payload)


def decode(data: bytes) -> Object:
    """The object that ``data`` encodes. Raises ``Damaged`` where it is not one.

    An object has one spelling, as one id: other bytes that say the same are refused.
    """
    try:
        first, facts, payload = data.split(b"\n", 2)
        kind, version = first.decode("ascii").split(" ")
        if int(version) != OBJECT_VERSION:
            raise ValueError(f"version {version}")
        value = _DECODERS[kind](json.loads(facts), payload)
        if encode(value) != data:
            raise ValueError("not in canonical form")
        return value
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise Damaged(
            f"an object of the store can't be read ({type(error).__name__}: {error})",
            hint="run `mergegit fsck` to see what is affected",
        ) from error


def _encode_tensor(value: Tensor) -> tuple[object, bytes]:
    return {"dtype": value.dtype, "shape": list(value.shape)}, value.block_ids


def _decode_tensor(facts: dict[str, Any], payload: bytes) -> Tensor:
    tensor = Tensor(facts["dtype"], tuple(facts["shape"]), payload)
    if tensor.dtype not in DTYPES:
        raise ValueError(f"dtype {tensor.dtype!r}")
    if not all(type(n) is int and n >= 0 for n in facts["shape"]):
        raise ValueError(f"shape {tensor.shape}")
    if len(payload) != ID_BYTES * block_count(tensor.elements):
        raise ValueError("number of blocks")
    byte_length(tensor.dtype, tensor.elements)
    return tensor


def _encode_manifest(value: Manifest) -> tuple[object, bytes]:
    shards = [
        {
            "path": shard.path,
            "header": shard.header.hex(),
            "names": list(shard.names),
            "strays": _hex_values(shard.strays),
        }
        for shard in value.shards
    ]
    facts = {
        "tensors": _hex_values(value.tensors),
        "shards": shards,
        "files": _hex_values(value.files),
        "directories": list(value.directories),
    }
    return facts, b""


def _decode_manifest(facts: dict[str, Any], payload: bytes) -> Manifest:
    _no_payload(payload)
    shards = tuple(
        Shard(
            path=_text(shard["path"]),
            header=TensorId(_id(shard["header"])),
            names=tuple(_text(name) for name in shard["names"]),
            strays=_tensor_ids(shard["strays"]),
        )
        for shard in facts["shards"]
    )
    manifest = Manifest(
        tensors=_tensor_ids(facts["tensors"]),
        shards=shards,
        files=_tensor_ids(facts["files"]),
        directories=tuple(_text(path) for path in facts["directories"]),
    )
    for shard in shards:
        for name in shard.names:
            manifest.tensor_of(shard, name)
    return manifest


def _encode_commit(value: Commit) -> tuple[object, bytes]:
    facts = {
        "manifest": value.manifest.hex(),
        "parents": [parent.hex() for parent in value.parents],
        "author": value.author,
        "time": value.time,
        "message": value.message,
        "recipe": value.recipe,
        "plan": value.plan.hex() if value.plan else None,
        "execution": value.execution,
    }
    return facts, b""


def _decode_commit(facts: dict[str, Any], payload: bytes) -> Commit:
    _no_payload(payload)
    return Commit(
        manifest=ManifestId(_id(facts["manifest"])),
        parents=tuple(CommitId(_id(parent)) for parent in facts["parents"]),
        author=_text(facts["author"]),
        time=int(facts["time"]),
        message=_text(facts["message"]),
        recipe=facts["recipe"],
        plan=PlanId(_id(facts["plan"])) if facts["plan"] else None,
        execution=facts["execution"],
    )


def _encode_plan(value: Plan) -> tuple[object, bytes]:
    experts = [
        {
            "ref": expert.ref,
            "commit": expert.commit.hex(),
            "raw_bytes": expert.raw_bytes,
            "planned_bytes": expert.planned_bytes,
            "layer_bytes": list(expert.layer_bytes),
            "blocks_read": expert.blocks_read,
            "blocks_free": expert.blocks_free,
            "blocks_skipped": expert.blocks_skipped,
            "predicted_error": float(expert.predicted_error),
        }
        for expert in value.experts
    ]
    facts = {
        "recipe": value.recipe,
        "base": value.base.hex(),
        "tensors": list(value.tensors),
        "kept": value.kept,
        "raw_bytes": value.raw_bytes,
        "budget_bytes": value.budget_bytes,
        "planned_bytes": value.planned_bytes,
        "base_bytes": value.base_bytes,
        "write_bytes": value.write_bytes,
        "merged_norm": float(value.merged_norm),
        "predicted_error": float(value.predicted_error),
        "error_bound": None if value.error_bound is None else float(value.error_bound),
        "experts": experts,
    }
    return facts, b"".join(expert.layers for expert in value.experts)


def _decode_plan(facts: dict[str, Any], payload: bytes) -> Plan:
    count = len(facts["experts"])
    blocks = len(payload) // count if count else 0
    if blocks * count != len(payload):
        raise ValueError("length of the plan's layers")
    experts = tuple(
        ExpertPlan(
            ref=_text(expert["ref"]),
            commit=CommitId(_id(expert["commit"])),
            raw_bytes=int(expert["raw_bytes"]),
            planned_bytes=int(expert["planned_bytes"]),
            layer_bytes=tuple(int(n) for n in expert["layer_bytes"]),
            blocks_read=int(expert["blocks_read"]),
            blocks_free=int(expert["blocks_free"]),
            blocks_skipped=int(expert["blocks_skipped"]),
            predicted_error=float(expert["predicted_error"]),
            layers=payload[index * blocks : (index + 1) * blocks],
        )
        for index, expert in enumerate(facts["experts"])
    )
    budget, bound = facts["budget_bytes"], facts["error_bound"]
    return Plan(
        recipe=facts["recipe"],
        base=CommitId(_id(facts["base"])),
        tensors=tuple(_text(name) for name in facts["tensors"]),
        kept={_text(name): _text(why) for name, why in facts["kept"].items()},
        raw_bytes=int(facts["raw_bytes"]),
        budget_bytes=None if budget is None else int(budget),
        planned_bytes=int(facts["planned_bytes"]),
        base_bytes=int(facts["base_bytes"]),
        write_bytes=int(facts["write_bytes"]),
        merged_norm=float(facts["merged_norm"]),
        predicted_error=float(facts["predicted_error"]),
        error_bound=None if bound is None else float(bound),
        experts=experts,
    )


def round_error(value: float) -> float:
    """A predicted error as plans state it: six significant digits, the same on every machine."""
    return float(f"{value:.6g}") if math.isfinite(value) else 1.0


def _hex_values(ids: Mapping[str, TensorId]) -> dict[str, str]:
    return {name: tensor.hex() for name, tensor in ids.items()}


def _tensor_ids(values: Mapping[str, str]) -> dict[str, TensorId]:
    return {_text(name): TensorId(_id(value)) for name, value in values.items()}


def _no_payload(payload: bytes) -> None:
    if payload:
        raise ValueError("payload")


def _id(text: str) -> bytes:
    data = bytes.fromhex(text)
    if len(data) != ID_BYTES:
        raise ValueError(f"id of {len(data)} bytes")
    return data


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where text was expected")
    return value


_ENCODERS: dict[str, Callable[[Any], tuple[object, bytes]]] = {
    "tensor": _encode_tensor,
    "manifest": _encode_manifest,
    "commit": _encode_commit,
    "plan": _encode_plan,
}
_DECODERS: dict[str, Callable[[dict[str, Any], bytes], Object]] = {
    "tensor": _decode_tensor,
    "manifest": _decode_manifest,
    "commit": _decode_commit,
    "plan": _decode_plan,
}

__all__ = [
    "FORMAT_VERSION",
    "MAX_OBJECT_BYTES",
    "Object",
    "ObjectId",
    "canonical_json",
    "decode",
    "encode",
    "hash_block",
    "hash_object",
    "round_error",
]
