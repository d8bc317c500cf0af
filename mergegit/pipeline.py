"""Bounded parallel work that keeps its order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def default_threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(
    work: Callable[[_Item], _Result],
    items: Iterable[_Item],
    *,
    threads: int,
    ahead: int | None = None,
) -> Iterator[_Result]:
    """``work`` of each item, in the order of the items, by ``threads`` threads.

    At most ``ahead`` items (by default two more than there are threads) are taken from ``items``
    before their results have been handed out, so that memory is bounded by that many. Items are
    taken, and results handed out, in the caller's thread. The first error ends the iteration;
    what runs then is waited for.
    """
    limit = ahead or threads + 2
    pending: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="mergegit") as pool:
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) >= limit:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
