"""What a run of the tests has left on the machine: processes, domains, networks, swap, mounts, namespaces."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

#: In the environment of every process of a run.
VARIABLE = "EBB_TEST_RUN"
#: How long what ends with the tests may take.
END_S = 10.0

_DIRECTORIES = {
    "domain": ("/run/libvirt/qemu", "*.pid"),
    "definition": ("/etc/libvirt/qemu", "*.xml"),
    "virtual network": ("/etc/libvirt/qemu/networks", "*.xml"),
    "network interface": ("/sys/class/net", "*"),
    "network namespace": ("/run/netns", "*"),
    "directory": ("/var/tmp", "ebbtide-*"),
}


def on_machine() -> set[str]:
    """What tests with real guests make, whoever made it."""
    found = {f"{what} {path}" for what, (home, name) in _DIRECTORIES.items() for path in Path(home).glob(name)}
    found |= {f"swap {line.split()[0]}" for line in Path("/proc/swaps").read_text().splitlines()[1:]}
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return found | {f"mount {mount}" for mount in mounts if "ebb" in mount or "pytest" in mount}


def processes(run: str) -> set[str]:
    """Processes of a run, but for this one with its parents and its children, which end with it."""
    own = psutil.Process()
    family = {process.pid for process in (own, *own.parents(), *own.children(recursive=True))}
    entry, found = f"{VARIABLE}={run}".encode(), set()
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        if process.pid in family or process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if entry in environment:
            found.add(f"process {process.pid} ({' '.join(process.info['cmdline'] or [])[:100]})")
    return found


class Check:
    """A run that leaves something behind fails. In the process that all others of the run are started from."""

    def __init__(self) -> None:
        #: In the environment of all processes that are started from now on.
        self._run = os.environ[VARIABLE] = f"{os.getpid()}-{time.monotonic_ns()}"
        self._before = on_machine()
        self._guests = False
        self._left: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._guests = self._guests or "guest" in report.keywords

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._left = self._found()
        if self._left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left:
            terminalreporter.section("left behind", red=True)
            terminalreporter.write("".join(f"{name}\n" for name in self._left))

    def _found(self) -> list[str]:
        """What is left, a name each; what only tests with real guests make where there were any."""
        deadline_s = time.monotonic() + END_S
        while True:
            found = processes(self._run) | (on_machine() - self._before if self._guests else set())
            if not found or time.monotonic() > deadline_s:
                return sorted(found)
            time.sleep(0.2)
