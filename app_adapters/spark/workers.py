"""The Workers of a VM, one of one core for each slot: started, decommissioned, found again, and measured."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from typing import Any, Dict, Sequence

from app_adapters.errors import ApplicationError
from app_adapters.processes.process import (
    arguments,
    boot_id,
    environment,
    families,
    leads_session,
    lives,
    proportional_mib,
    signals,
    started,
)
from app_adapters.processes.state_file import StateFile

EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
STOP_S = 8.0  # Spark's Worker ends its executors first
KILL_S = 5.0
LOOK_S = 0.05
#: Between an executor's signal and its Worker's: the driver is to hear of the executor's first.
SIGNAL_GAP_S = 0.5
#: In a Worker's environment, by which one is found that was started and not remembered.
MARK = "EBBTIDE_SPARK_WORKER"

#: Processes by pid, each with the time of its start, so that a pid that is used again is not taken for it.
Processes = Dict[int, int]


class Workers:
    """Workers that are all started with the same command line.

    A slot that is given up leaves its Worker idle: decommissioned, without executors. As soon as a Worker ends, Spark
    forgets the shuffle files of all executors on its host, so it is ended (`end_idle`) when that costs nothing.

    `state_file` remembers the processes: they go on without their adapter, and a new adapter takes them over. After a
    restart of the machine it still tells the size that slots are fitted to. `log` gets what they print.

    Raises: ApplicationError where the state file cannot be read.
    """

    def __init__(self, command: Sequence[str], state_file: str, log: str = os.devnull) -> None:
        self._command = list(command)
        self._state = StateFile(state_file)
        self._log = log
        self._children: list[subprocess.Popen[bytes]] = []
        self._executors: Processes = {}  # of idle Workers, as far as they were seen
        self._boot_id = boot_id()
        state = self._state.load() or {}
        # An earlier version wrote it where no restart left it.
        of_now = state.get("boot_id", self._boot_id) == self._boot_id
        try:
            self._slots, self._idle = (_processes(state.get(name, []) if of_now else []) for name in ("slots", "idle"))
            #: The size of the VM that slots were last fitted to, by component.
            self.sizes = {str(name): float(size) for name, size in state.get("sizes", {}).items()}
            self._starting = str(state.get("starting", ""))  # the mark of the Worker that is being started
        except (AttributeError, TypeError, ValueError) as error:
            raise ApplicationError(f"the state file {state_file} is damaged: {error}") from None
        if state and "slots" not in state:
            raise ApplicationError(f"the state file {state_file} is another version's: end its Worker, then remove it")
        if self._starting and of_now:
            self._adopt()

    @property
    def cores(self) -> int:
        """Workers that take work."""
        return len(self._living(self._slots))

    @property
    def idle(self) -> int:
        """Workers of given-up slots."""
        return len(self._living(self._idle))

    def pids(self) -> Processes:
        """The processes of all trees: Workers, executors, their Python workers."""
        return self._tree({**self._slots, **self._idle})

    def resident_mib(self) -> float:
        """PSS of all trees in MiB; a process that ends meanwhile counts nothing."""
        size_mib = 0.0
        for pid, began in self.pids().items():
            try:
                size_mib += proportional_mib(pid)
            except ApplicationError:
                if self._living({pid: began}):
                    raise
        return size_mib

    def fit(self, sizes: dict[str, float]) -> None:
        """Remember the size that slots are fitted to. Raises: ApplicationError."""
        self.sizes = sizes
        self._remember()

    def start(self, count: int) -> None:
        """Start Workers until so many take work. Raises: ApplicationError."""
        self._slots = self._living(self._slots)
        while len(self._slots) < count:
            self._starting = secrets.token_hex(16)
            self._remember()  # what cannot be remembered must not be started
            try:
                with open(self._log, "ab") as log:
                    # A session of its own: what ends the adapter leaves the Worker alone.
                    child = subprocess.Popen(
                        self._command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env={**os.environ, MARK: self._starting},
                        start_new_session=True,
                    )
            except OSError as error:
                raise ApplicationError(f"a Worker cannot be started: {error}") from None
            self._children.append(child)
            self._slots[child.pid] = started(child.pid) or 0
        self._starting = ""
        self._remember()

    def _adopt(self) -> None:
        """Take the Worker over whose start an adapter did not live to remember; what that started has its mark, too."""
        mark = self._starting.encode()
        pids = [pid for below in families().values() for pid in below]
        marked = [pid for pid in pids if leads_session(pid) and (environment(pid) or {}).get(MARK.encode()) == mark]
        began = {pid: started(pid) or 0 for pid in marked if pid not in self._slots}
        if began:
            first = min(began, key=lambda pid: (began[pid], pid))
            self._slots[first] = began[first]

    def decommission(self, count: int) -> str:
        """Give the youngest slots up: their executors end when their tasks have and their blocks have moved.

        The executors hear of it before their Workers: of a Worker that is decommissioned with executors Spark believes
        that its whole host goes, and forgets the shuffle files of the other slots. Who would be ended by the signal is
        spared it; returns a note of that, or nothing. Raises: ApplicationError.
        """
        self._give_up(count)
        spared = _tell({pid: began for pid, began in self.executors().items() if EXECUTOR in arguments(pid)})
        time.sleep(SIGNAL_GAP_S)
        spared += _tell(self._living(self._idle))
        note = f"{spared} processes do not handle SIGPWR (spark.decommission.enabled) and were not told"
        return note if spared else ""

    def executors(self) -> Processes:
        """Processes of given-up slots that live, also those that outlive the executor that began them."""
        tree = {pid: began for pid, began in self._tree(self._idle).items() if pid not in self._idle}
        self._executors = self._living({**self._executors, **tree})
        return self._executors

    def end_executors(self) -> None:
        """End the executors of given-up slots with their tasks. Raises: ApplicationError where a process stays."""
        self._end(self.executors(), self._executors)

    def end_deaf(self) -> None:
        """End idle Workers that could not be told, so that they begin no more executors. Raises: ApplicationError."""
        self._end_workers(_deaf(self._living(self._idle)))

    def take_deaf_back(self) -> None:
        """Have the slots of Workers again that could not be told. Raises: ApplicationError."""
        deaf = _deaf(self._living(self._idle))
        self._idle = {pid: began for pid, began in self._idle.items() if pid not in deaf}
        self._slots = {**self._slots, **deaf}
        self._remember()

    def kill(self, count: int) -> None:
        """End the Workers of the youngest slots, executors and all, at once. Raises: ApplicationError."""
        self._give_up(count)
        self.end_idle()

    def end_idle(self, keep: int = 0) -> None:
        """End the Workers of given-up slots but the youngest `keep`. Raises: ApplicationError."""
        self._idle = self._living(self._idle)
        self._end_workers(dict(list(self._idle.items())[: max(len(self._idle) - keep, 0)]))

    def _end_workers(self, ended: Processes) -> None:
        self._end(ended, {**self._tree(ended), **self.executors()} if ended else {})
        self._idle = self._living(self._idle)
        self._remember()

    def _give_up(self, count: int) -> None:
        living = self._living(self._slots)
        going = list(living)[max(len(living) - count, 0) :]
        self._idle = {**self._living(self._idle), **{pid: living.pop(pid) for pid in going}}
        self._slots = living
        self._remember()

    def _end(self, asked: Processes, tree: Processes) -> None:
        """SIGTERM to some; what is left of the whole tree after a while is killed."""
        for pid, began in asked.items():
            _signal(pid, began, signal.SIGTERM)
        end = time.monotonic() + STOP_S
        while self._living(tree) and time.monotonic() < end:
            tree = {**tree, **self._tree(tree)}
            time.sleep(LOOK_S)
        for pid, began in self._living(tree).items():
            _signal(pid, began, signal.SIGKILL)
        end = time.monotonic() + KILL_S
        while self._living(tree):
            if time.monotonic() > end:
                raise ApplicationError(f"processes {sorted(self._living(tree))} of Workers cannot be ended")
            time.sleep(LOOK_S)

    def _living(self, processes: Processes) -> Processes:
        self._children = [child for child in self._children if child.poll() is None]  # takes the dead from the table
        return {pid: began for pid, began in processes.items() if lives(pid, began)}

    def _tree(self, roots: Processes) -> Processes:
        found: Processes = {}
        waiting: list[int] = list(self._living(roots))
        below = families()
        while waiting:
            pid = waiting.pop()
            began = started(pid)
            if began is not None and pid not in found:
                found[pid] = began
                waiting += below.get(pid, [])
        return found

    def _remember(self) -> None:
        self._state.save(
            {
                "boot_id": self._boot_id,
                "starting": self._starting,
                "slots": list(self._slots.items()),
                "idle": list(self._idle.items()),
                "sizes": dict(self.sizes),
            }
        )


def _processes(rows: Any) -> Processes:
    return {int(pid): int(began) for pid, began in rows}


def _tell(processes: Processes) -> int:
    """SIGPWR to those that handle it; returns how many do not."""
    deaf = _deaf(processes)
    for pid, began in processes.items():
        if pid not in deaf:
            _signal(pid, began, signal.SIGPWR)
    return len(deaf)


def _deaf(processes: Processes) -> Processes:
    """Those that SIGPWR would end: nobody handles or ignores it there."""
    return {
        pid: began
        for pid, began in processes.items()
        if not signals(pid, "SigCgt", "SigIgn") >> (signal.SIGPWR - 1) & 1
    }


def _signal(pid: int, began: int, number: int) -> None:
    if lives(pid, began):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
        except PermissionError as error:
            raise ApplicationError(f"process {pid} of a Worker cannot be ended: {error.strerror}") from None
