from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergegit.errors import BadBudget
from mergegit.merge.budget import Budget

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0), ("1", 1), ("4096", 4096), ("17b", 17), ("0GiB", 0), ("0%", 0),
        ("2GiB", 2 * GIB), ("2gib", 2 * GIB), ("2G", 2 * GIB), ("2g", 2 * GIB), ("2GB", 2 * 10**9),
        ("500MB", 500 * 10**6), ("500 MB", 500 * 10**6), ("500M", 500 * 2**20),
        ("1.5KiB", 1536), ("1.5kB", 1500), (".5KiB", 512), ("1.KiB", 1024), ("  7  ", 7),
        ("1TiB", 2**40), ("1TB", 10**12), ("1t", 2**40), ("3K", 3072),
        ("0.9999B", 0), ("1.9", 1),
    ],
)  # fmt: skip
def test_bytes_are_written_with_units(text: str, nbytes: int) -> None:
    assert Budget.parse(text).bytes_of(10**9) == nbytes


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("10%", Fraction(1, 10)), ("12.5%", Fraction(1, 8)), ("100%", Fraction(1)),
        ("100.0%", Fraction(1)), ("0.001%", Fraction(1, 100_000)), (".5%", Fraction(1, 200)),
        ("10 %", Fraction(1, 10)), ("00.1%", Fraction(1, 1000)),
    ],
)  # fmt: skip
def test_shares_are_of_the_raw_bytes(text: str, share: Fraction) -> None:
    assert Budget.parse(text).bytes_of(8 * 10**9) == share * 8 * 10**9


@pytest.mark.parametrize(
    "text",
    [
        "", "%", "GiB", "-1", "-10%", "+5%", "ten", "10%%", "10%GiB", "1,5GiB", "1e9", "nan", "inf",
        "10 G iB", "5PB", "0x10", "1.2.3", "10 percent", "1_000",
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadBudget, match="is not a budget") as error:
        Budget.parse(text)
    assert "10%" in error.value.hint


@pytest.mark.parametrize("text", ["100.1%", "101%", "1000%", "100.0001%"])
def test_more_than_everything_is_refused(text: str) -> None:
    with pytest.raises(BadBudget, match="more than everything"):
        Budget.parse(text)


@given(st.decimals(0, 100, places=6), st.integers(0, 10**15))
def test_a_share_is_never_more_than_was_asked(percent: object, raw: int) -> None:
    nbytes = Budget.parse(f"{percent}%").bytes_of(raw)
    exact = Fraction(str(percent)) / 100 * raw
    assert nbytes <= exact
    assert exact - nbytes <= 1 + raw / 10**6


@given(st.integers(0, 10**18))
def test_a_number_of_bytes_is_taken_to_the_byte(nbytes: int) -> None:
    assert Budget.parse(str(nbytes)).bytes_of(1) == nbytes


def test_everything_is_everything_however_large() -> None:
    for raw in (0, 1, 7, 10**15 + 1, 2**63):
        assert Budget.parse("100%").bytes_of(raw) == raw


@given(st.integers(0, 10**12), st.integers(0, 100), st.integers(0, 100))
def test_a_larger_share_is_no_fewer_bytes(raw: int, a: int, b: int) -> None:
    low, high = sorted((a, b))
    assert Budget.parse(f"{low}%").bytes_of(raw) <= Budget.parse(f"{high}%").bytes_of(raw)
