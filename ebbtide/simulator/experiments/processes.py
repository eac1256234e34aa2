"""Runs on all cores: worker processes, each with a socket; one that dies costs its run only."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Final, Self

from ebbtide.simulator.experiments import worker
from ebbtide.simulator.experiments.code import own_modules
from ebbtide.simulator.experiments.experiment import Run
from ebbtide.simulator.experiments.finished import Finished, code_of
from ebbtide.simulator.experiments.model import model_named
from ebbtide.simulator.experiments.shared import packed

#: How long a worker may take to end before it is killed.
_SILENT_S: Final = 5.0
#: Seconds between two looks where nothing happens, so that time left goes on counting.
LOOK_S: Final = 0.5
_COMMAND: Final = "from ebbtide.simulator.experiments import worker; worker.main()"
#: Each worker is one core; libraries that start threads of their own would only be in each other's way.
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened: a run has finished, or (``finished`` None) goes on.

    :param under_way: the share done of each run under way, by its number.
    """

    number: int | None
    finished: Finished | None
    under_way: Mapping[int, float]
    #: What a run has to compile first; empty: nothing.
    compiling: str = ""


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    number: int | None = None
    share: float = 0.0
    compiling: str = ""


class Workers:
    """Worker processes for one model, whose code is that of this process. Use as a context manager; its end is theirs.

    :param count: how many.
    """

    def __init__(self, model: str, prepared: Any, count: int) -> None:
        modules = own_modules(model_named(model), model)
        self._hello = (model, packed(prepared), modules, code_of(model, modules))
        self._count = count
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def events(self, runs: Sequence[Run]) -> Iterator[Event]:
        """Make these runs; says what happens until all have finished."""
        waiting = deque(range(len(runs)))
        left = len(runs)
        while left:
            while waiting and len(self._workers) < min(self._count, left):
                self._workers.append(self._started())
            for one in self._workers:
                if one.number is None and waiting:
                    self._give(one, waiting.popleft(), runs)
            # A worker that died is at the end of its socket, too.
            ready = wait([one.connection for one in self._workers], LOOK_S)
            if not ready:
                yield Event(None, None, self._under_way(), self._compiling())
            for one in [w for w in self._workers if w.connection in ready]:
                number, finished = self._heard(one)
                if finished is not None and number is not None:
                    left -= 1
                    yield Event(number, finished, self._under_way(), self._compiling())
                elif number is not None:
                    yield Event(None, None, self._under_way(), self._compiling())

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        for one in self._workers:
            one.connection.close()
            one.process.terminate()
        deadline_s = time.monotonic() + _SILENT_S
        for one in self._workers:
            try:
                one.process.wait(max(deadline_s - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
        self._workers.clear()

    def _started(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            environment = os.environ | dict.fromkeys(_ONE_THREAD, "1")
            environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
            process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                # What a model prints must not stand between our own words on stdout.
                stdout=2,
                start_new_session=True,
            )
            connection = Connection(ours.detach())
        one = _Worker(process, connection)
        self._send(one, self._hello)
        return one

    def _give(self, one: _Worker, number: int, runs: Sequence[Run]) -> None:
        one.number, one.share = number, 0.0
        self._send(one, (number, dict(runs[number].case.given), runs[number].seed))

    @staticmethod
    def _send(one: _Worker, message: Any) -> None:
        # If it is dead, its run fails when its end is read.
        with suppress(BrokenPipeError, ConnectionResetError):
            one.connection.send(message)

    def _heard(self, one: _Worker) -> tuple[int | None, Finished | None]:
        try:
            kind, number, content = one.connection.recv()
        except (EOFError, OSError):  # also in the middle of a message
            return self._died(one)
        if kind == worker.PROGRESS:
            one.share = content
            return number, None
        if kind == worker.COMPILING:
            one.compiling = content
            return number, None
        one.number = None
        return number, content

    def _died(self, one: _Worker) -> tuple[int | None, Finished | None]:
        self._workers.remove(one)
        one.connection.close()
        code = one.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return one.number, None if one.number is None else Finished(error=f"its process {how}")

    def _compiling(self) -> str:
        return next((one.compiling for one in self._workers if one.compiling), "")

    def _under_way(self) -> dict[int, float]:
        return {one.number: one.share for one in self._workers if one.number is not None}
