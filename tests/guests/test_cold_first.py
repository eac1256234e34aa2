"""A real guest full of page cache: its cold pages become free before it is unplugged, and the ledger tells of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import pytest

from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.ledger import Layer
from ebbtide.lab import processes
from ebbtide.lab.guest_link import LabLink, channel_path
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec
from tests.guests.conftest import RunningLab
from tests.guests.test_demo import virsh
from tests.guests.test_layers import bring, vm

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600)]

SPEC = VMSpec(
    name="cold",
    priority=Priority.DEFLATABLE,
    nominal=Vector(cpu_cores=1, memory_mib=768),
    minimum=Vector(cpu_cores=0.5, memory_mib=448),
)
#: Of the free memory, what is left free when the rest holds a file that nobody reads again.
FREE_MIB = 96
#: It is plugged after the guest has booted with less.
FILL = f"""
mib() {{ awk "/^$1:/ {{print int(\\$2 / 1024)}}" /proc/meminfo; }}
until [ "$(mib MemTotal)" -ge {SPEC.nominal.memory_mib - 128:.0f} ]; do sleep 0.5; done
dd if=/dev/zero of=/cold bs=1M count=$(($(mib MemFree) - {FREE_MIB})) && sync
"""


async def counters(guest: LabLink) -> dict[str, int]:
    said = await guest.call("read", path="/proc/vmstat")
    return {name: int(value) for name, value in re.findall(r"(\S+) (\d+)", said["text"])}


@pytest.fixture
def cold_first(lab: RunningLab) -> Iterator[RunningLab]:
    """Agents that have cold pages made free first, and do so no longer afterwards."""

    def restarted() -> None:
        state = lab.lab.state()
        for host in state.hosts:
            daemon = state.daemon(host.id)
            assert daemon.process is not None
            processes.stop([daemon.process])
            lab.lab.start_daemon(host.id)
        lab.lab.wait_ready()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EBB_HOSTAGENT_COLD_FIRST", "true")
        restarted()
    yield lab
    restarted()


async def test_a_deflation_has_cold_pages_made_free_ahead_of_unplugging(cold_first: RunningLab) -> None:
    async with vm(cold_first, SPEC) as (client, domain):
        xml = await asyncio.to_thread(virsh, "dumpxml", domain) or ""
        async with await LabLink.connect(channel_path(xml)) as guest:
            filled = await guest.call("exec", reply_timeout_s=130, argv=["busybox", "sh", "-c", FILL], timeout_s=120)
            assert filled["returncode"] == 0, filled["stderr"]
            before = await counters(guest)
            outcome = await bring(client, SPEC.name, Vector(cpu_cores=1, memory_mib=512))
            after = await counters(guest)
    rows = {row.layer: row for row in outcome.ledger if row.resource == "memory_mib"}
    given_mib = outcome.before.memory_mib - outcome.after.memory_mib
    assert rows[Layer.COLD].verified > 0, outcome.ledger
    assert rows[Layer.COLD].verified <= rows[Layer.GUEST].verified
    assert rows[Layer.GUEST].verified + rows[Layer.HYPERVISOR].verified == pytest.approx(given_mib, abs=1)
    stolen = sum(after[name] - before[name] for name in after if name.startswith("pgsteal_"))
    assert stolen * 4096 / 2**20 >= rows[Layer.COLD].verified - 1, "the guest's kernel has reclaimed so much"
