"""Moments as people write them."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from mergegit.cli.moment import moment

NOW = datetime(2025, 6, 15, 13, 30, tzinfo=timezone.utc).timestamp()  # noqa: UP017
DAY = 86400


@pytest.mark.parametrize(
    ("text", "ago"),
    [
        ("2 weeks", 14 * DAY), ("2 weeks ago", 14 * DAY), ("2w", 14 * DAY), ("1 week", 7 * DAY),
        ("3 days", 3 * DAY), ("3d", 3 * DAY), ("12 Hours Ago", DAY / 2), ("12h", DAY / 2),
        ("5 min", 300), ("5 minutes", 300), ("90 seconds", 90), ("90 s", 90), ("90s", 90),
        ("1 month", 30 * DAY), ("2 years", 730 * DAY), ("0 days", 0),
    ],
)  # fmt: skip
def test_so_long_ago(text: str, ago: float) -> None:
    assert moment(text, NOW) == NOW - ago


@pytest.mark.parametrize(
    "text", ["2025-06-01", "2025-06-01 12:30", "2025-06-01T12:30:15", " 2025-06-01 "]
)
def test_dates_are_local(text: str) -> None:
    assert moment(text, NOW) == datetime.fromisoformat(text.strip()).timestamp()


def test_dates_may_say_their_zone() -> None:
    assert moment("2025-06-15T15:30:00+02:00", NOW) == NOW
    assert moment("2025-06-15T13:30:00Z", NOW) == NOW


def test_days_begin_at_midnight() -> None:
    today = moment("today", NOW)
    assert today is not None
    assert datetime.fromtimestamp(today).strftime("%H:%M:%S") == "00:00:00"
    assert 0 <= NOW - today < DAY
    assert moment("yesterday", NOW) == today - DAY


@pytest.mark.parametrize("text", ["", "soon", "2 moons", "weeks", "2025-13-01", "-2 days", "2.5 d"])
def test_what_is_no_moment(text: str) -> None:
    assert moment(text, NOW) is None
