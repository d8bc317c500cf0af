"""JSON files that come along with a checkpoint, from anywhere: read with care, written as usual.

A checkpoint's files are given as a map from path to contents; nothing here touches a disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NoReturn

from mergegit.errors import BadCheckpoint

MAX_BYTES: Final = 128 << 20
"""The longest file that is read: twice the largest tokenizer.json in use."""
AGAIN: Final = "mend the file or download it again"

Files = Mapping[str, bytes]
"""Contents by path, of the files beside a model's weights."""


def read_text(files: Files, path: str, of: str) -> str:
    """A file of model ``of`` as text. Raises ``BadCheckpoint``."""
    data = files[path]
    if len(data) > MAX_BYTES:
        fail(of, path, f"is {len(data):,} bytes long; at most {MAX_BYTES:,} are read")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fail(of, path, f"is not UTF-8 ({error.reason} at byte {error.start})")


def read_object(files: Files, path: str, of: str) -> dict[str, Any]:
    """A file of model ``of`` as a JSON object. Raises ``BadCheckpoint``."""
    text = read_text(files, path, of)
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        fail(of, path, f"is not valid JSON ({error})")
    if not isinstance(value, dict):
        fail(of, path, "is not a JSON object")
    return value


def write_object(value: Mapping[str, Any]) -> bytes:
    """A JSON object as Hugging Face tools write it."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def fail(of: str, path: str, what: str, hint: str = AGAIN) -> NoReturn:
    """Raise ``BadCheckpoint`` for a file of model ``of``."""
    raise BadCheckpoint(f"{path} of {of} {what}", hint=hint)


def shown(value: object) -> str:
    """A value of a file as an error shows it: on one line, and no longer than that."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _no_duplicates(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    listed = list(pairs)
    found = dict(listed)
    if len(found) < len(listed):
        seen: set[str] = set()
        for key, _ in listed:
            if key in seen:
                raise ValueError(f"the key {shown(key)} stands twice")
            seen.add(key)
    return found
