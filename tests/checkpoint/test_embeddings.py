"""Tensors with a row per token, and their rows in the output's order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mergegit.checkpoint import embeddings
from mergegit.checkpoint.alignment import LACKS, Alignment, Rows, TokenOption, TokenRow, align
from mergegit.checkpoint.embeddings import (
    Bytes,
    embedding_names,
    gather_rows,
    is_head,
    mean_of_tokens,
)
from mergegit.dtypes import DTYPES
from mergegit.errors import Mismatch
from mergegit.kernels.floats import from_float32, to_float32
from tests.checkpoint.tokenizers import vocabulary

# -- which tensors --------------------------------------------------------------------------------

V, H = 700, 96


@pytest.mark.parametrize(
    "shapes",
    [
        {"model.embed_tokens.weight": (V, H), "lm_head.weight": (V, H)},
        {"model.language_model.embed_tokens.weight": (V, H)},
        {"transformer.wte.weight": (V, H)},
        {"gpt_neox.embed_in.weight": (V, H), "embed_out.weight": (V, H)},
        {"transformer.word_embeddings.weight": (V, H), "lm_head.weight": (V, H)},
        {
            "bert.embeddings.word_embeddings.weight": (V, H),
            "cls.predictions.decoder.weight": (V, H),
            "cls.predictions.decoder.bias": (V,),
            "cls.predictions.bias": (V,),
        },
        {
            "roberta.embeddings.word_embeddings.weight": (V, H),
            "lm_head.decoder.weight": (V, H),
            "lm_head.bias": (V,),
        },
        {"distilbert.embeddings.word_embeddings.weight": (V, H), "vocab_projector.bias": (V,)},
        {
            "shared.weight": (V, H),
            "encoder.embed_tokens.weight": (V, H),
            "decoder.embed_tokens.weight": (V, H),
            "lm_head.weight": (V, H),
        },
        {"backbone.embeddings.weight": (V, H)},
        {"model.tok_embeddings.weight": (V, H), "output.weight": (V, H)},
        {"embedding.word_embeddings.weight": (V, H), "transformer.output_layer.weight": (V, H)},
        {"model.embed_tokens.weight": (V, H), "model.layers.61.shared_head.head.weight": (V, H)},
    ],
)  # fmt: skip
def test_embeddings_and_heads_are_known_by_their_names(shapes: dict[str, tuple[int, ...]]) -> None:
    others = {
        "embeddings.position_embeddings.weight": (512, H),
        "embeddings.token_type_embeddings.weight": (2, H),
        "layers.0.attention.output.dense.weight": (H, H),
        "lm_head.dense.weight": (H, H),
        "lm_head.layer_norm.bias": (H,),
        "layers.0.mlp.up_proj.weight": (V, H),
        "layers.1.mlp.up_proj.weight": (V, H),
        "layers.0.mlp.shared.weight": (64, H),
    }
    assert embedding_names({**others, **shapes}, {}, "math") == tuple(sorted(shapes))


def test_a_size_of_the_config_explains_tensors_of_that_size() -> None:
    shapes = {"model.embed_tokens.weight": (V, H), "visual.merger.weight": (V, V)}
    config = {"vocab_size": V, "vision_config": {"hidden_size": V}}
    assert embedding_names(shapes, config, "math") == ("model.embed_tokens.weight",)
    with pytest.raises(Mismatch, match=r"visual\.merger\.weight of math"):
        embedding_names(shapes, {"vocab_size": V}, "math")


def test_the_width_of_the_embeddings_explains_tensors_of_that_size() -> None:
    shapes = {"embed_tokens.weight": (64, 64), "norm.weight": (64,)}
    assert embedding_names(shapes, {}, "math") == ("embed_tokens.weight",)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"norm.weight": (H,)}, ["no tensor", "math"]),
        (
            {"embed_tokens.weight": (V, H), "lm_head.weight": (V + 1, H)},
            ["embed_tokens.weight", "700 rows", "lm_head.weight has 701"],
        ),
        (
            {"model.embed_tokens.weight": (V, H), "model.embed_tokens_per_layer.weight": (650, H)},
            ["embed_tokens_per_layer.weight"],
        ),
        ({"shared.weight": (V, H), "final_logits_bias": (1, V)}, ["final_logits_bias", "or not"]),
        ({"wte.weight": (V, H), "novel_head.weight": (V, H)}, ["novel_head.weight", "or not"]),
        ({"layers.0.wte.weight": (V, H), "layers.25.linear.bias": (V,)}, ["layers.25.linear.bias"]),
    ],
)
def test_what_stays_open_is_refused(shapes: dict[str, tuple[int, ...]], words: list[str]) -> None:
    with pytest.raises(Mismatch) as caught:
        embedding_names(shapes, {"vocab_size": V}, "math")
    assert all(word in caught.value.message for word in words)


def test_heads_are_told_from_embeddings() -> None:
    heads = ("lm_head.weight", "cls.predictions.decoder.bias", "output.weight", "embed_out.weight")
    inputs = ("model.embed_tokens.weight", "transformer.wte.weight", "emb.weight", "shared.weight")
    assert all(map(is_head, heads))
    assert not any(map(is_head, inputs))


# -- their rows -----------------------------------------------------------------------------------

WIDTH = 5


class Models:
    """Embeddings of several models as raw bytes; says which rows were read."""

    def __init__(self, values: Sequence[npt.NDArray[np.float32]], dtypes: Sequence[str]) -> None:
        self.dtypes = list(dtypes)
        self.raw: list[Bytes] = [
            np.frombuffer(from_float32(v.reshape(-1), d), np.uint8).reshape(len(v), -1)
            for v, d in zip(values, dtypes, strict=True)
        ]
        self.reads: list[tuple[int, list[int]]] = []

    @classmethod
    def random(cls, rows: Sequence[int], dtypes: Sequence[str], width: int = WIDTH) -> Models:
        rng = np.random.default_rng(7)
        return cls([rng.standard_normal((n, width)).astype(np.float32) for n in rows], dtypes)

    def values(self, model: int) -> npt.NDArray[np.float32]:
        flat = to_float32(np.ascontiguousarray(self.raw[model]).reshape(-1), self.dtypes[model])
        return flat.reshape(len(self.raw[model]), -1)

    def read_rows(self, model: int, rows: Rows) -> Bytes:
        assert rows.dtype == np.int64
        assert (np.diff(rows) > 0).all()
        self.reads.append((model, rows.tolist()))
        return self.raw[model][rows]

    def gather(self, alignment: Alignment, model: int, start: int = 0, stop: int | None = None,
               *, width: int = WIDTH, dtype: str | None = None) -> Bytes:  # fmt: skip
        return gather_rows(
            alignment, model, start, alignment.rows if stop is None else stop, elements=width,
            dtypes=self.dtypes, read_rows=self.read_rows, dtype=dtype,
        )  # fmt: skip


BASE = vocabulary("a", "b", "c")
MATH = vocabulary("c", "x", "a", "b")
CODE = vocabulary("x", "y", "c")


def aligned(**options: Any) -> Alignment:
    models = [("base", BASE, 3), ("math", MATH, 4), ("code", CODE, 3)]
    return align(models, base=0, source="union", **options)


def expected(alignment: Alignment, models: Models, model: int) -> npt.NDArray[np.float32]:
    """Row by row, as the fills are described; means in float64."""
    out = []
    for row in range(alignment.rows):
        own = int(alignment.gather[model][row])
        if own != LACKS and row not in alignment.forced:
            out.append(models.values(model)[own].astype(np.float64))
            continue
        fill = alignment.fills[row]
        match fill.kind:
            case "zero":
                out.append(np.zeros(WIDTH))
            case "centre":
                named = models.values(alignment.base)[alignment.named].astype(np.float64)
                out.append(named.mean(axis=0))
            case _:
                rows = [models.values(m)[r].astype(np.float64) for m, r in fill.sources]
                out.append(np.mean(rows, axis=0))
    return np.array(out, np.float32)


OPTIONS: Mapping[str, Any] = {
    "tokens": {
        "a": TokenOption(TokenRow(1, "x"), force=True),
        "<0>": TokenOption("zero"),
        "<new>": TokenOption(TokenRow(2, 1)),
    },
    "pad_to_multiple_of": 16,
}


@pytest.mark.parametrize("model", [0, 1, 2])
def test_rows_are_those_that_the_alignment_describes(model: int) -> None:
    alignment = aligned(**OPTIONS)
    assert {fill.kind for fill in alignment.fills.values()} == {"row", "mean", "zero", "centre"}
    models = Models.random((3, 4, 3), ("F32", "F32", "F32"))
    got = models.gather(alignment, model).view(np.float32)
    np.testing.assert_allclose(got, expected(alignment, models, model), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "I8"])
def test_rows_that_are_there_are_copied_bit_for_bit(dtype: str) -> None:
    alignment = aligned(tokens={"x": TokenOption(TokenRow(1))})
    width = WIDTH * DTYPES[dtype].bits // 8
    rng = np.random.default_rng(3)
    models = Models([], [])
    models.dtypes = [dtype] * 3
    # Every bit pattern there may be, not numbers' alone.
    models.raw = [rng.integers(0, 256, (n, width), np.uint8) for n in (3, 4, 3)]
    got = models.gather(alignment, 0)
    assert got[:3].tobytes() == models.raw[0].tobytes()
    assert got[3].tobytes() == models.raw[1][1].tobytes()
    assert got[4].tobytes() == models.raw[2][1].tobytes()


def test_a_mean_is_rounded_once() -> None:
    alignment = align(
        [("base", vocabulary("b"), 1), *((n, vocabulary("a"), 1) for n in ("p", "q", "r"))],
        base=0,
        source="union",
    )
    # In bf16 the two smaller ones would be lost, one after the other.
    values = [np.full((1, WIDTH), v, np.float32) for v in (0.0, 256.0, 1.0, 1.0)]
    models = Models(values, ["BF16"] * 4)
    got = to_float32(models.gather(alignment, 0)[1].copy(), "BF16")
    assert got.tolist() == [86.0] * WIDTH
    assert math.isclose(258 / 3, 86.0)


def test_rows_of_another_type_are_rounded_to_that_of_the_model() -> None:
    alignment = aligned()
    models = Models.random((3, 4, 3), ("BF16", "F32", "F16"))
    got = models.gather(alignment, 0)
    y = models.values(2)[1]
    assert got[4].tobytes() == from_float32(y, "BF16")
    wide = models.gather(alignment, 0, dtype="F32").view(np.float32)
    np.testing.assert_array_equal(wide[4], y)
    np.testing.assert_array_equal(wide[:3], models.values(0))
    # x is the mean of two models' rows; at full width none of it is lost.
    np.testing.assert_array_equal(wide[3], (models.values(1)[1] + models.values(2)[0]) / 2)


@pytest.mark.parametrize("model", [0, 1, 2])
def test_runs_of_rows_give_what_the_whole_gives(model: int) -> None:
    alignment = aligned(**OPTIONS)
    models = Models.random((3, 4, 3), ("BF16", "BF16", "BF16"))
    whole = models.gather(alignment, model)
    for length in (1, 2, 3, 5):
        runs = [
            models.gather(alignment, model, start, min(start + length, alignment.rows))
            for start in range(0, alignment.rows, length)
        ]
        assert np.concatenate(runs).tobytes() == whole.tobytes()
    assert models.gather(alignment, model, 4, 4).shape == (0, 2 * WIDTH)


def test_only_rows_that_are_needed_are_read_and_each_once() -> None:
    alignment = aligned(tokens={"a": TokenOption(TokenRow(1, "x"), force=True)})
    models = Models.random((3, 4, 3), ("BF16", "BF16", "BF16"))
    models.gather(alignment, 2, 0, 3)
    # a is math's x by force, b the base's, c code's own.
    assert sorted(models.reads) == [(0, [1]), (1, [1]), (2, [2])]
    models.reads.clear()
    models.gather(align([("base", BASE, 3)], base=0, source="base"), 0)
    assert models.reads == [(0, [0, 1, 2])]


def test_padding_reads_the_base_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "CENTRE_ROWS", 2)
    alignment = align([("base", BASE, 3)], base=0, source="base", pad_to_multiple_of=4)
    models = Models.random((3,), ("F32",))
    got = models.gather(alignment, 0, 3, 4).view(np.float32)
    assert models.reads == [(0, [0, 1]), (0, [2])]
    np.testing.assert_allclose(got[0], models.values(0).mean(axis=0), rtol=1e-6)


def test_padding_that_is_given_is_not_read_again() -> None:
    alignment = align([("base", BASE, 3)], base=0, source="base", pad_to_multiple_of=4)
    models = Models.random((3,), ("F32",))
    mean = mean_of_tokens(
        alignment, elements=WIDTH, dtypes=models.dtypes, read_rows=models.read_rows
    )
    models.reads.clear()
    got = gather_rows(
        alignment, 0, 3, 4, elements=WIDTH, dtypes=models.dtypes, read_rows=models.read_rows,
        centre=mean,
    )  # fmt: skip
    assert models.reads == []
    assert got.tobytes() == models.gather(alignment, 0, 3, 4).tobytes() == mean.tobytes()


def test_a_bias_has_rows_of_one_element() -> None:
    alignment = aligned()
    models = Models.random((3, 4, 3), ("F32", "F32", "F32"), width=1)
    got = models.gather(alignment, 1, width=1).view(np.float32)
    assert got.shape == (5, 1)
    assert got[0, 0] == models.values(1)[2, 0]
    assert got[4, 0] == models.values(2)[1, 0]


def test_types_without_arithmetic_are_copied_but_not_converted() -> None:
    models = Models([], [])
    models.dtypes = ["I8", "BF16", "I8"]
    models.raw = [np.zeros((n, w), np.uint8) for n, w in ((3, 5), (4, 10), (3, 5))]
    with pytest.raises(Mismatch, match="I8"):
        models.gather(aligned(), 0)


def test_a_reader_that_gives_too_little_is_caught() -> None:
    alignment = align([("base", BASE, 3)], base=0, source="base")

    def short(model: int, rows: Rows) -> Bytes:
        return np.zeros((len(rows) - 1, 10), np.uint8)

    with pytest.raises(ValueError):
        gather_rows(alignment, 0, 0, 3, elements=5, dtypes=["BF16"], read_rows=short)
