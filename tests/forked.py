"""Daemons of tests as processes forked from one that has imported them: a start costs no imports.

A daemon that a test kills a hundred times is a process of its own each time, with its own sockets, files and signals.
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.chaos.namespaces import enter

#: Imported once, by the process that all others are forked from.
MODULES = (
    __name__,
    "tests.chaos.agent_process",
    "tests.chaos.manager_process",
    "tests.faults.staged_agent",
    "tests.hostagent.agent_process",
)
LOOK_S = 0.01

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(list(MODULES))


class Forked:
    """One process that runs the ``main`` of a module, as ``python -m MODULE ARGUMENTS`` would."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    @classmethod
    async def start(
        cls,
        module: str,
        arguments: list[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        namespace: str | None = None,
    ) -> Forked:
        """Start it. ``log``: where its standard error goes; ``namespace``: the network namespace that it is in."""
        process = _CONTEXT.Process(
            target=_run, args=(module, arguments, str(log), dict(environment or {}), namespace), daemon=True
        )
        await asyncio.to_thread(process.start)
        return cls(process)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    async def wait(self) -> int:
        while (code := self._process.exitcode) is None:
            await asyncio.sleep(LOOK_S)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing where it has ended."""
        if self._process.exitcode is None and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(module: str, arguments: list[str], log: str, environment: dict[str, str], namespace: str | None) -> None:
    """In the new process."""
    if namespace is not None:
        enter(f"/run/netns/{namespace}")
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()
