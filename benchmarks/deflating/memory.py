"""`memory`: memcached in a guest whose memory is taken by the guest, by the hypervisor and by both (004 Fig. 5a).

The application is not asked. `os`: what can be unplugged, never below what the guest uses; where that falls short it is
given how far it got (004's unplugging goes on until memcached is killed). `hypervisor`: the limit that swap backs, on
the whole VM. `both`: the cascade without its application. Rates are hits a second of a client in the guest that reads a
cache as large as FILLED of the VM, popular keys more often; each is relative to that at full size in the same run.
"""

from __future__ import annotations

from typing import Final

from benchmarks.deflating.latency import VALUE_BYTES, fill_cache, grow_cache
from benchmarks.figures import Figure, Figures
from benchmarks.host.bench_host import BenchHost, bench, in_guest, lab_link, run_async, running, start_vm
from benchmarks.host.swapfile import swap
from benchmarks.host.vm_driver import VMDriver, driven
from benchmarks.passes import Pass
from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.deflation.resources import ResourceVector
from ebbtide.lab.guest_link import LabLink
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec
from hostagent.running import OVERHEAD_MIB

NOMINAL: Final = ResourceVector(cpu_cores=2, memory_mib=1024)
BOOT_MIB: Final = 448.0
SHARES: Final = (0.2, 0.4, 0.5)
WAYS: Final = {
    "os": (Mechanism.VIRTIO_MEM,),
    "hypervisor": (Mechanism.MEMORY_LIMIT,),
    "both": tuple(one for one in Mechanism if one is not Mechanism.APPLICATION),
}
#: Part of the VM's memory that the cache holds.
FILLED: Final = 0.6
#: Seconds that are read before anything counts, and that count.
WARM_S, WINDOW_S, QUICK_S = 3.0, 5.0, 1.0

#: Reads one key after another, of which a few are read most, and prints hits a second of the last part.
_READER: Final = """
import random, socket, time
s = socket.create_connection(("127.0.0.1", 11211)); f = s.makefile("rb")
hits = 0; began = time.monotonic(); until = began + {warm} + {seconds}; counts = began + {warm}
while (now := time.monotonic()) < until:
    key = int({count} * random.random() ** 3) * 7919 % {count}
    s.sendall(b"get bench-%d\\r\\n" % key)
    while (line := f.readline()) != b"END\\r\\n":
        f.read(int(line.split()[3]) + 2); hits += now >= counts
print(hits / (time.monotonic() - counts))
"""


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed, EbbError or LabError."""
    capacity = NOMINAL + ResourceVector(memory_mib=max(OVERHEAD_MIB.values()))
    with (
        bench(capacity, how.report) as ground,
        swap(ground.lab.directory.with_suffix(".swap"), int(NOMINAL.memory_mib), how.report) as swap_mib,
    ):
        return run_async(_measure(ground, how, swap_mib))


async def _measure(ground: BenchHost, how: Pass, swap_mib: int) -> Figures:
    cases = [(way, share) for share in (SHARES[-1:] if how.quick else SHARES) for way in WAYS]
    rates: dict[tuple[str, float], list[float]] = {case: [] for case in cases}
    reached: dict[tuple[str, float], list[float]] = {case: [] for case in cases}
    undeflated = []
    async with running(ground) as agent:
        vm = await start_vm(agent, VMSpec(name="memory", nominal=Vector.of(NOMINAL), boot_memory_mib=BOOT_MIB))
        guest = await lab_link(ground.state.uri, vm.domain)
        try:
            await grow_cache(guest, NOMINAL.memory_mib, FILLED)
            async with driven(vm) as driver:
                for number in range(how.runs):
                    await fill_cache(guest, NOMINAL.memory_mib, FILLED)
                    undeflated.append(await _rate(guest, how))
                    # Turned round from one run to the next, so that none always comes first.
                    for case in cases if number % 2 == 0 else reversed(cases):
                        rate, got = await _once(driver, guest, how, *case)
                        rates[case].append(rate / undeflated[-1])
                        reached[case].append(got)
                        words = f"{case[0]} {case[1]:.0%}: {rate:.0f} of {undeflated[-1]:.0f} hits/s, reached {got:.2f}"
                        how.report(f"run {number + 1} of {how.runs}, {words}")
        finally:
            await guest.close()
            await agent.host.forget(vm)
    of = f"a VM of {NOMINAL.memory_mib:g} MiB, {FILLED:.0%} of it in memcached, {swap_mib} MiB of swap on the host"
    figures = {"undeflated_hits_s": Figure.over(undeflated, "hits/s", of)}
    for (way, share), runs in rates.items():
        name = f"{way}_{share * 100:.0f}"
        figures[name] = Figure.over(runs, "ratio", f"hits a second at full size in the same run; {of}")
        figures[f"{name}_reached"] = Figure.over(reached[way, share], "ratio", f"{share:.0%} of memory, as asked")
    return figures


async def _once(driver: VMDriver, guest: LabLink, how: Pass, way: str, share: float) -> tuple[float, float]:
    """Hits a second after a deflation, and the share of it that was reached."""
    await fill_cache(guest, NOMINAL.memory_mib, FILLED)
    # What is popular is known before anything is taken.
    await _rate(guest, how)
    target = NOMINAL.less(ResourceVector(memory_mib=share * NOMINAL.memory_mib))
    outcome = await driver.take(target, WAYS[way])
    rate = await _rate(guest, how)
    await driver.give_back()
    asked = outcome.before.memory_mib - outcome.target.memory_mib
    return rate, (outcome.before.memory_mib - outcome.after.memory_mib) / asked


async def _rate(guest: LabLink, how: Pass) -> float:
    warm_s, seconds = (QUICK_S, QUICK_S) if how.quick else (WARM_S, WINDOW_S)
    count = int(NOMINAL.memory_mib * FILLED * 2**20 / VALUE_BYTES)
    program = _READER.format(warm=warm_s, seconds=seconds, count=count)
    quoted = program.replace("'", "'\"'\"'")
    return float(await in_guest(guest, f"python3 -S -c '{quoted}'"))
