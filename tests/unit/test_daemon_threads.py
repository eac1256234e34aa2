"""Threads that are not waited for: few, made when they are needed, and gone when nobody needs them any more."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from ebbtide.threads import DaemonThreads
from tests.waiting import until_sync

HANGS = """
import threading
from ebbtide.threads import DaemonThreads
begun = threading.Event()
def hang():
    begun.set()
    threading.Event().wait()
DaemonThreads(1, "hung").submit(hang)
begun.wait()
"""


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"{name}-")]


def test_a_program_ends_although_work_hangs() -> None:
    subprocess.run([sys.executable, "-c", HANGS], timeout=30, check=True)


def test_no_more_threads_are_made_than_there_is_work_at_once() -> None:
    pool, goes_on = DaemonThreads(3, "few"), threading.Event()
    for number in range(20):
        assert pool.submit(int, number).result(10.0) == number
        until_sync(lambda: pool._idle._value == 1)
    assert len(threads("few")) == 1
    waiting = [pool.submit(goes_on.wait, 20.0) for _ in range(5)]
    assert len(threads("few")) == 3
    goes_on.set()
    assert [one.result(10.0) for one in waiting] == [True] * 5
    pool.shutdown()


def test_an_error_is_that_of_the_work() -> None:
    pool = DaemonThreads(1, "failing")
    with pytest.raises(ValueError, match="invalid literal"):
        pool.submit(int, "x").result(10.0)
    pool.shutdown()


def test_what_was_shut_down_takes_no_work_and_its_threads_end() -> None:
    pool, begun, goes_on = DaemonThreads(2, "over"), threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return goes_on.wait(20.0)

    under_way = [pool.submit(work) for _ in range(2)]
    queued = pool.submit(int)
    assert begun.wait(10.0)
    until_sync(lambda: all(one.running() for one in under_way))
    pool.shutdown(cancel_futures=True)
    assert queued.cancelled()
    with pytest.raises(RuntimeError, match="take no more work"):
        pool.submit(int)
    goes_on.set()
    assert [one.result(10.0) for one in under_way] == [True, True], "what was under way is not cut off"
    until_sync(lambda: not threads("over"))


def test_the_threads_of_what_nobody_uses_any_more_end() -> None:
    pool = DaemonThreads(1, "forgotten")
    assert pool.submit(int).result(10.0) == 0
    del pool
    gc.collect()
    until_sync(lambda: not threads("forgotten"))
