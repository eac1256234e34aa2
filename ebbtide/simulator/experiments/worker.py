"""A process that makes runs: `main` of a process that has a socket's descriptor as its argument; all comes over it."""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, Final

from ebbtide.simulator import compiling
from ebbtide.simulator.errors import ExperimentError
from ebbtide.simulator.experiments.finished import code_of, execute, failed
from ebbtide.simulator.experiments.model import model_named

#: Seconds between two words about how far a run is.
_REPORT_S: Final = 0.25

PROGRESS: Final = "progress"
COMPILING: Final = "compiling"
FINISHED: Final = "finished"


def serve(connection: Connection) -> None:
    """Make runs until the other side hangs up."""
    number = -1
    # What is compiled is said by a thread of its own.
    sending = threading.Lock()

    def send(*message: Any) -> None:
        with sending:
            connection.send(message)

    compiling.LISTENERS.append(lambda what: send(COMPILING, number, what))
    name, content, modules, ours = connection.recv()
    model: Any = None
    prepared: Any = None
    broken = None
    try:
        if code_of(name, modules) != ours:
            raise ExperimentError("model", f"the source of {name} has changed since the sweep began: run it again")
        model, prepared = model_named(name), pickle.loads(content)
    except Exception as error:
        broken = failed(error)
    while True:
        try:
            number, given, seed = connection.recv()
        except EOFError:
            return
        reported_s = time.monotonic()

        def progress(share: float, number: int = number) -> None:
            nonlocal reported_s
            now_s = time.monotonic()
            if now_s - reported_s >= _REPORT_S:
                reported_s = now_s
                send(PROGRESS, number, min(max(float(share), 0.0), 1.0))

        finished = broken or execute(model, given, seed, prepared, progress)
        send(FINISHED, number, finished)


def end_with(descriptor: int) -> None:
    """End this process as soon as the other side is gone, also in the middle of a run."""

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLHUP)
        while not any(events & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, events in poll.poll()):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def main() -> None:
    """The command."""
    # Ctrl-C is for the process that gives the work; it ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = int(sys.argv[1])
    end_with(descriptor)
    try:
        serve(Connection(descriptor))
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(1)
