"""The Worker process of a VM: started, stopped, found again after a restart of its adapter, and measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from typing import Mapping, Sequence

from app_adapters.errors import ApplicationError
from app_adapters.processes.process import children, proportional_mib, started
from app_adapters.processes.state_file import StateFile

STATE_BYTES = 4096
STOP_S = 8.0  # Spark's Worker ends its executors first
KILL_S = 5.0
LOOK_S = 0.05


class WorkerProcess:
    """One Worker, whose command line has {cores} where the number of its cores goes.

    `state_file` remembers the process: it goes on without its adapter, and a new adapter takes it over. `log` gets
    what the Worker prints.
    """

    def __init__(self, command: Sequence[str], state_file: str, log: str = os.devnull) -> None:
        self._command = list(command)
        self._state_file = state_file
        self._log = log
        self._child: subprocess.Popen[bytes] | None = None
        self._pid = self._began = self._cores = 0
        #: Whether it was ended for good by `stop`, as far as is remembered.
        self.given_up = False
        self._find()

    @property
    def running(self) -> bool:
        """Whether it lives."""
        if self._child is not None:
            self._child.poll()  # takes the dead one from the process table
        return self._pid > 0 and started(self._pid) == self._began and not _zombie(self._pid)

    @property
    def cores(self) -> int:
        """Cores that it was started with, 0 where it does not run."""
        return self._cores if self.running else 0

    def pids(self) -> dict[int, int]:
        """The processes of its tree (Worker, executors, their Python workers), each with its time of start."""
        if not self.running:
            return {}
        found: dict[int, int] = {}
        waiting = [self._pid]
        while waiting:
            pid = waiting.pop()
            began = started(pid)
            if began is not None and pid not in found:
                found[pid] = began
                waiting += children(pid)
        return found

    def resident_mib(self) -> float:
        """PSS of the whole tree in MiB; a process that ends meanwhile counts nothing."""
        size_mib = 0.0
        for pid in self.pids():
            try:
                size_mib += proportional_mib(pid)
            except ApplicationError:
                if os.path.exists(f"/proc/{pid}/stat") and not _zombie(pid) and pid == self._pid:
                    raise
        return size_mib

    def start(self, cores: int) -> None:
        """Start it with so many cores. Raises: ApplicationError."""
        if self.running:
            raise ApplicationError("the Worker runs already")
        self.given_up = False
        self._remember()  # what cannot be remembered must not be started
        argv = [word.replace("{cores}", str(cores)) for word in self._command]
        try:
            with open(self._log, "ab") as log:
                # A session of its own: what ends the adapter leaves the Worker alone.
                self._child = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
        except OSError as error:
            raise ApplicationError(f"the Worker cannot be started: {error}") from None
        self._pid, self._began, self._cores = self._child.pid, started(self._child.pid) or 0, cores
        self._remember()

    def stop(self, also: Mapping[int, int] | None = None) -> None:
        """End the whole tree: SIGTERM to the Worker, which ends its executors; what is left then is killed.

        `also`: processes (as of `pids`) that were of the tree, and may have outlived the executor that began them.

        Raises: ApplicationError where a process stays.
        """
        tree = {**(also or {}), **self.pids()}
        if self.running:
            _signal(self._pid, self._began, signal.SIGTERM)
        end = time.monotonic() + STOP_S
        while self._living(tree) and time.monotonic() < end:
            tree.update(self.pids())
            time.sleep(LOOK_S)
        for pid, began in self._living(tree).items():
            _signal(pid, began, signal.SIGKILL)
        end = time.monotonic() + KILL_S
        while self._living(tree):
            if time.monotonic() > end:
                raise ApplicationError(f"processes {sorted(self._living(tree))} of the Worker cannot be ended")
            time.sleep(LOOK_S)
        self._pid = self._began = self._cores = 0
        self.given_up = True
        self._remember()

    def _living(self, tree: dict[int, int]) -> dict[int, int]:
        if self._child is not None:
            self._child.poll()
        return {pid: began for pid, began in tree.items() if started(pid) == began and not _zombie(pid)}

    def _find(self) -> None:
        """Take over the process that an earlier adapter started."""
        try:
            with open(self._state_file, "rb") as file:
                state = json.loads(file.read(STATE_BYTES).decode("ascii"))
            pid, began, cores = int(state["pid"]), int(state["started"]), int(state["cores"])
            self.given_up = state.get("given_up") is True
        except (OSError, ValueError, KeyError, TypeError):
            return
        if pid > 0 and started(pid) == began:
            self._pid, self._began, self._cores = pid, began, cores

    def _remember(self) -> None:
        state = {"pid": self._pid, "started": self._began, "cores": self._cores, "given_up": self.given_up}
        StateFile(self._state_file).save(state)


def _signal(pid: int, began: int, number: int) -> None:
    if started(pid) == began:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
        except PermissionError as error:
            raise ApplicationError(f"process {pid} of the Worker cannot be ended: {error.strerror}") from None


def _zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except (OSError, IndexError):
        return False
