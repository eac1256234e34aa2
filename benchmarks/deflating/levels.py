"""`levels`: hits of a memcached in a guest that is not asked, by who takes the memory (004 Fig. 5a).

Guest level: virtio-mem unplugs what the guest can do without; its kernel moves what is in use, and refuses what it has
no room for. Hypervisor level: the limit on the VM that the host's swap backs. Both: the limit for what cannot be
unplugged. The guest has no swap, and gets go on all the time, also while it is deflated. Hits are counted at full size
just before each deflation, and after it with the VM's reads from swap as the disk is, and capped.
"""

from __future__ import annotations

import asyncio
import base64
import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

from benchmarks.deflating.latency import filler
from benchmarks.figures import BenchmarkFailed, Figure, Figures, ratios
from benchmarks.host.bench_host import BenchHost, bench, in_guest, lab_link, run_async, running, start_vm
from benchmarks.host.confined import reads_capped
from benchmarks.host.swapfile import bring_back, place, swap
from benchmarks.host.vm_driver import VMDriver, driven
from benchmarks.passes import Pass
from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.deflation.resources import ResourceVector
from ebbtide.lab.guest_link import LabLink
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec
from hostagent.limits.footprints import qemu_pid
from hostagent.running import OVERHEAD_MIB

NOMINAL: Final = ResourceVector(cpu_cores=2, memory_mib=1024)
BOOT_MIB: Final = 448.0
SHARES: Final = (0.3, 0.4, 0.5)
WAYS: Final = {
    "guest": (Mechanism.VIRTIO_MEM,),
    "hypervisor": (Mechanism.MEMORY_LIMIT,),
    "both": (Mechanism.VIRTIO_MEM, Mechanism.MEMORY_LIMIT),
}
#: Of the VM's memory in values; so that the rest of the guest fits beside it until about a third is gone.
FILLED: Final = 0.5
VALUE_BYTES: Final = 4096
SKEW: Final = 0.99
#: memcached's limit above what is stored: keys, headers, chunks of fixed sizes.
ROOM: Final = 1.3
#: Reads a second that the VM may do from the disk of the swap: as many as the disk gives, and capped.
NATIVE: Final = 0
CAPS: Final = (NATIVE, 500, 50)
#: Seconds of hits that are counted, and before that after a change.
WINDOW_S, QUICK_S, SETTLE_S = 5.0, 2.0, 1.0
LOAD: Final = Path(__file__).with_name("levels_load.py")
COUNTS: Final = "/run/levels-load"


@dataclass(frozen=True)
class Found:
    """One deflation: hits a second at full size before, by reads a second after it, and the share that was reached."""

    full: float
    hits: dict[int, float]
    reached: float
    killed: int


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed, EbbError or LabError."""
    capacity = NOMINAL + ResourceVector(memory_mib=max(OVERHEAD_MIB.values()))
    with bench(capacity, how.report) as ground:
        file = place()
        with swap(file, int(NOMINAL.memory_mib), how.report, ours=True) as swap_mib:
            if swap_mib < NOMINAL.memory_mib:
                raise BenchmarkFailed("levels: the hypervisor's level needs swap")
            return figures(run_async(_measure(ground, how, file)))


async def _measure(ground: BenchHost, how: Pass, swap_file: Path) -> dict[tuple[str, float], list[Found]]:
    found: dict[tuple[str, float], list[Found]] = {}
    cases = [*product(WAYS, SHARES[2:] if how.quick else SHARES)]
    seconds = QUICK_S if how.quick else WINDOW_S
    async with running(ground) as agent:
        vm = await start_vm(agent, VMSpec(name="levels", nominal=Vector.of(NOMINAL), boot_memory_mib=BOOT_MIB))
        guest = await lab_link(ground.state.uri, vm.domain)
        try:
            await _prepare(guest)
            async with driven(vm) as driver:
                for number in range(how.runs):
                    for way, share in cases if number % 2 == 0 else reversed(cases):
                        row = await _once(driver, guest, swap_file, way, share, seconds)
                        found.setdefault((way, share), []).append(row)
                        hits = ", ".join(f"{row.hits[cap]:.0f}" for cap in row.hits)
                        how.report(
                            f"run {number + 1} of {how.runs}, {way} {share:.0%}: {row.reached:.2f} reached, {hits} "
                            f"hits/s, at full size {row.full:.0f}"
                        )
        finally:
            await guest.close()
            await agent.host.forget(vm)
    return found


async def _prepare(guest: LabLink) -> None:
    """Fill memcached, and begin the load."""
    count = int(NOMINAL.memory_mib * FILLED * 2**20 / VALUE_BYTES)
    limit_mib = int(NOMINAL.memory_mib * FILLED * ROOM)
    await in_guest(guest, f"printf 'cache_memlimit {limit_mib}\\r\\nquit\\r\\n' | busybox nc 127.0.0.1 11211")
    there = int(await in_guest(guest, f"python3 -S -c '{filler(count, size=VALUE_BYTES)}'"))
    if there < count:
        raise BenchmarkFailed(f"memcached holds {there} of {count} values")
    await in_guest(guest, f"echo {base64.b64encode(LOAD.read_bytes()).decode()} | base64 -d >/tmp/load.py")
    begin = f"python3 -S /tmp/load.py {count} {VALUE_BYTES} {SKEW} {COUNTS} >/dev/console 2>&1 </dev/null &"
    await in_guest(guest, f"{begin} until [ -e {COUNTS} ]; do sleep 0.5; done")


async def _once(driver: VMDriver, guest: LabLink, swap_file: Path, way: str, share: float, seconds: float) -> Found:
    """Count hits, deflate, count again with the reads as they are and capped, and give back."""
    full = await _hits_s(guest, seconds)
    if not full:
        raise BenchmarkFailed("the load in the guest stands still at full size: has it ended?")
    killed = await _killed(guest)
    size = NOMINAL.with_component("memory_mib", NOMINAL.memory_mib * (1 - share))
    outcome = await driver.take(size, WAYS[way])
    reached = (outcome.before.memory_mib - outcome.after.memory_mib) / (NOMINAL.memory_mib * share)
    hits = {}
    # The guest's own level has nothing in swap.
    for reads_s in CAPS[:1] if way == "guest" else CAPS:
        with reads_capped(qemu_pid(driver.vm.domain), swap_file.parent, reads_s or None):
            hits[reads_s] = await _hits_s(guest, seconds)
    await driver.give_back()
    await asyncio.to_thread(bring_back, swap_file)
    return Found(full, hits, reached, await _killed(guest) - killed)


async def _hits_s(guest: LabLink, seconds: float) -> float:
    """By what the load itself has counted, over as long as it says."""
    said = await in_guest(guest, f"sleep {SETTLE_S:g}; cat {COUNTS}; sleep {seconds:g}; cat {COUNTS}")
    (began_s, gets, hits), (ended_s, last_gets, last_hits) = (map(float, line.split()) for line in said.splitlines())
    if last_hits - hits < 0.99 * (last_gets - gets):
        raise BenchmarkFailed("memcached has lost values")
    return (last_hits - hits) / (ended_s - began_s) if ended_s > began_s else 0.0


async def _killed(guest: LabLink) -> int:
    """Processes that the guest's kernel has killed for want of memory."""
    said = re.search(r"^oom_kill (\d+)", await in_guest(guest, "cat /proc/vmstat"), re.MULTILINE)
    return int(said[1]) if said else 0


def figures(found: dict[tuple[str, float], list[Found]]) -> Figures:
    """Hits relative to those at full size just before, and both levels to the hypervisor's alone in the same run."""
    full = [row.full for rows in found.values() for row in rows]
    made: Figures = {"full_hits_s": Figure.over(full, "1/s", f"a guest of {NOMINAL.memory_mib:g} MiB at full size")}
    for (way, share), rows in found.items():
        name = f"{way}_{share * 100:.0f}"
        taken = f"{share:.0%} of memory taken, {FILLED:.0%} of it values"
        for reads_s in rows[0].hits:
            capped = f"; at most {reads_s} reads a second from the disk of the swap" * bool(reads_s)
            made[f"{name}{_end(reads_s)}_of_full"] = Figure.over(
                ratios([row.hits[reads_s] for row in rows], [row.full for row in rows]),
                "ratio",
                f"hits a second at full size just before; {taken}{capped}",
            )
        made[f"{name}_reached"] = Figure.over([row.reached for row in rows], "ratio", "what was asked")
        made[f"{name}_killed"] = Figure.over([float(row.killed) for row in rows], "processes", "out of memory")
        if way == "both" and (alone := found.get(("hypervisor", share))) is not None:
            for reads_s in (one for one in rows[0].hits if all(row.hits[one] for row in alone)):
                made[f"both_to_hypervisor_{share * 100:.0f}{_end(reads_s)}"] = Figure.over(
                    ratios(
                        [row.hits[reads_s] / row.full for row in rows], [row.hits[reads_s] / row.full for row in alone]
                    ),
                    "ratio",
                    "the hypervisor's level alone in the same run",
                )
    return made


def _end(reads_s: int) -> str:
    return f"_{reads_s}_reads" * bool(reads_s)
