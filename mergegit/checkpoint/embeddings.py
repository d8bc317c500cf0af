"""The tensors with one row per token: which they are, and their rows in the output's order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mergegit.checkpoint.alignment import LACKS, Alignment, Fill, Rows
from mergegit.dtypes import DTYPES, byte_length
from mergegit.errors import Mismatch
from mergegit.kernels.floats import from_float32, to_float32

Bytes = npt.NDArray[np.uint8]
ReadRows = Callable[[int, Rows], Bytes]
"""Given a model's index and rows of it (int64, ascending, each once), the raw little-endian bytes
of these rows: uint8 (rows, bytes of a row)."""

CENTRE_ROWS: Final = 4096
"""Rows that are read at a time for the mean of all."""

_INPUT: Final = (
    "embed_tokens", "embed_tokens_per_layer", "embed_in", "wte", "word_embeddings",
    "word_embedding", "tok_embeddings", "token_embedding", "tokens_embed", "shared",
    "embeddings", "embedding",
)  # fmt: skip
_HEAD: Final = (
    "lm_head", "lm_head.decoder", "lm_head.linear", "embed_out", "output_layer", "vocab_projector",
    "cls.predictions", "cls.predictions.decoder", "generator_lm_head", "lm_loss",
    "pred_layer.proj", "shared_head.head",
)  # fmt: skip
_WHOLE: Final = ("emb", "output", "model.output", "head", "decoder", "proj_out")
"""Embeddings and heads in some models; elsewhere such names end those of other layers."""
_IN_BLOCK: Final = ("embed_tokens.weight", "wte.weight", "shared_head.head.weight")
"""Those that stand in a numbered block: of models with several, or of Phi's first form."""


def _either(names: Sequence[str]) -> str:
    return "|".join(re.escape(name) for name in names)


_BY_TOKEN: Final = re.compile(
    rf"(?:.*\.)?(?:{_either(_INPUT)})\.weight"
    rf"|(?:.*\.)?(?:{_either(_HEAD)})\.(?:weight|bias)"
    rf"|(?:{_either(_WHOLE)})\.(?:weight|bias)"
)
_IS_INPUT: Final = re.compile(rf"(?:.*\.)?(?:{_either(_INPUT)})\.weight|emb\.(?:weight|bias)")
_NUMBER: Final = re.compile(r"\.\d+(?=\.)")


def _is_by_token(name: str) -> bool:
    if _NUMBER.search(name):
        return name.endswith(tuple(f".{known}" for known in _IN_BLOCK))
    return _BY_TOKEN.fullmatch(name) is not None


def is_head(name: str) -> bool:
    """Whether a tensor with a row per token is the model's output, and not its input."""
    return _IS_INPUT.fullmatch(name) is None


def embedding_names(
    shapes: Mapping[str, Sequence[int]], config: Mapping[str, Any], of: str
) -> tuple[str, ...]:
    """Names of the tensors of model ``of`` that have one row per token, in order.

    They are known by their names, and must all have the same number of rows. ``config`` is the
    model's config.json, parsed, or empty: a size that is found in it explains other tensors with
    as many rows. Raises ``Mismatch`` where names and shapes leave it open, and names the tensors.
    """
    found = {
        name: shape[0]
        for name, shape in sorted(shapes.items())
        if len(shape) in (1, 2) and _is_by_token(name)
    }
    if not found:
        raise Mismatch(
            f"no tensor of {of} is known to have a row for each token",
            hint="merge it without a tokenizer in the recipe",
        )
    rows = next(iter(found.values()))
    odd = [name for name, count in found.items() if count != rows]
    if odd:
        first = next(iter(found))
        raise Mismatch(
            f"{first} of {of} has {rows:,} rows, but {_counted(odd, found)}: one vocabulary "
            "can't be both's",
            hint="merge it without a tokenizer in the recipe",
        )
    explained = set(_sizes(config)) | {shapes[name][1] for name in found if len(shapes[name]) == 2}
    if rows not in explained:
        # What many blocks have is a matter of their width, and not of the tokens.
        alike = Counter(_NUMBER.sub(".*", name) for name in shapes)
        unknown = [
            name
            for name, shape in sorted(shapes.items())
            if rows in shape and name not in found and alike[_NUMBER.sub(".*", name)] == 1
        ]
        if unknown:
            raise Mismatch(
                f"{_listed(unknown)} of {of} may have a row for each of {rows:,} tokens, or not",
                hint="merge it without a tokenizer in the recipe",
            )
    return tuple(found)


def _sizes(config: Mapping[str, Any]) -> Iterator[int]:
    """Every number of a config that is no vocabulary's size."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _sizes(value)
        elif isinstance(value, int) and "vocab" not in key:
            yield value


def _counted(names: Sequence[str], rows: Mapping[str, int]) -> str:
    return ", ".join(f"{name} has {rows[name]:,}" for name in names)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def gather_rows(
    alignment: Alignment,
    model: int,
    start: int,
    stop: int,
    *,
    elements: int,
    dtypes: Sequence[str],
    read_rows: ReadRows,
    dtype: str | None = None,
    centre: npt.NDArray[np.float32] | None = None,
) -> Bytes:
    """Output rows ``start`` to ``stop`` of one tensor of one model, as the merge is to see them.

    A row has ``elements`` elements (1 for a bias). ``dtypes`` are the element types that the tensor
    has in each model, ``dtype`` that of the result, by default the model's own. ``read_rows`` is
    called at most once for each model whose rows are needed. Padding is ``centre``, which
    ``mean_of_tokens`` gives; it is asked for it where it is needed and not given. Returns uint8
    (stop - start, bytes of a row).

    A row that is in some model already is that row bit for bit, where the type is the same; means
    are taken in float32, in the order of the models, and all is rounded once. Raises ``Mismatch``
    where a type would have to be converted that can't be.
    """
    into = dtype or dtypes[model]
    taken = alignment.gather[model][start:stop].copy()
    taken[[row - start for row in alignment.forced if start <= row < stop]] = LACKS
    own = np.flatnonzero(taken != LACKS)
    gaps = {int(at): alignment.fills[start + int(at)] for at in np.flatnonzero(taken == LACKS)}
    copies = _copies(gaps)
    if len(own):
        places, rows = copies.get(model, (own[:0], own[:0]))
        copies[model] = np.concatenate([own, places]), np.concatenate([taken[own], rows])
    read = _Read(copies, gaps.values(), elements, dtypes, read_rows)
    out = np.zeros((stop - start, byte_length(into, elements)), np.uint8)
    for source, (places, rows) in copies.items():
        out[places] = read.rows(source, rows, into)
    padding: Bytes | None = None
    for place, fill in gaps.items():
        if fill.kind == "mean":
            out[place] = _encode(read.mean(fill.sources), into, alignment.names[model])
        elif fill.kind == "centre":
            if padding is None:
                if centre is None:
                    centre = mean_of_tokens(
                        alignment, elements=elements, dtypes=dtypes, read_rows=read_rows
                    )
                padding = _encode(centre, into, alignment.names[model])
            out[place] = padding
    return out


def _copies(gaps: Mapping[int, Fill]) -> dict[int, tuple[Rows, Rows]]:
    """Gaps that take one row each: by its model, their places and the rows."""
    copies: dict[int, tuple[list[int], list[int]]] = {}
    for place, fill in gaps.items():
        if fill.kind == "row":
            ((source, row),) = fill.sources
            places, rows = copies.setdefault(source, ([], []))
            places.append(place)
            rows.append(row)
    return {
        m: (np.array(at, np.int64), np.array(rows, np.int64)) for m, (at, rows) in copies.items()
    }


class _Read:
    """The rows that copies and means need, each model's read at once."""

    def __init__(
        self,
        copies: Mapping[int, tuple[Rows, Rows]],
        fills: Iterable[Fill],
        elements: int,
        dtypes: Sequence[str],
        read_rows: ReadRows,
    ) -> None:
        averaged: dict[int, list[int]] = {}
        for fill in fills:
            if fill.kind == "mean":
                for model, row in fill.sources:
                    averaged.setdefault(model, []).append(row)
        none = np.empty(0, np.int64)
        self._dtypes = dtypes
        self._elements = elements
        self._index: dict[int, Rows] = {}
        self._data: dict[int, Bytes] = {}
        for model in sorted({*copies, *averaged}):
            copied = copies.get(model, (none, none))[1]
            rows = np.union1d(copied, np.array(averaged.get(model, []), np.int64))
            self._index[model] = rows
            self._data[model] = _checked(read_rows, model, rows, elements, dtypes[model])

    def rows(self, model: int, rows: Rows, dtype: str) -> Bytes:
        """Rows of a model in another element type, or bit for bit in their own."""
        taken = self._data[model][np.searchsorted(self._index[model], rows)]
        if self._dtypes[model] == dtype:
            return taken
        values = _decode(taken, self._dtypes[model], self._elements)
        return _encode(values, dtype, "the merge")

    def mean(self, sources: Sequence[tuple[int, int]]) -> npt.NDArray[np.float32]:
        total = np.zeros(self._elements, np.float32)
        for model, row in sources:
            place = int(np.searchsorted(self._index[model], row))
            total += _decode(self._data[model][place], self._dtypes[model], self._elements)[0]
        total /= np.float32(len(sources))
        return total


def mean_of_tokens(
    alignment: Alignment, *, elements: int, dtypes: Sequence[str], read_rows: ReadRows
) -> npt.NDArray[np.float32]:
    """The mean of the rows of the base's tokens (float32, ``elements``), summed in float64.

    The base is read in runs of ``CENTRE_ROWS``, front to back; the rest is as for ``gather_rows``.
    """
    base, rows = alignment.base, alignment.named
    total = np.zeros(elements, np.float64)
    for at in range(0, len(rows), CENTRE_ROWS):
        run = rows[at : at + CENTRE_ROWS]
        data = _checked(read_rows, base, run, elements, dtypes[base])
        total += _decode(data, dtypes[base], elements).sum(axis=0, dtype=np.float64)
    return (total / max(len(rows), 1)).astype(np.float32)


def _checked(read_rows: ReadRows, model: int, rows: Rows, elements: int, dtype: str) -> Bytes:
    data = read_rows(model, rows)
    expected = (len(rows), byte_length(dtype, elements))
    if data.shape != expected or data.dtype != np.uint8:
        raise ValueError(f"read {data.shape} of {data.dtype}, where {expected} of bytes were due")
    return data


def _decode(data: Bytes, dtype: str, elements: int) -> npt.NDArray[np.float32]:
    _check_float(dtype, "a model")
    return to_float32(np.ascontiguousarray(data).reshape(-1), dtype).reshape(-1, elements)


def _encode(values: npt.NDArray[np.float32], dtype: str, of: str) -> Bytes:
    _check_float(dtype, of)
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    data = np.frombuffer(from_float32(flat, dtype), np.uint8)
    return data.reshape(*values.shape[:-1], -1)


def _check_float(dtype: str, of: str) -> None:
    if not DTYPES[dtype].is_float:
        raise Mismatch(
            f"embeddings of {of} are {dtype}: rows of other models can't be brought into it",
            hint="add the model in an unquantised dtype",
        )
