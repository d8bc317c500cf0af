"""Bounded parallel work that keeps its order."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegit.pipeline import default_threads, ordered_map


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=20), st.integers(1, 4), st.integers(1, 6))
def test_results_come_in_the_order_of_their_items(
    delays: list[int], threads: int, ahead: int
) -> None:
    def work(item: tuple[int, int]) -> int:
        time.sleep(item[1] / 2000)
        return item[0]

    results = ordered_map(work, enumerate(delays), threads=threads, ahead=ahead)
    assert list(results) == list(range(len(delays)))


def test_threads_work_at_the_same_time() -> None:
    meeting = threading.Barrier(3)
    assert len(list(ordered_map(lambda _: meeting.wait(10), range(6), threads=3))) == 6


def test_no_more_threads_work_than_were_asked_for() -> None:
    lock, running, most = threading.Lock(), 0, 0

    def work(_: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.002)
        with lock:
            running -= 1

    list(ordered_map(work, range(12), threads=2, ahead=8))
    assert most <= 2


@pytest.mark.parametrize("ahead", [1, 3, None])
def test_no_more_items_are_taken_than_stated(ahead: int | None) -> None:
    threads, taken, handed_out, most = 2, 0, 0, 0

    def items() -> Iterator[int]:
        nonlocal taken, most
        for item in range(30):
            taken += 1
            most = max(most, taken - handed_out)
            yield item

    for _ in ordered_map(lambda item: item, items(), threads=threads, ahead=ahead):
        handed_out += 1
    assert handed_out == 30
    assert most == (threads + 2 if ahead is None else ahead)


def test_items_are_taken_in_the_callers_thread() -> None:
    def items() -> Iterator[int]:
        for _ in range(5):
            yield threading.get_ident()

    assert set(ordered_map(lambda item: item, items(), threads=2)) == {threading.get_ident()}


def test_an_error_in_the_work_ends_the_iteration_where_it_stood() -> None:
    def work(item: int) -> int:
        if item == 3:
            raise OSError("the third")
        return item

    results = ordered_map(work, range(100), threads=2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the third"):
        next(results)
    with pytest.raises(StopIteration):
        next(results)


def test_after_an_error_nothing_more_is_begun_and_nothing_runs_on() -> None:
    begun: list[int] = []
    running = threading.Semaphore(0)

    def work(item: int) -> None:
        begun.append(item)
        time.sleep(0.05 if item else 0.01)
        running.release()
        if item == 0:
            raise OSError("the first")

    with pytest.raises(OSError, match="the first"):
        list(ordered_map(work, range(100), threads=1, ahead=50))
    finished = sum(running.acquire(blocking=False) for _ in begun)
    assert finished == len(begun) < 50


def test_an_error_of_the_items_reaches_the_caller() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        list(ordered_map(lambda item: item, items(), threads=2))


def test_closing_early_leaves_no_threads() -> None:
    before = threading.active_count()
    results = ordered_map(lambda item: item, iter(range(10**9)), threads=3)
    assert [next(results), next(results)] == [0, 1]  # type: ignore[call-overload]
    results.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_nothing_to_do_gives_nothing() -> None:
    assert list(ordered_map(lambda item: item, [], threads=2)) == []


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_default_threads_are_the_cores_that_may_be_used() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert default_threads() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert default_threads() == len(allowed)
