"""What a recipe says of one parameter: a value, a gradient over the layers, or values by tensor.

As in mergekit's recipes a parameter is written in one of three forms:

- a scalar, ``0.5``: the same for every tensor;
- a list of numbers, ``[0, 0.5, 1]``: a gradient, spread evenly over the depth of the model and
  interpolated linearly between its points;
- a list of rules, ``[{filter: mlp, value: 0.5}, {value: [0, 1]}]``: the first rule whose filter
  matches the tensor's name gives the value, itself a scalar or a gradient. A rule without a filter
  matches every tensor, so it comes last.

A filter is a part of the tensor's name. One that holds ``*`` or ``?`` is a shell-style pattern for
the whole name, in which ``[ab]`` stands for one of several characters; ``*`` alone is no filter.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from mergegit.errors import BadRecipe

Scalar = float | bool | str

_RULE_KEYS: Final = ("filter", "value")
_FORMS: Final = "give a value, a list of numbers, or a list of {filter, value}"
_NUMBERS: Final = "give finite numbers; a list of several is a gradient over the layers"
_LARGEST_SHOWN: Final = 10**18
_WHOLE: Final = 1e15
"""Whole numbers below this are written without a decimal point; all of them are exact."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The value of the tensors that ``filter`` matches; None matches every tensor.

    One value is a constant. Several are a gradient: numbers only, the first for the first layer,
    the last for the last.
    """

    filter: str | None
    values: tuple[Scalar, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a rule needs a value")

    def matches(self, name: str) -> bool:
        if self.filter is None:
            return True
        if "*" in self.filter or "?" in self.filter:
            return fnmatchcase(name, self.filter)
        return self.filter in name

    def at(self, position: float) -> Scalar:
        """The value at a depth from 0 to 1."""
        if len(self.values) == 1:
            return self.values[0]
        scaled = position * (len(self.values) - 1)
        before = int(scaled)
        after = min(before + 1, len(self.values) - 1)
        share = scaled - before
        return (1 - share) * _number(self.values[before]) + share * _number(self.values[after])


@dataclass(frozen=True, slots=True)
class Setting:
    """A parameter's value for every tensor: rules, of which the first that matches counts.

    Rules after an unfiltered one could never match and are dropped.
    """

    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        if not self.rules:
            raise ValueError("a setting needs a rule")
        object.__setattr__(self, "rules", _reachable(self.rules))

    @classmethod
    def constant(cls, value: Scalar) -> Setting:
        """One value for every tensor. Raises ``BadRecipe`` for a number that is not finite."""
        return cls((Rule(None, (_scalar(value, "the value"),)),))

    @classmethod
    def parse(cls, value: object, of: str) -> Setting:
        """A setting from what YAML or JSON hold, in any of the three forms of this module.

        ``of`` says in errors whose value it is. Raises ``BadRecipe``.
        """
        if isinstance(value, Mapping):
            return cls((_rule(value, of),))
        if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            return cls(tuple(_rule(item, f"{of}[{place}]") for place, item in enumerate(value)))
        return cls((Rule(None, _values(value, of)),))

    def at(self, name: str, position: float) -> Scalar | None:
        """The value for the tensor ``name``, None where no rule matches it.

        ``position`` is the depth of the tensor's layer, 0 for the first and 1 for the last. A
        gradient of n values is interpolated linearly at ``position * (n - 1)``.
        """
        if not 0 <= position <= 1:
            raise ValueError(f"position {position} is not within 0 and 1")
        for rule in self.rules:
            if rule.matches(name):
                return rule.at(position)
        return None

    def otherwise(self, other: Setting | None) -> Setting:
        """This setting, and ``other`` for the tensors that no rule of this one matches."""
        return self if other is None else Setting(self.rules + other.rules)

    @property
    def values(self) -> tuple[Scalar, ...]:
        """Every value that is written in it; all that ``at`` gives lie among or between them."""
        return tuple(value for rule in self.rules for value in rule.values)

    @property
    def is_gradient(self) -> bool:
        """Whether the value depends on the depth for some tensors."""
        return any(len(rule.values) > 1 for rule in self.rules)

    def to_json(self) -> object:
        """The simplest form that ``parse`` reads back as this setting."""
        first = self.rules[0]
        if first.filter is None:
            return _written(first)
        return [
            {"value": _written(rule)}
            if rule.filter is None
            else {"filter": rule.filter, "value": _written(rule)}
            for rule in self.rules
        ]

    def text(self) -> str:
        """For people to read, like ``self_attn: 0.5, mlp: [0, 1], else 0.3``."""
        if self.rules[0].filter is None:
            return _rule_text(self.rules[0])
        return ", ".join(
            f"else {_rule_text(rule)}"
            if rule.filter is None
            else f"{_shown(rule.filter, bare=True)}: {_rule_text(rule)}"
            for rule in self.rules
        )


def _reachable(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    for place, rule in enumerate(rules):
        if rule.filter is None:
            return rules[: place + 1]
    return rules


def _rule(value: object, of: str) -> Rule:
    if not isinstance(value, Mapping):
        raise BadRecipe(
            f"{of} is {_shown(value)} among rules, which have a filter and a value", hint=_FORMS
        )
    for key in value:
        if key not in _RULE_KEYS:
            raise BadRecipe(f"{of} has an unknown key {_shown(key)}", hint=_nearest_key(key))
    if "value" not in value:
        raise BadRecipe(f"{of} is a rule without a value", hint=_FORMS)
    return Rule(_filter(value.get("filter"), f"{of}.filter"), _values(value["value"], of))


def _nearest_key(key: object) -> str:
    nearest = difflib.get_close_matches(key, _RULE_KEYS, n=1) if isinstance(key, str) else []
    suggestion = f"did you mean {nearest[0]}? " if nearest else ""
    return f"{suggestion}a rule has a filter and a value"


def _filter(value: object, of: str) -> str | None:
    if value is None or value == "*":
        return None
    if not isinstance(value, str):
        raise BadRecipe(
            f"{of} is {_shown(value)}, not text", hint="put the part of the name in quotes"
        )
    if not value:
        raise BadRecipe(f"{of} is empty", hint="leave the filter out to match every tensor")
    return _unicode(value, of)


def _values(value: object, of: str) -> tuple[Scalar, ...]:
    if not isinstance(value, list | tuple):
        return (_scalar(value, of),)
    if not value:
        raise BadRecipe(f"{of} is an empty list", hint=_NUMBERS)
    return tuple(_point(item, f"{of}[{place}]") for place, item in enumerate(value))


def _point(value: object, of: str) -> float:
    if isinstance(value, list | tuple | Mapping):
        raise BadRecipe(f"{of} is {_shown(value)}: nested too deep", hint=_FORMS)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRecipe(f"{of} is {_shown(value)}, not a number", hint=_NUMBERS)
    return _finite(value, of)


def _scalar(value: object, of: str) -> Scalar:
    match value:
        case bool():
            return value
        case int() | float():
            return _finite(value, of)
        case str():
            return _unicode(value, of)
        case None:
            raise BadRecipe(f"{of} has no value", hint=_FORMS)
        case _:
            raise BadRecipe(f"{of} is {_shown(value)}, not one value", hint=_FORMS)


def _finite(value: float, of: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadRecipe(f"{of} is {_shown(number)}, not a finite number", hint=_NUMBERS)
    return number


def _unicode(value: str, of: str) -> str:
    """``value``, unless it holds half a character, which no file can be written with."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRecipe(f"{of} is not valid Unicode", hint="write the text in UTF-8") from None
    return value


def _number(value: Scalar) -> float:
    if isinstance(value, bool | str):
        raise TypeError(f"a gradient goes over numbers, not {value!r}")
    return value


def _written(rule: Rule) -> Scalar | list[Scalar]:
    return rule.values[0] if len(rule.values) == 1 else list(rule.values)


def _rule_text(rule: Rule) -> str:
    texts = [_shown(value, bare=True) for value in rule.values]
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def _shown(value: object, *, bare: bool = False) -> str:
    """A value in few words and on one line, whatever it is; text ``bare`` of quotes if it can."""
    match value:
        case None:
            return "empty"
        case bool():
            return "true" if value else "false"
        case int():
            return str(value) if abs(value) < _LARGEST_SHOWN else "a huge number"
        case float():
            return str(int(value)) if value.is_integer() and abs(value) < _WHOLE else repr(value)
        case str():
            return value if bare and value.isprintable() else _quoted(value)
        case Mapping():
            return "a mapping"
        case list() | tuple():
            return "a list"
        case _:
            return f"of type {type(value).__name__}"


def _quoted(text: str, longest: int = 60) -> str:
    return repr(text if len(text) <= longest else text[: longest - 3] + "...")
