"""A client in a thread of its own that asks a service throughout a test."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Self


class Load(ABC):
    """Runs while its `with` block does. `errors` are sentences; the latencies of all calls are kept."""

    pause_s = 0.002

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.latencies_s: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(60)

    def p99_ms(self) -> float:
        assert self.latencies_s
        return 1000 * sorted(self.latencies_s)[int(0.99 * (len(self.latencies_s) - 1))]

    @abstractmethod
    def ask(self, number: int) -> None:
        """One round, the `number`th. Calls are made within `timed`; OSError and the like end the client."""

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.latencies_s.append(time.perf_counter() - began)

    def _run(self) -> None:
        number = 0
        try:
            while not self._ended.wait(self.pause_s):
                number += 1
                self.ask(number)
        except (OSError, ValueError, AssertionError) as error:
            self.errors.append(str(error))
