"""Models of different vocabularies, aligned: whose row stands where in the merged embeddings.

The meaning is mergekit's (``tokenizer_source`` and ``tokenizer`` of its recipes): each model's
embeddings are brought into the output's order before the merge, and a token that a model lacks gets
a row from elsewhere: from where the recipe says, else from the base, else the mean of the models
that have it. We differ in rows without a token: they are kept where the base has them, so that
models with one vocabulary stay as they are.

Nothing here reads a weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from mergegit.checkpoint.json_files import shown
from mergegit.checkpoint.vocabulary import AddedToken, Vocabulary
from mergegit.errors import BadRecipe, Mismatch

Rows = npt.NDArray[np.int64]

LACKS: Final = -1
"""Stands in ``Alignment.gather`` where a model has no row of its own."""
MAX_MULTIPLE: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A model's row: that of a token, by its text or id; ``token`` None is the output's own."""

    model: int
    token: str | int | None = None


@dataclass(frozen=True, slots=True)
class TokenOption:
    """What a recipe says of one token: where its row comes from (None: as for other tokens), and
    whether all models take that row or only those that lack the token."""

    source: TokenRow | Literal["zero"] | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class _Model:
    """A model as ``align`` sees it; ``rows`` counts those of its embeddings."""

    name: str
    vocabulary: Vocabulary
    rows: int

    def row(self, token: str) -> int | None:
        """The row of a token; tokens beyond the last row have none."""
        number = self.vocabulary.tokens.get(token, self.rows)
        return number if number < self.rows else None


@dataclass(frozen=True, slots=True)
class Fill:
    """What stands in an output row of a model that has none for it.

    ``row``: that of ``sources``, pairs of a model and a row of it. ``mean``: the mean of theirs.
    ``zero``: zeros. ``centre``: the mean of the rows of all the base's tokens, for padding.
    """

    kind: Literal["row", "mean", "zero", "centre"]
    sources: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Addition:
    """A token that the output has beyond those of the tokenizer that it starts from.

    ``flags`` is None for one of the vocabulary proper of ``model``; ``model`` is None where no
    model has the token.
    """

    token: str
    id: int
    model: int | None
    flags: AddedToken | None


@dataclass(frozen=True, slots=True)
class Alignment:
    """The output's vocabulary, and where each model's rows stand in it.

    ``names`` and ``model_rows`` are the models' as they were given; ``base`` is one of them, and
    ``start`` the one whose tokenizer the output has. ``tokens`` gives each of the output's tokens
    its id; a token of ``start`` for which no model has a row may lie beyond the last of ``rows``.
    ``gather`` has for each model (int64, ``rows``) its row at each output row, or ``LACKS``;
    ``fills`` what stands there instead, for every output row that a model lacks or that is in
    ``forced``. In forced rows it stands for every model. ``named`` are the base's rows that stand
    for a token; ``moved`` gives ids of the base's tokens that have another id now, or None where
    the output lacks them.
    """

    names: tuple[str, ...]
    model_rows: tuple[int, ...]
    base: int
    start: int
    tokens: Mapping[str, int]
    rows: int
    gather: tuple[Rows, ...]
    fills: Mapping[int, Fill]
    forced: frozenset[int]
    additions: tuple[Addition, ...]
    named: Rows
    moved: Mapping[int, int | None]

    def is_identity(self, model: int) -> bool:
        """Whether the model's embeddings are as the output's already, bit for bit."""
        own = self.gather[model]
        return (
            self.model_rows[model] == self.rows
            and bool(np.array_equal(own, np.arange(self.rows)))
            and all(self.fills[row] == Fill("row", ((model, row),)) for row in self.forced)
        )


def align(
    models: Sequence[tuple[str, Vocabulary, int]],
    *,
    base: int,
    source: Literal["base", "union"] | int,
    tokens: Mapping[str, TokenOption] | None = None,
    pad_to_multiple_of: int | None = None,
    base_fills: bool = True,
    aside: int | None = None,
) -> Alignment:
    """Align ``models``: each a name, its vocabulary and the number of rows of its embeddings.

    The output has the vocabulary of the base, of the model of an index, or with ``union`` the
    base's, followed by what the others have beyond it, in their order; last come the tokens that
    only ``tokens`` names. Its rows are as many as those of the model it starts from, or more where
    tokens need them, rounded up to a multiple. With ``base_fills`` false the base's rows do not go
    before those of others, as where a recipe names no base. The model ``aside`` is brought into
    the output's order, too, but gives neither tokens nor rows: it is none of those merged.

    Raises ``BadRecipe`` for options that name tokens which are nowhere, ``Mismatch`` for models
    without rows.
    """
    given = [_Model(*model) for model in models]
    options = tokens or {}
    for model in given:
        if model.rows < 1:
            raise Mismatch(f"the embeddings of {model.name} have no rows", hint="leave it out")
    start = source if isinstance(source, int) else base
    givers = {index: model for index, model in enumerate(given) if index != aside}
    out = dict(given[start].vocabulary.tokens)
    additions = _additions(givers, start, out, options, union=source == "union")
    out.update((addition.token, addition.id) for addition in additions)
    explicit = _explicit_fills(givers, out, options)
    rows = _count_rows(givers, start, out, explicit, pad_to_multiple_of)
    gather = _gather(given, out, rows)
    forced = frozenset(out[token] for token, option in options.items() if option.force)
    lacking = {int(row) for row in np.flatnonzero((np.stack(gather) == LACKS).any(axis=0))}
    named = {number for number in out.values() if number < rows}
    fills = {
        row: explicit.get(row)
        or _default_fill(gather, givers, row, base if base_fills else None, row in named)
        for row in sorted(lacking | forced)
    }
    base_tokens = given[base].vocabulary.tokens
    base_rows = sorted(row for row in base_tokens.values() if row < given[base].rows)
    return Alignment(
        names=tuple(model.name for model in given),
        model_rows=tuple(model.rows for model in given),
        base=base,
        start=start,
        tokens=out,
        rows=rows,
        gather=gather,
        fills=fills,
        forced=forced,
        additions=additions,
        named=np.array(base_rows, np.int64),
        moved={i: out.get(t) for t, i in base_tokens.items() if out.get(t) != i},
    )


def _additions(
    models: Mapping[int, _Model],
    start: int,
    out: Mapping[str, int],
    options: Mapping[str, TokenOption],
    *,
    union: bool,
) -> tuple[Addition, ...]:
    """Tokens that the output has beyond ``out``, with ids from its last on."""
    wanted: dict[str, None] = {}
    if union:
        for index, model in models.items():
            if index != start:
                wanted.update(dict.fromkeys(_tokens_with_rows(model)))
    wanted.update(dict.fromkeys(options))
    first = max(out.values()) + 1
    new = [token for token in wanted if token not in out]
    return tuple(
        Addition(token, first + place, *_origin(models, token)) for place, token in enumerate(new)
    )


def _tokens_with_rows(model: _Model) -> Iterable[str]:
    in_order = sorted(model.vocabulary.tokens.items(), key=lambda pair: pair[1])
    return (token for token, number in in_order if number < model.rows)


def _origin(models: Mapping[int, _Model], token: str) -> tuple[int | None, AddedToken | None]:
    """The model that a token comes from, and how that one matches it.

    What one model added and another has in its vocabulary proper is taken as added: so it is
    matched whole in both.
    """
    for index, model in models.items():
        if token in model.vocabulary.added:
            return index, model.vocabulary.added[token]
    for index, model in models.items():
        if token in model.vocabulary.tokens:
            return index, None
    return None, AddedToken()


def _explicit_fills(
    models: Mapping[int, _Model], out: Mapping[str, int], options: Mapping[str, TokenOption]
) -> dict[int, Fill]:
    """Fills that the recipe asks for, by output row; every token that it names is checked."""
    fills = {}
    for token, option in options.items():
        if option.source is None:
            if all(model.row(token) is None for model in models.values()):
                raise BadRecipe(
                    f"no model has token {shown(token)}, which the recipe names",
                    hint="give it a source: a token of a model, or kind: zero",
                )
        elif option.source == "zero":
            fills[out[token]] = Fill("zero")
        else:
            model = models[option.source.model]
            row = _row_of(model, token if option.source.token is None else option.source.token)
            if row is None:
                raise BadRecipe(
                    f"{model.name} has no row for {_described(option.source, token)}",
                    hint="give another source, or take the token out of the recipe",
                )
            fills[out[token]] = Fill("row", ((option.source.model, row),))
    return fills


def _row_of(model: _Model, token: str | int) -> int | None:
    if isinstance(token, str):
        return model.row(token)
    return token if 0 <= token < model.rows else None


def _described(source: TokenRow, token: str) -> str:
    if source.token is None:
        return f"token {shown(token)}, of which it is the source"
    what = f"token {shown(source.token)}" if isinstance(source.token, str) else f"id {source.token}"
    return f"{what}, the source of token {shown(token)}"


def _count_rows(
    models: Mapping[int, _Model],
    start: int,
    out: Mapping[str, int],
    explicit: Mapping[int, Fill],
    multiple: int | None,
) -> int:
    """Rows of the output: those of the model it starts from, and as many more as tokens need.

    A token without a row anywhere is no reason to have more: a tokenizer may know tokens that its
    model doesn't.
    """
    beyond = [
        number
        for token, number in out.items()
        if number >= models[start].rows
        and (number in explicit or any(model.row(token) is not None for model in models.values()))
    ]
    rows = max(models[start].rows, max(beyond, default=0) + 1)
    if multiple is None:
        return rows
    if not 1 <= multiple <= MAX_MULTIPLE:
        raise BadRecipe(
            f"pad_to_multiple_of is {multiple}", hint=f"give a number from 1 to {MAX_MULTIPLE:,}"
        )
    return -(-rows // multiple) * multiple


def _gather(models: Sequence[_Model], out: Mapping[str, int], rows: int) -> tuple[Rows, ...]:
    """For each model its row at each output row. Rows without a token match those without one."""
    unnamed = _unnamed(out.values(), rows)
    gathered = []
    for model in models:
        own = np.full(rows, LACKS, np.int64)
        tokens = model.vocabulary.tokens
        for token, number in out.items():
            row = tokens.get(token, model.rows)
            if row < model.rows and number < rows:
                own[number] = row
        both = np.intersect1d(unnamed, _unnamed(tokens.values(), model.rows), assume_unique=True)
        own[both] = both
        gathered.append(own)
    return tuple(gathered)


def _unnamed(ids: Iterable[int], rows: int) -> Rows:
    """Rows for which no token stands."""
    numbers = np.fromiter(ids, np.int64)
    return np.setdiff1d(np.arange(rows), numbers[numbers < rows], assume_unique=True)


def _default_fill(
    gather: Sequence[Rows], givers: Iterable[int], row: int, preferred: int | None, is_token: bool
) -> Fill:
    """What mergekit documents: the base's row, else the only one, else the mean."""
    have = {model: int(gather[model][row]) for model in givers if gather[model][row] != LACKS}
    if preferred in have:
        return Fill("row", ((preferred, have[preferred]),))
    if not have:
        return Fill("zero" if is_token else "centre")
    return Fill("row" if len(have) == 1 else "mean", tuple(have.items()))
