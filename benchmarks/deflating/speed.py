"""`cascade`, part three: how fast each means of a layer takes memory from a real guest.

The guest has touched all of its memory and freed it again before each run, so that the host has real pages to get back.
Proxmox's own rule for a host that is short of memory is the yardstick: 100 MiB per 10 s (pvestatd moves balloons by at
most that much at each of its rounds).
"""

from __future__ import annotations

from benchmarks.figures import BenchmarkFailed, Figure, Figures
from benchmarks.host.bench_host import MOUNT_SHM, BenchHost, in_guest, lab_link, running, start_vm
from benchmarks.host.vm_driver import VMDriver, driven
from benchmarks.passes import Pass
from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.deflation.resources import ResourceVector
from ebbtide.lab.guest_link import LabLink
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec

PROXMOX_MIB_S = 10.0
NOMINAL = ResourceVector(cpu_cores=2, memory_mib=1536)
BOOT_MIB = 768.0
TAKEN_MIB = 512.0
#: A file in memory, and gone again: what it took is free, but was touched.
TOUCH = f"head -c {int(TAKEN_MIB * 1.25)}M /dev/zero >/dev/shm/touch; rm /dev/shm/touch"
MEANS = (Mechanism.VIRTIO_MEM, Mechanism.BALLOON, Mechanism.MEMORY_LIMIT)


async def measure(ground: BenchHost, how: Pass) -> Figures:
    """Raises BenchmarkFailed, EbbError or LabError."""
    figures: Figures = {}
    async with running(ground) as agent:
        vm = await start_vm(agent, VMSpec(name="speed", nominal=Vector.of(NOMINAL), boot_memory_mib=BOOT_MIB))
        findings = {finding.mechanism: finding for finding in await vm.resizer.findings()}
        guest = await lab_link(ground.state.uri, vm.domain)
        await in_guest(guest, MOUNT_SHM)
        try:
            for means in MEANS:
                if not findings[means].available:
                    how.report(f"{means.value} is left out: {findings[means].reason}")
                    continue
                runs = []
                for _ in range(how.runs):
                    async with driven(vm) as driver:
                        runs.append(await _once(driver, guest, means))
                    how.report(f"{means.value}: {runs[-1]:.0f} MiB/s")
                name = means.value.replace("-", "_")
                of = f"{TAKEN_MIB:g} MiB taken by {means.value} alone, verified, from start to end of the deflation"
                figures[f"{name}_mib_s"] = Figure.over(runs, "MiB/s", of)
                figures[f"{name}_to_proxmox"] = Figure.over(
                    [run / PROXMOX_MIB_S for run in runs], "ratio", "Proxmox's rule of 100 MiB per 10 s"
                )
        finally:
            await guest.close()
            await agent.host.forget(vm)
    return figures


async def _once(driver: VMDriver, guest: LabLink, means: Mechanism) -> float:
    await in_guest(guest, TOUCH)
    outcome = await driver.take(NOMINAL.less(ResourceVector(memory_mib=TAKEN_MIB)), [means])
    if not outcome.reached:
        raise BenchmarkFailed(f"{means.value} fell short: {outcome.sentence}")
    return (outcome.before.memory_mib - outcome.after.memory_mib) / outcome.seconds
