"""A real Dask cluster on loopback: a scheduler and workers as processes, each of which can be killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from ebbtide.lab.cluster import free_ports

LIMIT_S = 60.0


class DaskCluster:
    """Workers have the names of machines and a resource ``core``. They lead process groups of their own."""

    def __init__(self, workers: int = 2, cores: int = 4) -> None:
        self.names = [f"n{number}" for number in range(1, workers + 1)]
        self.cores = cores
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.port = free_ports(1)[0]
        self.directory = Path()

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def tasks(self) -> Path:
        return self.directory / "tasks"

    @property
    def runs(self) -> Path:
        return self.directory

    def __enter__(self) -> Self:
        self.directory = Path(tempfile.mkdtemp(prefix="ebb-dask-"))
        self.tasks.mkdir()
        try:
            self.start_scheduler()
            for name in self.names:
                self.start(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for name in [*self.names, "scheduler"]:
            self.kill(name)
        for entry in Path("/proc").iterdir():
            # Commands of tasks, whose workers are gone.
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if str(self.directory).encode() in (entry / "cmdline").read_bytes():
                        os.kill(int(entry.name), signal.SIGKILL)
        if self.directory != Path():
            shutil.rmtree(self.directory, ignore_errors=True)

    def start_scheduler(self) -> None:
        self._start("scheduler", "dask_scheduler", "--port", str(self.port), "--no-dashboard", "--no-show")
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            time.sleep(0.1)
        raise AssertionError(self._log("scheduler"))

    def start(self, name: str) -> None:
        """A worker."""
        options = ["--name", name, "--nthreads", str(self.cores), "--resources", f"core={self.cores}"]
        directory = ["--local-directory", str(self.directory)]
        self._start(name, "dask_worker", self.url, *options, *directory, "--no-nanny", "--no-dashboard")

    def _start(self, name: str, module: str, *options: str) -> None:
        argv = [sys.executable, "-m", f"distributed.cli.{module}", *options, "--host", "127.0.0.1"]
        with (self.directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                argv, cwd=self.directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, name: str) -> None:
        """``kill -9``; commands of tasks lead sessions of their own, and go on."""
        process = self._processes.pop(name, None)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")[-2000:]
