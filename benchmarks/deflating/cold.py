"""`cold`: what a deflation costs the guest's services when cold pages become free first, and when they do not.

One guest holds a memcached, a JVM and a compile at work, and pages that nobody uses: a file that was read once, and
anonymous memory with swap behind it. It is deflated by 25 and 50 % by unplugging, with and without cold first, with the
multi-generational LRU and without. Before each deflation that memory is touched and that file is read, once, and then
all three work for a while. Measured from the begin of the deflation on: MiB that are read back until it and WINDOW_S
have ended (workingset_refault_* of the guest's /proc/vmstat), and over WINDOW_S 99th percentiles of memcached and the
JVM, and the median of the compile's files. Each run has all cases, their order turned round from one to the next.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.deflating.latency import filler
from benchmarks.engines.jvm import SOURCE
from benchmarks.figures import BenchmarkFailed, Figure, Figures, ratios
from benchmarks.host.bench_host import BenchHost, bench, in_guest, lab_link, run_async, running, start_vm
from benchmarks.host.vm_driver import VMDriver, driven
from benchmarks.passes import Pass
from ebbtide.deflation.cascade.instructions import Outcome
from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.resources import ResourceVector
from ebbtide.lab.guest_link import LabLink
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec
from hostagent.running import OVERHEAD_MIB

NOMINAL = ResourceVector(cpu_cores=2, memory_mib=1024)
BOOT_MIB = 448.0
SHARES = (0.25, 0.5)
#: Values of memcached, 64 KiB each; idle anonymous memory, swap, and free memory beside a file that was read once, MiB.
VALUES = 1280
ANON_MIB = 96
SWAP_MIB = 192
FREE_MIB = 64
#: Seconds of a measurement; the deflation begins with it.
WINDOW_S, QUICK_S = 5.0, 3.0
LOAD = Path(__file__).with_name("cold_load.py")
SOCKET, FILE = "/run/cold-load", "/cold"
LRU = "/sys/kernel/mm/lru_gen/enabled"
#: The compile does some files in the window, too few for a percentile of them.
COMPARED = ("memcached_p99_ms", "jvm_p99_ms", "compile_median_ms")
_ASK = """
import socket
s = socket.socket(socket.AF_UNIX); s.connect("{path}"); s.sendall(b"{words}")
print(b"".join(iter(lambda: s.recv(4096), b"")).decode())
"""


@dataclass(frozen=True)
class Case:
    """One deflation: the share that is taken, whether cold pages go first, and the guest's LRU."""

    share: float
    cold: bool
    generations: bool

    def __str__(self) -> str:
        return f"{'cold' if self.cold else 'plain'}_{self.share * 100:.0f}_{'mglru' if self.generations else 'lru'}"


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed, EbbError or LabError."""
    capacity = NOMINAL + ResourceVector(memory_mib=max(OVERHEAD_MIB.values()))
    with bench(capacity, how.report) as ground:
        return run_async(_measure(ground, how))


async def _measure(ground: BenchHost, how: Pass) -> Figures:
    found: dict[Case, list[dict[str, float]]] = {}
    spec = VMSpec(name="cold", nominal=Vector.of(NOMINAL), boot_memory_mib=BOOT_MIB)
    async with running(ground, cold_first=True) as agent:
        vm = await start_vm(agent, spec)
        guest = await lab_link(ground.state.uri, vm.domain)
        try:
            async with driven(vm) as driver:
                has_generations = await _prepare(guest, how)
                # The guest agent switches the LRU over at the first cold pages, and leaves it alone from then on.
                await driver.take(NOMINAL.less(ResourceVector(memory_mib=0.4 * NOMINAL.memory_mib)), _means(True))
                await driver.give_back()
                cases = [Case(*one) for one in product(SHARES, (True, False), (True, False)[not has_generations :])]
                for number in range(how.runs):
                    for case in cases if number % 2 == 0 else reversed(cases):
                        row = await _once(driver, guest, case, QUICK_S if how.quick else WINDOW_S)
                        found.setdefault(case, []).append(row)
                        words = ", ".join(f"{name} {value:.3g}" for name, value in row.items())
                        how.report(f"run {number + 1} of {how.runs}, {case}: {words}")
        finally:
            await guest.close()
            await agent.host.forget(vm)
    return _figures(found)


async def _prepare(guest: LabLink, how: Pass) -> bool:
    """Bring the loads up; returns whether the guest's kernel has the multi-generational LRU."""
    with tempfile.TemporaryDirectory(prefix="ebbtide-cold-") as directory:
        await asyncio.to_thread(subprocess.run, ["javac", "-d", directory, str(SOURCE)], check=True)
        files = {"/tmp/Mix.class": (Path(directory) / "Mix.class").read_bytes(), "/tmp/load.py": LOAD.read_bytes()}
    for path, content in files.items():
        await in_guest(guest, f"echo {base64.b64encode(content).decode()} | base64 -d >{path}")
    await in_guest(guest, f"dd if=/dev/zero of=/swap bs=1M count={SWAP_MIB} && chmod 600 /swap")
    await in_guest(guest, "busybox mkswap /swap && busybox swapon /swap")
    await in_guest(guest, f"python3 -S -c '{filler(VALUES)}'")
    begin = f"python3 -S /tmp/load.py {ANON_MIB} {VALUES} {SOCKET} {FILE} >/dev/console 2>&1 </dev/null &"
    await in_guest(guest, f"{begin} until [ -S {SOCKET} ]; do sleep 0.5; done")
    free = "$(busybox awk '/^MemFree/ {print int($2 / 1024)}' /proc/meminfo)"
    how.report(await in_guest(guest, f"dd if=/dev/zero of={FILE} bs=1M count=$(({free} - {FREE_MIB})); sync"))
    return "yes" in await in_guest(guest, f"[ -e {LRU} ] && echo yes || echo no")


def _means(cold: bool) -> list[Mechanism]:
    means = [Mechanism.VIRTIO_MEM, Mechanism.BALLOON]
    return [*means, Mechanism.COLD] if cold else means


async def _once(driver: VMDriver, guest: LabLink, case: Case, seconds: float) -> dict[str, float]:
    """Fill memory with what is left alone then, deflate while all work, and give back."""
    await in_guest(guest, f"[ ! -e {LRU} ] || echo {'y' if case.generations else 'n'} >{LRU}")
    for words in ("anew", f"{seconds:g}"):
        await _ask(guest, words)
    before = await _refaulted_mib(guest)
    # The load is at work before anything is taken.
    load = asyncio.create_task(_ask(guest, f"{seconds:g}"), name="load")
    outcome = await driver.take(
        NOMINAL.less(ResourceVector(memory_mib=case.share * NOMINAL.memory_mib)), _means(case.cold)
    )
    measured = await load
    refaulted = await _refaulted_mib(guest) - before
    await driver.give_back()
    return {**_of_the_deflation(outcome), "refaulted_mib": refaulted, **measured}


async def _ask(guest: LabLink, words: str) -> dict[str, float]:
    """Of the load."""
    found: dict[str, float] = json.loads(
        await in_guest(guest, f"python3 -S -c '{_ASK.format(path=SOCKET, words=words)}'")
    )
    return found


def _of_the_deflation(outcome: Outcome) -> dict[str, float]:
    asked = outcome.before.memory_mib - outcome.target.memory_mib
    cold = [row.verified for row in outcome.ledger if row.layer is Layer.COLD]
    reached = (outcome.before.memory_mib - outcome.after.memory_mib) / asked
    return {"s": outcome.seconds, "reached": reached, "cold_mib": sum(cold)}


async def _refaulted_mib(guest: LabLink) -> float:
    pages = re.findall(r"^workingset_refault_\w+ (\d+)", await in_guest(guest, "cat /proc/vmstat"), re.MULTILINE)
    if not pages:
        raise BenchmarkFailed("the guest's kernel counts no refaults")
    return sum(map(int, pages)) * 4096 / 2**20


def _figures(found: Mapping[Case, list[dict[str, float]]]) -> Figures:
    figures: Figures = {}
    units = {"s": "s", "reached": "ratio", "jvm_requests": "requests"}
    for case, rows in found.items():
        of = f"{case.share:.0%} of a guest of {NOMINAL.memory_mib:g} MiB taken by unplugging while three loads work"
        for name in rows[0]:
            unit = units.get(name, name.rsplit("_", 1)[-1].replace("mib", "MiB"))
            figures[f"{case}_{name}"] = Figure.over([row[name] for row in rows], unit, of)
        plain = found.get(Case(case.share, False, case.generations))
        if case.cold and plain is not None:
            for name in COMPARED:
                mine, theirs = ([max(row[name], 1e-6) for row in side] for side in (rows, plain))
                of = f"the same without cold pages first, {name}, in the same run"
                figures[f"{case}_to_plain_{name.removesuffix('_ms')}"] = Figure.over(ratios(mine, theirs), "ratio", of)
    return figures
