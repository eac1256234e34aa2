"""`steady`: arrivals on a host of real guests, without steady mode, with it, and with a rule like Proxmox VE's.

A few guests at work fill their host nearly. A day of arrivals, compressed, asks for memory as a manager does: what is
not free is reclaimed by the host agent, and then held as by VMs that the agent does not look after; no guest is booted
for them. What departs is free, and shared among the guests again as a manager shares it. Each rule gets the same day
with a new agent over the same guests, which begin at nominal size and with the same work; the order turns from run to
run. The reserve of steady mode is what it would have learned from the day before.
"""

from __future__ import annotations

import asyncio
import base64
import heapq
import itertools
import json
import re
import statistics
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from benchmarks.deflating.steady_arrivals import Arrival, arrivals
from benchmarks.figures import BenchmarkFailed, Figure, Figures
from benchmarks.host.bench_host import (
    OPERATION_S,
    BenchHost,
    bench,
    finish,
    in_guest,
    lab_link,
    ready,
    room_mib,
    run_async,
    running,
    start_vm,
)
from benchmarks.passes import Pass
from ebbtide.deflation.resources import ResourceVector
from ebbtide.deflation.sharing.reserve import ReserveLearner, reserve_of
from ebbtide.lab.guest_link import LabLink
from ebbtide.messages.commands import ReclaimCommand, ReinflateCommand, SteadyCommand, TargetCommand
from ebbtide.messages.common import PartialVector, Vector
from ebbtide.messages.vms import VMSpec
from ebbtide.simulator.steady.proxmox import Ballooned, ballooned
from hostagent.control.steady import LOOK_S
from hostagent.errors import HostAgentError
from hostagent.operations.agent import Agent
from hostagent.running import OVERHEAD_MIB
from hostagent.vm.executor import guest_status

OFF, STEADY, PROXMOX = "off", "steady", "proxmox_like"
RULES: Final = (OFF, STEADY, PROXMOX)
VMS: Final = 3
SIZE: Final = Vector(cpu_cores=1, memory_mib=512)
#: What of the host is free while all guests have their nominal size, and what it hands out besides overheads, MiB.
FREE_MIB: Final = 192.0
HOST_MIB: Final = VMS * SIZE.memory_mib + FREE_MIB
#: A day, and before it time in which each rule makes the room that it wants.
DAY_S, BEFORE_S = 60.0, 30.0
QUICK_DAY_S, QUICK_BEFORE_S = 20.0, 10.0
#: A VM stays at least so long, and its room has to be there within so many seconds.
LEAST_STAY_S: Final = 5.0
DEADLINE_S: Final = 20.0
#: Memory that a guest's load has in use, without its files: from and to, MiB.
IN_USE_MIB: Final = (10, 154)
#: Of each of the two files of a load.
FILE_MIB: Final = 48
LOAD: Final = Path(__file__).with_name("steady_load.py")
RESULT: Final = "/run/steady-load.json"
DROP: Final = "echo 3 >/proc/sys/vm/drop_caches"
#: What is less than this is not shared among the guests, MiB.
LEAST_SHARED_MIB: Final = 16.0


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed, EbbError or LabError."""
    overhead_mib = max(OVERHEAD_MIB.values())
    wants_mib = VMS * (SIZE.memory_mib + overhead_mib)
    if room_mib(wants_mib) < wants_mib:
        raise BenchmarkFailed(f"{VMS} guests need {wants_mib:g} MiB of free memory")
    capacity = ResourceVector(VMS * SIZE.cpu_cores, wants_mib + FREE_MIB)
    with bench(capacity, how.report) as ground:
        return run_async(_measure(ground, how))


async def _measure(ground: BenchHost, how: Pass) -> Figures:
    guests: list[LabLink] = []
    found: dict[str, list[dict[str, float]]] = {rule: [] for rule in RULES}
    try:
        async with running(ground) as agent:
            for number in range(VMS):
                vm = await start_vm(agent, VMSpec(name=f"steady-{number}", nominal=SIZE))
                guests.append(await lab_link(ground.state.uri, vm.domain))
                await _prepare(guests[-1])
        for number in range(how.runs):
            turn = number % len(RULES)
            for rule in (*RULES[turn:], *RULES[:turn]):
                async with running(ground) as agent:
                    row = await _day(Host(agent, rule), guests, number, how.quick)
                found[rule].append(row)
                words = ", ".join(f"{name} {value:.3g}" for name, value in row.items())
                how.report(f"run {number + 1} of {how.runs}, {rule}: {words}")
    finally:
        for guest in guests:
            await guest.close()
    return _figures(found, how.quick)


async def _prepare(guest: LabLink) -> None:
    load = base64.b64encode(LOAD.read_bytes()).decode()
    await in_guest(guest, f"echo {load} | base64 -d >/tmp/load.py")
    for path in ("/mapped", "/read"):
        await in_guest(guest, f"dd if=/dev/zero of={path} bs=1M count={FILE_MIB}")
    await in_guest(guest, f"sync; {DROP}")


@dataclass
class Host:
    """The host under one rule, with what arrivals hold of it."""

    agent: Agent
    rule: str
    whole: ResourceVector = field(init=False)
    held_mib: float = 0.0

    def __post_init__(self) -> None:
        self.whole = self.agent.host.slice.capacity

    def hold(self, memory_mib: float) -> None:
        """Take so much for an arrival, or give it back where it is negative."""
        self.held_mib += memory_mib
        left = self.whole.less(ResourceVector(memory_mib=self.held_mib))
        self.agent.host.slice = replace(self.agent.host.slice, capacity=left)

    async def free_mib(self) -> float:
        await self.agent.host.sample()
        return self.agent.host.free().memory_mib

    async def begin(self, reserve_mib: float) -> None:
        """All guests at nominal size and heard of, then the rule in force."""
        agent = self.agent
        await agent.steady.set(SteadyCommand(enabled=False))
        for vm in agent.host.vms.values():
            await ready(vm)
        for _ in range(10):
            if not any(vm.deflated for vm in agent.host.vms.values()):
                break
            # By name: what a target of the other rule holds grows by no other reinflation.
            command = ReinflateCommand(request_id=_new_id(), vms=tuple(agent.host.vms))
            await finish(agent, await agent.sizes.reinflate(command))
        else:
            raise BenchmarkFailed("the guests did not get back to their nominal size")
        if self.rule == STEADY:
            await agent.steady.set(SteadyCommand(enabled=True, reserve_mib=reserve_mib))

    async def look(self) -> None:
        """What a manager, or the other rule, does every ten seconds; it is not waited for."""
        free_mib = await self.free_mib()
        if self.rule == PROXMOX:
            await self._balloon(free_mib)
        elif any(vm.deflated for vm in self.agent.host.vms.values()):
            room = free_mib - self.agent.host.reserve_mib
            if room >= LEAST_SHARED_MIB:
                command = ReinflateCommand(request_id=_new_id(), room=Vector(memory_mib=room), deadline_s=DEADLINE_S)
                await self.agent.sizes.reinflate(command)

    async def _balloon(self, free_mib: float) -> None:
        rows = []
        for vm in self.agent.host.vms.values():
            status = await guest_status(vm.link, brief=True)
            if status is not None and status.memory.free_mib is not None:
                one = vm.allocation()
                least, most = one.minimum.memory_mib, one.nominal.memory_mib
                rows.append(Ballooned(vm.name, one.current.memory_mib, least, most, status.memory.free_mib))
        for name, size in ballooned(rows, HOST_MIB - free_mib, HOST_MIB).items():
            vm = self.agent.host.vms[name]
            command = TargetCommand(
                request_id=_new_id(),
                generation=vm.intent.generation + 1,
                target=PartialVector(memory_mib=round(size)),
                deadline_s=LOOK_S,
            )
            try:
                await self.agent.sizes.target(name, command)
            except HostAgentError:
                continue  # there is no room to grow any more

    async def take(self, memory_mib: float) -> tuple[bool, bool]:
        """Room for an arrival: whether it was free, and whether it is there now, and so held."""
        free_mib = await self.free_mib()
        at_once = free_mib >= memory_mib
        if not at_once:
            command = ReclaimCommand(
                request_id=_new_id(), need=Vector(memory_mib=memory_mib - free_mib), deadline_s=DEADLINE_S
            )
            operation = await self.agent.sizes.reclaim(command)
            # One that falls short is no failure of the benchmark: the VM is refused.
            await self.agent.requests.operations.get(operation.request_id, OPERATION_S)
            free_mib = await self.free_mib()
        placed = free_mib >= memory_mib - 1.0
        if placed:
            self.hold(memory_mib)
        return at_once, placed


async def _day(host: Host, guests: Sequence[LabLink], number: int, quick: bool) -> dict[str, float]:
    day_s, before_s = (QUICK_DAY_S, QUICK_BEFORE_S) if quick else (DAY_S, BEFORE_S)
    learner = ReserveLearner()
    for one in arrivals(2 * number, day_s, HOST_MIB, LEAST_STAY_S):
        learner.arrived(one.at_s, one.memory_mib)
    await host.begin(reserve_of(None, learner.learned_mib(day_s), HOST_MIB))
    seconds = before_s + day_s + LOOK_S
    for at, guest in enumerate(guests):
        # The same work for every rule.
        words = f"{number * VMS + at} {seconds:g} {IN_USE_MIB[0]} {IN_USE_MIB[1]} {RESULT}"
        await in_guest(
            guest, f"rm -f {RESULT}; {DROP}; python3 -S /tmp/load.py {words} </dev/null >/dev/console 2>&1 &"
        )
    loop = asyncio.get_running_loop()
    loaded_s = loop.time() + seconds
    # What a rule takes before the first arrival, and what that costs, is its own, too.
    before = [await _counted(guest) for guest in guests]
    trimmed_mib = host.agent.host.steady_taken_mib
    await _live(host, [], before_s)
    seen = await _live(host, arrivals(2 * number + 1, day_s, HOST_MIB, LEAST_STAY_S), day_s)
    after = [await _counted(guest) for guest in guests]
    counted = [{name: now[name] - then[name] for name in now} for now, then in zip(after, before, strict=True)]
    await asyncio.sleep(max(loaded_s - loop.time(), 0.0))
    told = [await in_guest(guest, f"until [ -s {RESULT} ]; do sleep 1; done; cat {RESULT}") for guest in guests]
    rows = [one | json.loads(text) for one, text in zip(counted, told, strict=True)]
    return {
        **seen,
        "trimmed_mib": host.agent.host.steady_taken_mib - trimmed_mib,
        "most_refaulted_mib": max(row["refaulted_mib"] for row in rows),
        **{name: statistics.mean(row[name] for row in rows) for name in rows[0]},
    }


async def _live(host: Host, day: Sequence[Arrival], seconds: float) -> dict[str, float]:
    """Go through a day: arrivals one after another, departures, and a look every ten seconds."""
    loop, order = asyncio.get_running_loop(), itertools.count()
    began, waits_s, at_once, refused = loop.time(), [], 0, 0
    sizes, free = [], []
    events: list[tuple[float, int, Arrival | float | None]] = [(one.at_s, next(order), one) for one in day]
    events += [(at * LOOK_S, next(order), None) for at in range(1, int(seconds / LOOK_S) + 1)]
    heapq.heapify(events)
    while events and events[0][0] <= seconds:
        at_s, _, event = heapq.heappop(events)
        await asyncio.sleep(max(began + at_s - loop.time(), 0.0))
        if event is None:
            rows = [vm.allocation() for vm in host.agent.host.vms.values()]
            sizes.append(statistics.mean(row.current.memory_mib / row.nominal.memory_mib for row in rows))
            free.append(await host.free_mib() / HOST_MIB)
            await host.look()
        elif isinstance(event, float):
            host.hold(-event)
        else:
            turn_s = loop.time() - began
            fits, placed = await host.take(event.memory_mib)
            now_s = loop.time() - began
            at_once, refused = at_once + fits, refused + (not placed)
            if placed:
                # From its turn on: what comes before is the benchmark's own being late.
                waits_s.append(0.0 if fits else now_s - turn_s)
                heapq.heappush(events, (now_s + event.stays_s, next(order), event.memory_mib))
    await asyncio.sleep(max(began + seconds - loop.time(), 0.0))
    if not day:
        return {}
    return {
        "arrivals": float(len(day)),
        "at_once": 100 * at_once / len(day),
        "refused": 100 * refused / len(day),
        "wait_mean_s": statistics.mean(waits_s) if waits_s else 0.0,
        "wait_longest_s": max(waits_s, default=0.0),
        "size": 100 * statistics.mean(sizes),
        "free": 100 * statistics.mean(free),
    }


async def _counted(guest: LabLink) -> dict[str, float]:
    """What a guest's kernel has counted: MiB that were read again after they had been evicted, and major faults."""
    text = await in_guest(guest, "cat /proc/vmstat")
    pages = sum(int(number) for number in re.findall(r"^workingset_refault_\w+ (\d+)", text, re.MULTILINE))
    faults = re.search(r"^pgmajfault (\d+)", text, re.MULTILINE)
    if faults is None:
        raise BenchmarkFailed("the guest's kernel counts no major faults")
    return {"refaulted_mib": pages * 4096 / 2**20, "major_faults": float(faults[1])}


def _figures(found: dict[str, list[dict[str, float]]], quick: bool) -> Figures:
    day_s = QUICK_DAY_S if quick else DAY_S
    of = (
        f"a day of arrivals in {day_s:g} s on {HOST_MIB:g} MiB of which {FREE_MIB:g} are free while {VMS} guests of "
        f"{SIZE.memory_mib:g} MiB have all of theirs"
    )
    units = {
        "arrivals": "VMs", "at_once": "% of arrivals", "refused": "% of arrivals", "size": "% of nominal",
        "free": "% of the host", "major_faults": "faults a VM", "waited": "% of rounds",
    }  # fmt: skip
    figures: Figures = {}
    for rule, rows in found.items():
        for name in rows[0]:
            unit = units.get(name, name.rsplit("_", 1)[-1].replace("mib", "MiB"))
            figures[f"{rule}_{name}"] = Figure.over([row[name] for row in rows], unit, of)
    for rule in (STEADY, PROXMOX):
        for name, unit in (("at_once", "percentage points"), ("wait_mean_s", "s"), ("refaulted_mib", "MiB")):
            gains = [mine[name] - off[name] for mine, off in zip(found[rule], found[OFF], strict=True)]
            figures[f"{rule}_less_off_{name}"] = Figure.over(gains, unit, "the same day without steady mode, same run")
    return figures


def _new_id() -> str:
    return f"bench-{uuid.uuid4().hex[:20]}"
