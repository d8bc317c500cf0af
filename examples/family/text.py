"""Kinds of text that lie on any machine with Python and torch, split into train and held-out.

Nothing is downloaded: Python source comes from the standard library, English prose from its
documentation and its docstrings, C++ from the headers that torch ships for its extensions, and
more Python, enough for a base model, from torch itself.
"""

import ast
import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics

import numpy
import torch

KINDS = ("python", "prose", "cpp", "torch")
"""The kinds of text, in the order in which they are printed."""

HELDOUT_SHARE = 0.1
"""Share of the documents that no training sees."""

MAX_DOCUMENT_CHARACTERS = 16_000
"""A longer document is cut here, so that no single file dominates its kind."""

MIN_DOCSTRING_CHARACTERS = 200
"""Shorter docstrings are mostly one line in the imperative, not prose."""

SKIPPED_FOLDERS = {
    "dist-packages",
    "encodings",  # tables of code points
    "idlelib",  # some installations leave it out, as they do the next one and the tests
    "lib2to3",
    "pydoc_data",  # read as prose
    "site-packages",
    "test",
    "tests",
}
"""Folders of Python files that are of another kind, or not on every machine."""

CPP_FOLDERS = ("ATen/core", "ATen/native", "c10", "pybind11", "torch/csrc")
"""Headers written by hand; most others are generated from templates and repeat themselves."""


@dataclass(frozen=True, slots=True)
class Document:
    """A piece of text that is read only if it is chosen; its name alone decides its side."""

    name: str
    read: Callable[[], str]

    @property
    def digest(self) -> bytes:
        """Order and split come from this hash of the name, never from the order on disk."""
        return hashlib.sha256(self.name.encode()).digest()

    @property
    def is_heldout(self) -> bool:
        return int.from_bytes(self.digest[-4:], "big") < HELDOUT_SHARE * 2**32


@dataclass(frozen=True, slots=True)
class Split:
    """The documents of one kind of text, on both sides of the split."""

    train: list[str]
    heldout: list[str]


def split(kind: str, *, train_characters: int, heldout_characters: int) -> Split:
    """Collect about so many characters of one kind of text for each side.

    The standard library's files serve two kinds: source as Python, docstrings as prose. The side
    depends on the file's name alone, so the docstrings of a held-out file are held out from both.
    """
    documents = sorted(_documents(kind), key=lambda document: document.digest)
    return Split(
        train=_take((d for d in documents if not d.is_heldout), train_characters),
        heldout=_take((d for d in documents if d.is_heldout), heldout_characters),
    )


def _take(documents: Iterable[Document], characters: int) -> list[str]:
    texts: list[str] = []
    for document in documents:
        if characters <= 0:
            break
        text = document.read()[: min(characters, MAX_DOCUMENT_CHARACTERS)]
        if text.strip():
            texts.append(text)
            characters -= len(text)
    return texts


def _documents(kind: str) -> Iterator[Document]:
    stdlib = Path(sysconfig.get_path("stdlib"))
    library = Path(torch.__file__).parent
    match kind:
        case "python":
            yield from _files("stdlib", stdlib, _python_files(stdlib), _read)
        case "prose":
            for title, topic in topics.items():
                yield Document(f"topics/{title}", partial(str, topic))
            yield from _files("stdlib", stdlib, _python_files(stdlib), _read_docstrings)
            arrays = Path(numpy.__file__).parent
            yield from _files("numpy", arrays, _python_files(arrays), _read_docstrings)
        case "cpp":
            headers = library / "include"
            paths = chain.from_iterable((headers / f).rglob("*.h") for f in CPP_FOLDERS)
            yield from _files("include", headers, paths, _read)
        case "torch":
            yield from _files("torch", library, _python_files(library), _read)
        case _:
            raise ValueError(f"no such kind of text: {kind}")


def _files(
    source: str, root: Path, paths: Iterable[Path], read: Callable[[Path], str]
) -> Iterator[Document]:
    for path in paths:
        name = path.relative_to(root).as_posix()
        yield Document(f"{source}/{name}", partial(read, path))


def _python_files(root: Path) -> Iterator[Path]:
    for path in root.rglob("*.py"):
        folders = path.relative_to(root).parts[:-1]
        # `_sysconfigdata*` holds the paths and the compiler flags of this very build.
        if SKIPPED_FOLDERS.isdisjoint(folders) and "_sysconfigdata" not in path.name:
            yield path


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _read_docstrings(path: Path) -> str:
    """The longer docstrings of one Python file, in the order of the file."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [
        docstring
        for node in ast.walk(ast.parse(_read(path)))
        if isinstance(node, documented)
        and len(docstring := ast.get_docstring(node) or "") >= MIN_DOCSTRING_CHARACTERS
    ]
    return "\n\n".join(docstrings)
