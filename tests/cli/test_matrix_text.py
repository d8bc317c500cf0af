"""Matrices on a terminal and as SVG."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from mergegit.cli.heat_map import Scale
from mergegit.cli.matrix_text import matrix_lines, matrix_svg

SVG = "{http://www.w3.org/2000/svg}"
VALUES = [[1.0, -0.3, 0.6], [-0.3, 1.0, None], [0.6, None, 1.0]]
NAMES = ["math", "code", "prose"]


def lines(width: int) -> list[str]:
    drawn = matrix_lines(
        NAMES,
        lambda i, j: "?" if VALUES[i][j] is None else f"{VALUES[i][j]:.2f}",
        lambda i, j: VALUES[i][j],
        Scale.shares(),
        width=width,
    )
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in drawn]


def test_numbers_with_their_marks_where_there_is_room() -> None:
    assert lines(80) == [
        "                1        2        3",
        "  1 math     1.00█   -0.30▒    0.60▓",
        "  2 code    -0.30▒    1.00█       ?",
        "  3 prose    0.60▓       ?     1.00█",
    ]


def test_marks_alone_where_there_is_none() -> None:
    assert lines(24) == [
        "           1  2  3",
        "  1 math   █ -▒  ▓",
        "  2 code  -▒  █  ?",
        "  3 prose  ▓  ?  █",
        "  · none  ░ to 0.25  ▒ to 0.5  ▓ to 0.75  █ to 1  - below zero",
    ]


def drawing(names: list[str] = NAMES) -> ElementTree.Element:
    return ElementTree.fromstring(matrix_svg("cosines", names, lambda i, j: VALUES[i][j], "read"))


def test_a_drawing_has_a_square_with_its_number_for_every_two() -> None:
    root = drawing()
    squares = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") != "back"]
    titles = [rect.find(f"{SVG}title").text for rect in squares]  # type: ignore[union-attr]
    assert len(squares) == 9
    assert titles[1] == "math and code: -0.30"
    assert titles[5] == "code and prose: ?"
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts.count("-0.30") == 2
    assert {"cosines", "read", *NAMES} <= set(texts)


def test_signs_have_colours_and_sizes_strengths() -> None:
    squares = [rect for rect in drawing().iter(f"{SVG}rect") if rect.get("class") != "back"]
    colours = [rect.get("fill") for rect in squares]
    strengths = [float(rect.get("fill-opacity") or 0) for rect in squares]
    assert colours[0] != colours[1]
    assert colours[0] == colours[2]
    assert strengths[0] > strengths[2] > strengths[1] > strengths[5] == 0


def test_it_follows_the_readers_choice_of_light_or_dark() -> None:
    style = next(drawing().iter(f"{SVG}style")).text or ""
    assert "prefers-color-scheme: dark" in style


@pytest.mark.parametrize("name", ["<b>&", "a-name-that-is-much-longer-than-there-is-room-for-it"])
def test_any_name_fits(name: str) -> None:
    root = drawing([name, *NAMES[1:]])
    assert max(len(text.text or "") for text in root.iter(f"{SVG}text")) < 25
