"""YAML that strangers wrote, as a tree of bounded size whose parts know their lines.

Plain data only: scalars, lists, and mappings whose keys are text. Anchors, aliases and merge keys
(``<<``) work; tags are not obeyed but refused, but for ``!!str``. A key that stands twice in a
mapping is an error. A mapping's keys are taken as they are written: ``yes`` is a key of that name.

Numbers are read as YAML 1.2 has them, so that ``1e-5`` is one. What else YAML 1.1 took for a
number or a date (``010``, ``0x1F``, ``1:30``, ``2024-01-01``) stays text. ``yes``, ``no``, ``on``
and ``off`` are true and false, as they were there.

Size, number of parts and depth are bounded as they are after every alias is put in its place, and
before anything is built: a few lines that would grow to millions are refused at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import yaml

from mergegit.errors import BadRecipe

MAX_BYTES: Final = 1 << 20
MAX_NODES: Final = 50_000
MAX_DEPTH: Final = 32

INT: Final = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,3999})")
FLOAT: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_POINTLESS: Final = re.compile(r"[-+]?0[0-9]+")
_WORDS: Final[Mapping[str, float | bool | None]] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"), True),
    **dict.fromkeys(("false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}
_TEXT_TAGS: Final = ("!", "tag:yaml.org,2002:str")
_LIST_TAGS: Final = (None, "!", "tag:yaml.org,2002:seq")
_MAPPING_TAGS: Final = (None, "!", "tag:yaml.org,2002:map")
_WRITE_LESS: Final = "a recipe is a page of text; write fewer aliases, or several recipes"


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's line, and its value."""

    line: int
    node: Node


@dataclass(frozen=True, slots=True)
class Node:
    """A part of a document and the line, counted from 1, where it begins.

    ``text`` is a scalar as it is written, ``size`` how many nodes it is with all below it, each
    alias counted as what it stands for, and ``height`` how deep they lie.
    """

    line: int
    value: int | float | bool | str | tuple[Node, ...] | Mapping[str, Entry] | None
    text: str = ""
    is_merge: bool = False
    size: int = 1
    height: int = 0


def read_trees(text: str) -> tuple[Node, ...]:
    """The documents in ``text``, without empty ones. Raises ``BadRecipe``."""
    if len(text) > MAX_BYTES or len(text.encode(errors="replace")) > MAX_BYTES:
        raise BadRecipe(
            f"the recipe is longer than {MAX_BYTES >> 20} MiB",
            hint="give the recipe's file, not the model's",
        )
    builder = _Builder()
    for event in _events(text):
        builder.take(event)
    return tuple(root for root in builder.roots if not _is_nothing(root))


def plain(node: Node) -> object:
    """The node as lists, dicts and scalars."""
    if isinstance(node.value, tuple):
        return [plain(item) for item in node.value]
    if isinstance(node.value, Mapping):
        return {key: plain(entry.node) for key, entry in node.value.items()}
    return node.value


@dataclass(slots=True)
class _Open:
    """A list or mapping whose end has not come yet."""

    event: yaml.CollectionStartEvent
    children: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class _Builder:
    """Puts a tree together from the parser's events, without recursion."""

    roots: list[Node] = field(default_factory=list)
    stack: list[_Open] = field(default_factory=list)
    anchors: dict[str, Node | None] = field(default_factory=dict)
    nodes: int = 0

    def take(self, event: yaml.Event) -> None:
        match event:
            case yaml.DocumentStartEvent():
                self.anchors = {}
            case yaml.CollectionStartEvent():
                self._open(event)
            case yaml.CollectionEndEvent():
                self._close()
            case yaml.ScalarEvent():
                self._add(_scalar(event), event.anchor)
            case yaml.AliasEvent():
                self._add(self._aliased(event), None)

    def _open(self, event: yaml.CollectionStartEvent) -> None:
        accepted = _LIST_TAGS if isinstance(event, yaml.SequenceStartEvent) else _MAPPING_TAGS
        if event.tag not in accepted:
            raise _tagged(event)
        self._check_depth(1, event)
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        self.stack.append(_Open(event))

    def _close(self) -> None:
        done = self.stack.pop()
        build = _list if isinstance(done.event, yaml.SequenceStartEvent) else _mapping
        self._add(build(done), done.event.anchor)

    def _aliased(self, event: yaml.AliasEvent) -> Node:
        name = f"alias *{_short(event.anchor or '')} on line {_line(event)}"
        if event.anchor is None or event.anchor not in self.anchors:
            raise BadRecipe(f"{name} has no anchor", hint="put the anchor before the alias")
        node = self.anchors[event.anchor]
        if node is None:
            raise BadRecipe(f"{name} stands within what it names", hint="write the value out")
        self._check_depth(node.height, event)
        self.nodes += node.size - 1
        return replace(node, line=_line(event))

    def _add(self, node: Node, anchor: str | None) -> None:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise BadRecipe(f"the recipe has more than {MAX_NODES} parts", hint=_WRITE_LESS)
        if anchor is not None:
            self.anchors[anchor] = node
        (self.stack[-1].children if self.stack else self.roots).append(node)

    def _check_depth(self, height: int, event: yaml.Event) -> None:
        if len(self.stack) + height > MAX_DEPTH:
            raise BadRecipe(
                f"the recipe is nested more than {MAX_DEPTH} deep on line {_line(event)}",
                hint="a recipe needs fewer than ten levels; check the brackets there",
            )


def _events(text: str) -> Iterator[yaml.Event]:
    events = yaml.parse(text, Loader=yaml.SafeLoader)
    while True:
        try:
            event = next(events, None)
        except yaml.YAMLError as error:
            raise _not_yaml(error, text) from error
        except (ValueError, OverflowError) as error:
            # PyYAML lets what chr() and int() make of wild escapes and versions through.
            raise BadRecipe(
                "the recipe is not YAML: it holds a number that is too large",
                hint="look for \\U escapes and %YAML lines",
            ) from error
        if event is None:
            return
        yield event


def _not_yaml(error: yaml.YAMLError, text: str) -> BadRecipe:
    problem, line = str(error), 1
    if isinstance(error, yaml.MarkedYAMLError):
        problem = error.problem or error.context or "unreadable"
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
    elif isinstance(error, yaml.reader.ReaderError):
        problem = f"character U+{error.character:04X} may not stand"
        line = text.count("\n", 0, error.position) + 1
    hint = "indent with spaces, and put text with special characters in quotes"
    return BadRecipe(f"the recipe is not YAML: {_short(problem)} on line {line}", hint=hint)


def _scalar(event: yaml.ScalarEvent) -> Node:
    line = _line(event)
    if event.tag is None and event.implicit[0]:
        return Node(line, _resolved(event.value), event.value, is_merge=event.value == "<<")
    if event.tag is not None and event.tag not in _TEXT_TAGS:
        raise _tagged(event)
    text = _joined(event.value, line)
    return Node(line, text, text)


def _resolved(text: str) -> int | float | bool | str | None:
    """What a scalar without quotes means."""
    if text in _WORDS:
        return _WORDS[text]
    if INT.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text) and not _POINTLESS.fullmatch(text):
        return float(text)
    return text


def _joined(text: str, line: int) -> str:
    """``text`` with the two halves of a character, as JSON escapes them, put together."""
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise BadRecipe(
            f"text on line {line} is not valid Unicode", hint="write it in UTF-8, without \\u"
        ) from None


def _list(done: _Open) -> Node:
    size, height = _extent(done)
    return Node(_line(done.event), tuple(done.children), size=size, height=height)


def _mapping(done: _Open) -> Node:
    pairs = list(zip(done.children[::2], done.children[1::2], strict=True))
    entries: dict[str, Entry] = {}
    merged: dict[str, Entry] = {}
    merge_line = 0
    for key, value in pairs:
        if isinstance(key.value, tuple | Mapping):
            raise BadRecipe(
                f"a key on line {key.line} is a list or a mapping", hint="keys are plain text"
            )
        earlier = merge_line if key.is_merge else _line_of(entries, key.text)
        if earlier:
            raise BadRecipe(
                f"key {_short(key.text)!r} stands twice, on lines {earlier} and {key.line}",
                hint="remove one of them",
            )
        if key.is_merge:
            merge_line = key.line
            merged = _merged(value)
        else:
            entries[key.text] = Entry(key.line, value)
    size, height = _extent(done)
    return Node(_line(done.event), {**merged, **entries}, size=size, height=height)


def _line_of(entries: Mapping[str, Entry], key: str) -> int:
    return entries[key].line if key in entries else 0


def _merged(value: Node) -> dict[str, Entry]:
    """What a merge key brings in; of several mappings the first that has a key gives it."""
    merged: dict[str, Entry] = {}
    for source in reversed(value.value if isinstance(value.value, tuple) else (value,)):
        if not isinstance(source.value, Mapping):
            raise BadRecipe(
                f"<< on line {value.line} takes in what is not a mapping",
                hint="give it an alias of a mapping, like <<: *shared",
            )
        merged.update(source.value)
    return merged


def _extent(done: _Open) -> tuple[int, int]:
    size = 1 + sum(child.size for child in done.children)
    return size, 1 + max((child.height for child in done.children), default=0)


def _tagged(event: yaml.NodeEvent) -> BadRecipe:
    tag = _short(str(event.tag).replace("tag:yaml.org,2002:", "!!"))  # type: ignore[attr-defined]
    return BadRecipe(
        f"tag {tag} on line {_line(event)} is not accepted", hint="write the value without a tag"
    )


def _is_nothing(root: Node) -> bool:
    return root.value is None and not root.text


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1


def _short(text: str, longest: int = 80) -> str:
    """``text`` on one line, for a message."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= longest else line[: longest - 3] + "..."
