"""Heat maps: marks by size, as wide as the terminal, readable without colours."""

from __future__ import annotations

import io
import math
import re
import sys

import pytest

from mergegit.cli.heat_map import ASCII_MARKS, MARKS, Scale, heat_map

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
SCALE = Scale((1.0, 2.0, 4.0, 8.0))


def plain(line: str) -> str:
    return ESCAPE.sub("", line)


def draw(values: dict[tuple[str, int], float | None], layers: int, width: int) -> list[str]:
    def value(label: str, columns: range) -> float | None:
        here = [values[label, layer] for layer in columns]
        return None if None in here else max(here)  # type: ignore[type-var]

    labels = list(dict.fromkeys(label for label, _ in values))
    return [plain(line) for line in heat_map(labels, layers, value, SCALE, width=width)]


@pytest.mark.parametrize(
    ("value", "mark"),
    [(0.0, "·"), (0.1, "░"), (1.0, "░"), (1.1, "▒"), (4.0, "▓"), (8.0, "█"), (99.0, "█"),
     (None, "?"), (math.nan, " ")],
)  # fmt: skip
def test_each_mark_stands_for_a_range(value: float | None, mark: str) -> None:
    assert plain(SCALE.mark(value)) == mark


def test_doubling_ends_at_the_top() -> None:
    assert Scale.doubling(0.8).bounds == pytest.approx((0.1, 0.2, 0.4, 0.8))
    assert plain(Scale.doubling(0.8).legend(lambda bound: f"{bound:g}")) == (
        "· none  ░ to 0.1  ▒ to 0.2  ▓ to 0.4  █ to 0.8"
    )


def test_a_row_for_each_label_and_a_column_for_each_layer() -> None:
    values = {("mlp", n): float(n) for n in range(6)} | {("norm", n): 0.0 for n in range(6)}
    assert draw(values, 6, 80) == [
        "        0 1 2 3 4 5",
        "  mlp   ··░░▒▒▓▓▓▓██",
        "  norm  ············",
    ]


@pytest.mark.parametrize(
    ("layers", "width", "columns"), [(80, 80, 40), (80, 100, 80), (126, 80, 63), (30, 80, 60)]
)
def test_it_fits_the_terminal(layers: int, width: int, columns: int) -> None:
    """Layers share columns where there is no room for one each."""
    lines = draw({("self_attn", n): 3.0 for n in range(layers)}, layers, width)
    assert all(len(line) <= width for line in lines)
    assert lines[1] == f"  self_attn  {'▓' * columns}"


def test_columns_that_share_layers_show_all_of_them() -> None:
    lines = draw({("a", n): (8.0 if n == 79 else 0.0) for n in range(80)}, 80, 50)
    assert lines[1].endswith("·█")
    assert lines[1].count("█") == 1


@pytest.mark.parametrize("layers", [1, 2, 9, 10, 11, 32, 61, 80, 126, 1000])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_numbers_stand_above_the_columns_that_they_name(layers: int, width: int) -> None:
    label = "up_proj"
    axis = draw({(label, n): 1.0 for n in range(layers)}, layers, width)[0]
    start = len(f"  {label}  ")
    room = width - start
    per_column = -(-layers // room)
    cell = 2 if 2 * -(-layers // per_column) <= room else 1
    numbers = list(re.finditer(r"\d+", axis))
    assert numbers[0][0] == "0"
    for number in numbers:
        assert int(number[0]) == (number.start() - start) // cell * per_column
    assert len(axis) <= width + len(str(layers))


def test_long_labels_keep_their_ends() -> None:
    label = "a.very.long.prefix.of.a.module.that.never.ends.mlp.up_proj"
    line = draw({(label, 0): 1.0}, 1, 60)[1]
    assert line.startswith("  ~")
    assert ".mlp.up_proj  ░" in line
    assert len(line) <= 60


def test_without_a_terminal_that_can_show_shades_it_is_ascii(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Scale.shares().marks == MARKS
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert Scale.shares().marks == ASCII_MARKS
    plain(Scale.shares().legend(str)).encode("ascii")
