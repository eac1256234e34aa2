"""Runs inside a guest in the guest agent's place: the same agent, but what it says of the guest is not true.

Usage: liar.py cpus|alternately|memory|application
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from guestagent.agent import Agent
from guestagent.applications import Applications
from guestagent.channel import PORT_NAME, find_port
from guestagent.cpus import Cpus
from guestagent.memory import Memory
from guestagent.messages import ApplicationStatusResult, CpusSetResult, CpuStatus, DeflateResult, MemoryStatus


class LyingCpus(Cpus):
    """Says that all CPUs it was asked for are off line, and leaves them on."""

    claimed: list[int] | None = None

    def status(self, brief: bool = False) -> CpuStatus:
        status = super().status(brief)
        if self.claimed is not None:
            status.online = [cpu for cpu in status.online if cpu in self.claimed]
        return status

    def set_online(self, wanted: Iterable[int]) -> CpusSetResult:
        self.claimed = sorted(wanted)
        return CpusSetResult(self.claimed, [])


class AlternatingCpus(LyingCpus):
    """Says now that all but CPU 0 are off line, now that all are on line, and leaves them on."""

    looks = 0

    def status(self, brief: bool = False) -> CpuStatus:
        self.looks += 1
        self.claimed = [0] if self.looks % 2 else None
        return super().status(brief)


class FrozenMemory(Memory):
    """Says for ever what it said at first."""

    first: MemoryStatus | None = None

    def status(self) -> MemoryStatus:
        if self.first is None:
            self.first = super().status()
        return self.first


class LyingApplications(Applications):
    """Promises everything, frees nothing, and says that it has freed far more."""

    def deflate(self, params: Any) -> DeflateResult:
        return DeflateResult(params.request_id, "promised", {"memory_mib": 4096.0}, 1.0, "at once", None)

    def status(self, request_id: str) -> ApplicationStatusResult:
        return ApplicationStatusResult(request_id, "released", {"memory_mib": 4096.0}, "say-so", "all of it")


about = sys.argv[1]
agent = Agent(
    find=lambda: find_port(PORT_NAME, "/sys"),
    cpus={"cpus": LyingCpus, "alternately": AlternatingCpus}.get(about, Cpus)(),
    memory=FrozenMemory() if about == "memory" else Memory(),
    adapters_dir="/etc/ebbtide/adapters.d",
    run_dir="/run/ebbtide",
)
if about == "memory":
    agent._memory.status()
if about == "application":
    agent._applications = LyingApplications("/etc/ebbtide/adapters.d", Memory(), Cpus().possible, lambda: "", print)
    agent._methods["application.deflate"] = agent._deflate
    agent._methods["application.status"] = lambda params: agent._applications.status(str(params["request_id"]))
print("ready", flush=True)
agent.run()
