"""Steady mode with a real guest: what lies idle in it makes the host's reserve, and comes back when it is missed."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.host.bench_host import in_guest, lab_link
from ebbtide.deflation.allocations import Priority
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec
from tests.guests.conftest import RunningLab
from tests.guests.placed import placed
from tests.waiting import until

pytestmark = [pytest.mark.guest, pytest.mark.timeout(900)]

NAME = "idle"
NOMINAL = Vector(cpu_cores=1.0, memory_mib=1024.0)
RESERVE_MIB = 96.0
#: What the guest is left with: under one and a half of its reserve of 48, and far from pressure, which begins at 12.
LEFT_MIB = 56


async def test_idle_memory_makes_the_reserve_and_comes_back_when_the_guest_needs_it(lab: RunningLab) -> None:
    async with lab.client() as client:
        spec = VMSpec(name=NAME, priority=Priority.DEFLATABLE, nominal=NOMINAL, minimum=Vector(memory_mib=400.0))
        async with placed(client, spec) as host:

            async def bound_mib() -> float:
                found = (await client.explain(NAME)).explanation
                return found.bound.memory_mib if found is not None and found.bound is not None else 0.0

            async def whole() -> bool:
                return await bound_mib() >= NOMINAL.memory_mib

            try:
                await until(whole, limit_s=300)
                free = (await client.steady(host)).free_mib
                status = await client.set_steady(host, enabled=True, reserve_mib=free + RESERVE_MIB)
                assert status.kept_mib == pytest.approx(free + RESERVE_MIB, abs=1.0)

                async def full() -> bool:
                    now = await client.steady(host)
                    return now.free_mib >= now.kept_mib

                await until(full, limit_s=300)
                trimmed = await bound_mib()
                assert 1024 - RESERVE_MIB - 40 <= trimmed <= 1024 - RESERVE_MIB + 2
                explained = await client.explain(NAME)
                assert explained.explanation is not None
                assert "steady mode has trimmed what lay idle in it" in explained.explanation.sentence
                assert explained.explanation.vm.pressure is None
                # The manager leaves it as it is: the room is kept.
                await asyncio.sleep(25)
                assert await bound_mib() == pytest.approx(trimmed, abs=2.0)

                guest = await lab_link(lab.state.uri, f"ebb-{host}.{NAME}")
                try:
                    available = "int(open('/proc/meminfo').read().split('MemAvailable:')[1].split()[0]) // 1024"
                    hold = f"m = {available} - {LEFT_MIB}"
                    code = f"import time; {hold}; held = b'x' * (m << 20); time.sleep(120)"
                    await in_guest(guest, f'python3 -S -c "{code}" </dev/null >/dev/null 2>&1 &')

                    async def given() -> bool:
                        return await bound_mib() >= trimmed + 40

                    await until(given, limit_s=120)
                finally:
                    await guest.close()
                decisions = (await client.explain(NAME)).explanation
                assert decisions is not None
                assert any(d.kind == "steady" and "given back" in d.sentence for d in decisions.decisions), decisions
            finally:
                await client.set_steady(host, enabled=False, reserve_mib="auto")
