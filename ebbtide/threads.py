"""Threads for work that may hang, such as calls of libvirt or files of a network: few, and not waited for at the end.

Those of `concurrent.futures` are joined when Python ends, whatever ``shutdown(wait=False)`` says: a program that was
told to end would stay until its slowest call returned, or until it is killed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

#: A piece of work and where its result goes; None: there is no more.
_Queue = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class DaemonThreads(Executor):
    """At most so many, made when they are needed first. What is under way when the program ends goes with it.

    So it is for work that may be cut off anywhere; what has to be whole is to be waited for by who asked for it.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._made = 0
        self._over = False
        self._lock = threading.Lock()
        self._queue: _Queue = SimpleQueue()
        #: Counts threads that are through with their work: as many as wait, as long as more can be made.
        self._idle = threading.Semaphore(0)
        # Nobody need say that it is not used any more.
        weakref.finalize(self, self._queue.put, None)

    def submit(self, work: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """:raises RuntimeError: it was shut down."""
        with self._lock:
            if self._over:
                raise RuntimeError("these threads take no more work")
            future: Future[T] = Future()
            self._queue.put((future, partial(work, *args, **kwargs)))
            if not self._idle.acquire(blocking=False) and self._made < self._most:
                self._made += 1
                name = f"{self._name}-{self._made}"
                threading.Thread(target=_serve, args=(self._queue, self._idle), name=name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work. Whatever ``wait`` says, nothing is waited for."""
        with self._lock:
            self._over = True
            left = []
            while cancel_futures:
                try:
                    left.append(self._queue.get_nowait())
                except Empty:
                    break
            self._queue.put(None)
        for one in left:
            if one is not None:
                one[0].cancel()


def _serve(queue: _Queue, idle: threading.Semaphore) -> None:
    while True:
        work = queue.get()
        if work is None:
            queue.put(None)  # for the next thread
            return
        _do(*work)
        # What it holds is not to last until there is more to do.
        del work
        idle.release()


def _do(future: Future[T], work: Callable[[], T]) -> None:
    # Nobody may wait for it any more.
    if future.set_running_or_notify_cancel():
        try:
            found = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(found)
