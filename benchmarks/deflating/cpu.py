"""`cpu`: a fixed parallel compile in a guest whose CPU is deflated by quota, by off-lining and by both (004 Fig. 5b).

The compile is `python3 -m compileall -j 4` over fixed packages of the guest's own standard library, written to memory:
it needs no package that the guest has not, always uses four processes and reads next to nothing from disk.

004 compares vCPU hot-unplug with the hypervisor's throttle on 4 vCPUs with 4 real cores. Here four emulated vCPUs may
share two host cores, where taking a vCPU off line would cost nothing at all. So the VM's nominal size is what the host
can really give: 4 vCPUs with a quota of NOMINAL / 4 each, at most half of a host core's time for each of them on a host
of two cores. A deflation by 25, 50 and 75 % then takes that share of the cores away, and all three ways to take it
leave the VM the same total, so that only *how* it is taken differs:

* quota: 4 vCPUs stay on line, each with a smaller quota (vCPUs are stopped in the middle of what they do);
* off-lining: 3, 2 and 1 vCPUs stay on line, the quota of each as before;
* both, as the agent's cascade does: as few vCPUs as the size needs, the quota spread over those.

Two ways that come to the same setting, as the last two do at 75 %, are measured once and have one figure.

Every ratio is the time of one compile to the mean of the undeflated compiles before and after it in the same run.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.figures import BenchmarkFailed, Figure, Figures
from benchmarks.host.bench_host import MOUNT_SHM, BenchHost, bench, in_guest, lab_link, run_async, running, start_vm
from benchmarks.passes import Pass
from ebbtide.deflation.resources import ResourceVector
from ebbtide.lab.guest_link import LabLink
from ebbtide.messages.common import Vector
from ebbtide.messages.guest import CpusSet
from ebbtide.messages.vms import VMSpec
from hostagent.vm.managed_vm import ManagedVM

VCPUS = 4
SHARES = (0.25, 0.5, 0.75)
WAYS = ("quota", "off-lining", "both")
MEMORY_MIB = 1024.0
#: About 5 s of work undeflated under emulation on two cores: 30 compiles of up to four times that are one run.
PACKAGES = "json email/mime logging xml/dom unittest"
PREFIX = "/dev/shm/compiled"


@dataclass(frozen=True)
class Setting:
    """CPUs to keep on line, and the quota of each in cores."""

    online: int
    quota: float

    @property
    def cores(self) -> float:
        return self.online * min(self.quota, 1.0)


def setting(way: str, nominal: float, share: float) -> Setting:
    """How to take a share of the nominal cores. ``way``: one of WAYS."""
    left = nominal * (1 - share)
    if way == "quota":
        return Setting(VCPUS, left / VCPUS)
    if way == "off-lining":
        return Setting(round(VCPUS * (1 - share)), nominal / VCPUS)
    online = max(1, math.ceil(left - 1e-6))
    return Setting(online, left / online)


def in_turn(settings: Iterable[Setting], number: int) -> list[Setting]:
    """In the order of a run, which is turned round from one to the next; equal ones once."""
    return list(dict.fromkeys(settings))[:: 1 if number % 2 == 0 else -1]


def nominal_cores() -> float:
    """What four vCPUs can really get on this host."""
    return float(min(os.cpu_count() or 1, VCPUS))


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed, EbbError or LabError."""
    with bench(ResourceVector(cpu_cores=VCPUS, memory_mib=2 * MEMORY_MIB), how.report) as ground:
        return run_async(_measure(ground, how))


async def _measure(ground: BenchHost, how: Pass) -> Figures:
    cores = nominal_cores()
    shares = SHARES[1:2] if how.quick else SHARES
    ways = {(way, share): setting(way, cores, share) for way in WAYS for share in shares}
    slowdown: dict[tuple[str, float], list[float]] = {key: [] for key in ways}
    undeflated: list[float] = []
    async with running(ground) as agent:
        spec = VMSpec(name="cpu", nominal=Vector(cpu_cores=VCPUS, memory_mib=MEMORY_MIB))
        vm = await start_vm(agent, spec)
        guest = await lab_link(ground.state.uri, vm.domain)
        try:
            async with vm.lock:
                await in_guest(guest, MOUNT_SHM)
                await _compile(guest)
                for number in range(how.runs):
                    before_s = await _at(vm, guest, Setting(VCPUS, cores / VCPUS))
                    at_s = {one: await _at(vm, guest, one) for one in in_turn(ways.values(), number)}
                    taken_s = {key: at_s[one] for key, one in ways.items()}
                    after_s = await _at(vm, guest, Setting(VCPUS, cores / VCPUS))
                    whole_s = (before_s + after_s) / 2
                    undeflated.append(whole_s)
                    for key, seconds in taken_s.items():
                        slowdown[key].append(seconds / whole_s)
                    words = ", ".join(f"{way} {share:.0%} {seconds:.1f} s" for (way, share), seconds in taken_s.items())
                    how.report(f"run {number + 1} of {how.runs}: undeflated {whole_s:.1f} s; {words}")
                await vm.host.hypervisor.sizes.set_quota(vm.domain, None, None)
        finally:
            await guest.close()
            await agent.host.forget(vm)
    of = f"the same compile undeflated ({VCPUS} vCPUs, {cores:g} cores by quota), before and after in the same run"
    figures = {"undeflated_s": Figure.over(undeflated, "s", f"compileall -j 4 of {PACKAGES}")}
    for (way, share), runs in slowdown.items():
        had = ways[way, share]
        name = f"{way.replace('-', '_')}_{share:.0%}".replace("%", "")
        words = f"{of}; {had.online} vCPUs on line with {had.quota:g} cores each"
        figures[name] = Figure.over(runs, "ratio", words)
    return figures


async def _at(vm: ManagedVM, guest: LabLink, wanted: Setting) -> float:
    """Seconds of one compile at a setting."""
    answer = await vm.link.call("cpus.set", {"online": list(range(wanted.online))}, CpusSet, 60.0)
    if len(answer.online) != wanted.online:
        raise BenchmarkFailed(f"{len(answer.online)} CPUs are on line instead of {wanted.online}: {answer.failed}")
    await vm.host.hypervisor.sizes.set_quota(vm.domain, wanted.quota, None)
    return await _compile(guest)


async def _compile(guest: LabLink) -> float:
    began_s = time.perf_counter()
    script = f"cd /usr/lib/python3.11 && PYTHONPYCACHEPREFIX={PREFIX} python3 -m compileall -q -f -j 4 {PACKAGES}"
    await in_guest(guest, script)
    return time.perf_counter() - began_s
