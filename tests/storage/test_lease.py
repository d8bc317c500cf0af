"""The lease: writers share it, and whoever takes packs away has it alone."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from mergegit.errors import Busy
from mergegit.storage.lease import Lease
from mergegit.storage.location import Location
from mergegit.storage.store import Store

HOLD = """
import sys
from pathlib import Path
from mergegit.storage.location import Location
from mergegit.storage.store import Store
with Store(Location(Path(sys.argv[1]))).transaction():
    print("writing", flush=True)
    sys.stdin.read()
"""


@contextmanager
def writer(location: Location) -> Iterator[subprocess.Popen[str]]:
    """Another process that is writing until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, location.root],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        try:
            yield process
        finally:
            process.kill()


def test_writers_share_it(location: Location) -> None:
    with Lease(location).shared(), Lease(location).shared():
        pass


def test_it_is_not_had_alone_while_another_process_writes(location: Location) -> None:
    with writer(location) as process:
        with pytest.raises(Busy) as caught, Lease(location).exclusive():
            pass
        assert re.match(rf"another command .* \(process {process.pid}\)$", caught.value.message)
        assert caught.value.hint == "run this again when that has ended"


def test_it_is_free_when_its_holder_was_killed(location: Location) -> None:
    with writer(location) as process:
        process.kill()
        process.wait()
        with Lease(location).exclusive():
            pass


def test_who_waits_gets_it_when_the_writer_has_ended(location: Location) -> None:
    with writer(location) as process:
        assert process.stdin is not None
        threading.Timer(0.3, process.stdin.close).start()
        with Lease(location).exclusive(wait=True):
            assert process.wait() == 0


def test_a_short_writer_is_waited_for_in_any_case(location: Location) -> None:
    held, done = threading.Event(), []

    def move_a_ref() -> None:
        with Lease(location).shared():
            held.set()
            done.append(threading.Event().wait(0.2))

    thread = threading.Thread(target=move_a_ref)
    thread.start()
    held.wait()
    with Lease(location).exclusive():
        assert done
    thread.join()


def test_a_writer_waits_until_it_is_free(location: Location) -> None:
    order = []

    def write() -> None:
        with Lease(location).shared():
            order.append("write")

    thread = threading.Thread(target=write)
    with Lease(location).exclusive():
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        order.append("collect")
    thread.join()
    assert order == ["collect", "write"]


def test_who_has_it_alone_may_write(location: Location) -> None:
    with closing(Store(location)) as store, store.lease.exclusive(), store.transaction() as writes:
        writes.publish()


def test_another_thread_of_the_same_store_may_not_meanwhile(location: Location) -> None:
    lease = Lease(location)
    entered = threading.Event()

    def write() -> None:
        with lease.shared():
            entered.set()

    thread = threading.Thread(target=write)
    with lease.exclusive():
        thread.start()
        assert not entered.wait(0.2)
    thread.join()
    assert entered.is_set()


def test_a_transaction_holds_it_as_long_as_it_lives(location: Location) -> None:
    with closing(Store(location)) as store:
        with store.transaction(), pytest.raises(Busy), Lease(location).exclusive():
            pass
        with Lease(location).exclusive():
            pass


def test_where_nothing_can_be_written_there_is_nothing_to_hold(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object, *_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match="lease"), Lease(location).shared():
        pass
    monkeypatch.setattr(os, "access", lambda *_: False)
    entered = False
    with Lease(location).shared():
        entered = True
    assert entered
