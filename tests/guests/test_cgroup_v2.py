"""cgroup v2 for real: `hostagent/limits/cgroups.py` run inside a guest whose kernel has it, against groups made there.

The groups mimic libvirt's: `machine.slice/machine-qemu.scope/libvirt` holds the process, with threaded children
`emulator` and `vcpu0`. A process that looks like a QEMU holds memory; the swap is a file on the guest's disk.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import hostagent.limits.cgroups
from tests.guests.solo import SoloGuest, eventually, solo_guest

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

SOURCE = Path(hostagent.limits.cgroups.__file__).read_text()
HELD_MIB = 96
SWAP_MIB = 160
SLICE = "/sys/fs/cgroup/machine.slice"
GROUP = f"{SLICE}/machine-qemu.scope/libvirt"

#: As libvirt and systemd lay it out; the vCPU's thread is told from the others by its name only.
PREPARE = f"""
set -e
echo '+memory +cpu' >/sys/fs/cgroup/cgroup.subtree_control
for directory in {SLICE} {SLICE}/machine-qemu.scope; do
    mkdir -p $directory
    echo '+memory +cpu' >$directory/cgroup.subtree_control
done
mkdir -p {GROUP}
for child in emulator vcpu0; do
    mkdir -p {GROUP}/$child
    echo threaded >{GROUP}/$child/cgroup.type
done
echo '+cpu' >{GROUP}/cgroup.subtree_control
dd if=/dev/zero of=/swap bs=1048576 count={SWAP_MIB} 2>/dev/null
chmod 600 /swap
mkswap /swap >/dev/null
"""

HOLDER = f"""
import mmap, os, sys, threading, time
base = "{GROUP}"
with open(base + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
held = mmap.mmap(-1, {HELD_MIB} << 20)
for page in range(0, len(held), 4096):
    held[page:page + 8] = page.to_bytes(8, "little")

def vcpu():
    with open("/proc/thread-self/comm", "w") as file:
        file.write("CPU 0/TCG")
    with open(base + "/vcpu0/cgroup.threads", "w") as file:
        file.write(str(threading.get_native_id()))
    while True:
        time.sleep(0.001) if not os.path.exists("/run/spin") else sum(range(20000))

threading.Thread(target=vcpu, daemon=True).start()
with open(base + "/emulator/cgroup.threads", "w") as file:
    file.write(str(os.getpid()))
with open("/run/holder.pid.new", "w") as file:
    file.write(str(os.getpid()))
os.rename("/run/holder.pid.new", "/run/holder.pid")
while True:
    time.sleep(0.05)
    if os.path.exists("/run/touch"):
        os.unlink("/run/touch")
        wrong = sum(held[page:page + 8] != page.to_bytes(8, "little") for page in range(0, len(held), 4096))
        with open("/run/touched.new", "w") as file:
            file.write(str(wrong))
        os.rename("/run/touched.new", "/run/touched")
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guest() -> AsyncIterator[SoloGuest]:
    """A guest with the groups, the process in them and a swap file that is not in use yet."""
    async with solo_guest(448) as made:
        await made.put("/run/cgroups.py", SOURCE)
        await made.put("/run/holder.py", HOLDER)
        await made.run("sh", "-c", PREPARE, timeout_s=120)
        await made.run("sh", "-c", "python3 -S /run/holder.py </dev/null >/dev/console 2>&1 &")

        async def held() -> bool:
            return "holder.pid" in (await made.run("ls", "/run")).split()

        await eventually(held, "the process never held its memory")
        yield made


async def inside(guest: SoloGuest, code: str) -> Any:
    """Run code in the guest with the module as `c`, the process's id as `pid` and its memory group as `g`.

    :returns: what it leaves in `result`.
    """
    head = "import json, os, sys, time; sys.path.insert(0, '/run'); import cgroups as c\n"
    head += "pid = int(open('/run/holder.pid').read()); g = c.MemoryGroup(pid); result = None\n"
    tail = "\nprint(json.dumps(result))"
    return json.loads(await guest.run("python3", "-S", "-c", head + textwrap.dedent(code) + tail, timeout_s=120))


async def touch(guest: SoloGuest) -> int:
    await guest.run("sh", "-c", "rm -f /run/touched; : >/run/touch")

    async def touched() -> bool:
        return "touched" in (await guest.run("ls", "/run")).split()

    await eventually(touched, "the process does not live")
    return int(await guest.run("cat", "/run/touched"))


async def test_the_group_of_the_process_is_found_above_its_threaded_children(guest: SoloGuest) -> None:
    found = await inside(
        guest,
        """
        result = {"own": c.memberships(c.read("/proc/%d/cgroup" % pid))[""], "version": g.version, "path": g.path,
                  "usage": g.usage(), "limit": g.limit(), "swap": g.swap(), "room": g.swap_room(),
                  "swappiness": g.swappiness(), "stalled": g.stalled_us(), "unswappable": g.unswappable()}
        g.check_ours()
        """,
    )
    assert found["own"].endswith("/libvirt/emulator")
    assert (found["version"], found["path"]) == (2, GROUP)
    assert found["usage"] > HELD_MIB << 20
    assert (found["limit"], found["swap"], found["room"]) == (None, 0, None)
    assert found["swappiness"] == 60
    assert found["stalled"] >= 0
    assert found["unswappable"] == 0


async def test_without_swap_nothing_of_it_can_be_reclaimed(guest: SoloGuest) -> None:
    result = await inside(guest, "result = [g.reclaim(64 << 20), g.usage()]")
    assert result[0] < 16 << 20
    assert result[1] > HELD_MIB << 20
    assert await touch(guest) == 0


async def test_a_limit_below_the_usage_is_refused_here_since_it_could_kill(guest: SoloGuest) -> None:
    assert await inside(guest, "result = [g.set_limit(g.usage() // 2), g.limit(), g.hold_at_limit(True)]") == [
        False,
        None,
        False,
    ]
    assert await touch(guest) == 0


async def test_with_swap_it_is_reclaimed_then_limited_and_lives(guest: SoloGuest) -> None:
    await guest.run("swapon", "/swap")
    try:
        done = await inside(
            guest,
            """
            steps, goal = 0, 48 << 20
            while g.usage() > goal and steps < 50:
                g.reclaim(min(8 << 20, g.usage() - goal + (1 << 20)))
                steps += 1
            result = {"steps": steps, "usage": g.usage(), "swap": g.swap(), "set": g.set_limit(goal),
                      "limit": g.limit(), "refaults": g.refaults()}
            """,
        )
        assert 2 <= done["steps"] < 50, "step by step"
        assert done["usage"] <= 48 << 20
        assert done["swap"] >= 40 << 20
        assert (done["set"], done["limit"]) == (True, 48 << 20)

        assert await touch(guest) == 0, "all its memory, twice its limit, and it lives"
        after = await inside(guest, "result = [g.usage(), g.refaults(), g.swap(), g.stalled_us()]")
        assert after[0] <= 48 << 20
        assert after[1] > done["refaults"]
        assert after[2] >= 40 << 20
        assert after[3] > 0, "waiting for swap is pressure"

        assert await inside(guest, "g.set_limit(None); result = g.limit()") is None
        assert await touch(guest) == 0
        assert (await inside(guest, "result = g.usage()")) > HELD_MIB << 20
    finally:
        await inside(guest, "g.set_limit(None)")
        await guest.run("swapoff", "/swap", timeout_s=120)


async def test_swap_limits_of_the_group_and_of_those_above_are_seen(guest: SoloGuest) -> None:
    try:
        await guest.run("sh", "-c", f"echo 67108864 >{GROUP}/memory.swap.max")
        assert await inside(guest, "result = g.swap_room()") == 64 << 20
        await guest.run("sh", "-c", f"echo 16777216 >{SLICE}/memory.swap.max")
        assert await inside(guest, "result = g.swap_room()") == 16 << 20
    finally:
        await guest.run("sh", "-c", f"echo max >{GROUP}/memory.swap.max; echo max >{SLICE}/memory.swap.max")


async def test_a_group_that_does_not_hold_the_process_is_never_written(guest: SoloGuest) -> None:
    refused = await inside(
        guest,
        f"""
        result = []
        for path in ("{SLICE}", "/sys/fs/cgroup"):
            g.path = path
            try:
                g.set_limit(1 << 40)
                result.append("written")
            except c.CgroupError as error:
                result.append(str(error))
        """,
    )
    assert "does not hold process" in refused[0]
    assert "root cgroup" in refused[1]
    assert await guest.run("cat", f"{SLICE}/memory.max") == "max\n"


async def test_quota_and_throttling_of_each_vcpu_are_read(guest: SoloGuest) -> None:
    read = "groups = c.vcpu_groups(pid); v = groups[0]; result = [sorted(groups), v.path, v.quota(), list(v.times())]"
    assert await inside(guest, read) == [[0], f"{GROUP}/vcpu0", None, [0, 0]]
    try:
        await guest.run("sh", "-c", f"echo '20000 100000' >{GROUP}/vcpu0/cpu.max; : >/run/spin")

        async def throttled() -> bool:
            _, _, quota, times = await inside(guest, read)
            assert quota == pytest.approx(0.2)
            return bool(times[0] > 0 and times[1] > 0)

        await eventually(throttled, "a vCPU over its quota was never throttled")
    finally:
        await guest.run("sh", "-c", f"rm /run/spin; echo max >{GROUP}/vcpu0/cpu.max")


async def test_a_process_that_has_ended_is_an_error_with_its_number(guest: SoloGuest) -> None:
    code = """
    try:
        c.MemoryGroup(999999)
    except c.CgroupError as error:
        result = str(error)
    """
    assert "999999" in await inside(guest, code)
