"""memcached and a JVM in one real guest: one target is split among them, and what each gave is read in the guest."""

from __future__ import annotations

import asyncio
import base64
import re
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.host.bench_host import in_guest, lab_link
from ebbtide.deflation.allocations import Priority
from ebbtide.lab.guest_link import LabLink
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec
from tests.guests.conftest import RunningLab
from tests.guests.test_layers import bring, vm

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600)]

SOURCE = Path(__file__).parents[1] / "adapters" / "java" / "Fill.java"
HOME = "/run/two"
LIVE_MIB, CACHE_MIB = 40, 200
VALUE_BYTES = 4096
VALUES = 50_000
SIZE, SMALL = Vector(cpu_cores=2, memory_mib=1024), Vector(cpu_cores=2, memory_mib=576)


@dataclass(frozen=True)
class Two:
    """Both applications of a guest, looked at without the adapters."""

    guest: LabLink
    java_port: int

    async def memcached_mib(self) -> float:
        return await self._status_mib("$(busybox pidof memcached)")

    async def java_mib(self) -> float:
        """Its share of the pages (proc(5): smaps_rollup)."""
        text = await in_guest(self.guest, f"busybox grep ^Pss: /proc/$(busybox cat {HOME}/java.pid)/smaps_rollup")
        return int(text.split()[1]) / 1024

    async def ask_java(self, line: str) -> str:
        return (await in_guest(self.guest, f"echo {line} | busybox nc 127.0.0.1 {self.java_port}")).strip()

    async def _status_mib(self, pid: str) -> float:
        return int((await in_guest(self.guest, f"busybox grep ^VmRSS: /proc/{pid}/status")).split()[1]) / 1024


@asynccontextmanager
async def two(lab: RunningLab, domain: str, classes: dict[str, str]) -> AsyncIterator[Two]:
    """Start the JVM and its adapter, register it, and fill memcached. ``classes``: file name to contents in base64."""
    guest = await lab_link(lab.state.uri, domain)
    try:
        await in_guest(guest, f"busybox mkdir -p {HOME}")
        for name, text in classes.items():
            await in_guest(guest, f"echo {text} | busybox base64 -d > '{HOME}/{name}'")
        java = f"java -XX:+UseG1GC -XX:TieredStopAtLevel=1 -Xms16m -Xmx320m -cp {HOME} Fill {LIVE_MIB} {CACHE_MIB}"
        await in_guest(guest, f"{java} </dev/null >{HOME}/port 2>&1 & echo $! > {HOME}/java.pid")
        await in_guest(
            guest,
            "python3 -S -m app_adapters jvm --pid-file /run/two/java.pid --state-dir /run/two/state"
            " --listen 127.0.0.1:7071 --token-file /run/ebbtide/token </dev/null >/run/two/adapter.log 2>&1 &",
        )
        drop_ins = "/etc/ebbtide/adapters.d"
        await in_guest(
            guest,
            'echo \'{"name": "jvm", "url": "http://127.0.0.1:7071"}\''
            f" > {HOME}/new && busybox mv {HOME}/new {drop_ins}/jvm.json",
        )
        done = await guest.call(
            "memcached.fill", reply_timeout_s=180, prefix="two-", count=VALUES, value_bytes=VALUE_BYTES
        )
        assert done["stored"] == VALUES
        async with asyncio.timeout(120):
            while not re.fullmatch(r"\d+\s*", port := await in_guest(guest, f"busybox cat {HOME}/port")):
                await asyncio.sleep(0.5)
        yield Two(guest, int(port))
    finally:
        await guest.close()


@pytest.fixture
def classes(tmp_path: Path) -> dict[str, str]:
    subprocess.run(["javac", "-d", tmp_path, SOURCE], check=True)
    return {file.name: base64.b64encode(file.read_bytes()).decode() for file in tmp_path.glob("*.class")}


async def test_one_target_is_split_among_memcached_and_a_jvm_and_both_gave_what_the_ledger_says(
    lab: RunningLab, classes: dict[str, str]
) -> None:
    spec = VMSpec(
        name="two",
        priority=Priority.DEFLATABLE,
        nominal=SIZE,
        minimum=Vector(cpu_cores=0.5, memory_mib=320),
        boot_memory_mib=384,
    )
    async with vm(lab, spec) as (client, domain), two(lab, domain, classes) as apps:
        # Its cache is garbage from now on, but the heap stays as large as it was.
        assert await apps.ask_java("cache 0") == "ok"
        before = {"memcached": await apps.memcached_mib(), "jvm": await apps.java_mib()}
        assert before["memcached"] > VALUES * VALUE_BYTES / 2**20
        assert before["jvm"] > LIVE_MIB + CACHE_MIB

        outcome = await bring(client, "two", SMALL)
        after = {"memcached": await apps.memcached_mib(), "jvm": await apps.java_mib()}
        gave = {name: before[name] - after[name] for name in before}
        assert min(gave.values()) > 40, (before, after)

        rows = {row.layer.value: row for row in outcome.ledger if row.resource == "memory_mib"}
        fall = outcome.before.memory_mib - outcome.after.memory_mib
        assert fall == pytest.approx(SIZE.memory_mib - SMALL.memory_mib, abs=2)
        assert rows["guest"].verified + rows["hypervisor"].verified == pytest.approx(fall, abs=2)
        # What both released is in the application's row as far as it helped the guest to unplug; a heap may give more.
        released = min(sum(gave.values()), rows["guest"].verified)
        assert rows["application"].verified == pytest.approx(released, rel=0.15, abs=8)
        assert "memcached: " in rows["application"].reason
        assert "jvm: " in rows["application"].reason
        # Both live on what they have.
        assert await apps.ask_java("get") == "ok"
        assert "STAT curr_items" in await in_guest(
            apps.guest, "printf 'stats\\r\\nquit\\r\\n' | busybox nc 127.0.0.1 11211"
        )

        outcome = await bring(client, "two", SIZE)
        assert outcome.after.memory_mib == pytest.approx(SIZE.memory_mib, abs=2)
        # The heap may grow again, as far as it could before.
        assert await apps.ask_java(f"cache {CACHE_MIB}") == "ok"
        assert await apps.java_mib() > LIVE_MIB + CACHE_MIB
