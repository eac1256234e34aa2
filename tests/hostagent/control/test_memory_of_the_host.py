"""What a host has available is its VMs' first, as far as they are charged it; and others may take it all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from ebbtide.deflation.sharing import overcommitment
from ebbtide.messages.explanations import DecisionKind
from hostagent.control.overcommitment import Overcommitment
from hostagent.limits.cgroups import CgroupError
from hostagent.limits.footprints import resident_mib
from hostagent.mechanisms.host_memory import host_memory_available_mib
from hostagent.vm.host import Host
from tests.hostagent.agent_process import OVERHEAD_MIB
from tests.hostagent.conftest import Command
from tests.hostagent.control.test_host_state import told
from tests.hostagent.doing import reclaim
from tests.hostagent.fake_hypervisor import FakeHypervisor
from tests.hostagent.world import Domain

#: What each of the two VMs is charged, and has in memory, MiB.
CHARGE_MIB, RESIDENT_MIB = 1024 + OVERHEAD_MIB, 100.0


@pytest.fixture
def idle(two_vms: list[Domain], host: Host) -> list[Domain]:
    hypervisor = cast(FakeHypervisor, host.hypervisor)
    hypervisor.residents = {vm.domain: RESIDENT_MIB for vm in host.vms.values()}
    return two_vms


def others_leave(host: Host, mib: float) -> None:
    """Of what our VMs have not touched they leave so much more, or less."""
    host.memory_available_mib = lambda: 2 * (CHARGE_MIB - RESIDENT_MIB) + mib


async def free_mib(host: Host) -> float:
    await host.sample()
    return host.free().memory_mib


@pytest.mark.usefixtures("idle")
async def test_memory_that_vms_have_not_touched_yet_is_not_sold_again(host: Host) -> None:
    others_leave(host, host.slice.reserve_mib + 500.0)
    assert await free_mib(host) == 500.0
    others_leave(host, host.slice.reserve_mib - 1.0)
    assert await free_mib(host) == 0.0


@pytest.mark.usefixtures("two_vms")
async def test_a_vm_of_which_the_kernel_does_not_tell_counts_as_having_all_its_memory(host: Host) -> None:
    host.memory_available_mib = lambda: host.slice.reserve_mib + 500.0
    assert await free_mib(host) == 500.0


@pytest.mark.usefixtures("idle")
async def test_memory_that_is_taken_back_before_its_vm_has_touched_it_becomes_free(
    command: Command, host: Host
) -> None:
    """Otherwise a deflation would reach all that it was to, leave its need unmet, and have VMs preempted."""
    others_leave(host, host.slice.reserve_mib)
    assert (await reclaim(command, memory_mib=400.0)).state == "done"
    assert await free_mib(host) == pytest.approx(400.0)


async def test_a_host_whose_memory_others_have_taken_deflates_its_vms_until_its_reserve_is_there_again(
    idle: list[Domain], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overcommitment, "SHORT_FOR_S", 0.0)
    looks = Overcommitment(host)
    others_leave(host, 1.0)
    await host.sample()
    await looks.look()
    assert [domain.bound_mib for domain in idle] == [1024.0, 1024.0], "the reserve is there for this"
    others_leave(host, -100.0)
    await host.sample()
    await looks.look()
    assert sum(domain.bound_mib for domain in idle) == pytest.approx(2048.0 - 640.0)
    assert not host.is_overcommitted()
    await looks.look()
    assert told(host, DecisionKind.OVERCOMMITTED) == [
        "overcommitted by 640 MiB: others on the host have taken memory that its VMs were sold",
        "within its capacity again",
    ]


def test_zfs_gives_back_of_its_cache_what_is_above_its_least(tmp_path: Path) -> None:
    stats = tmp_path / "arcstats"
    without = host_memory_available_mib(stats)
    stats.write_text(f"13 1 0x01 123 33456 1 2\nname type data\nc_min 4 {2**30}\nsize 4 {2**46}\nc 4 7\n")
    assert host_memory_available_mib(stats) - without == pytest.approx(2**26 - 2**10, abs=4096)
    stats.write_text(f"c_min 4 {2**30}\nsize 4 {2**20}\n")
    assert host_memory_available_mib(stats) - without == pytest.approx(0.0, abs=4096)


def test_what_a_process_has_in_memory_leaves_out_files_that_it_has_mapped(tmp_path: Path) -> None:
    (tmp_path / "mapped").write_bytes(b"x" * 2**26)
    program = (
        "import mmap, pathlib, sys\n"
        "taken = b'x' * 40 * 2**20\n"
        "with open(sys.argv[2], 'rb') as file:\n"
        "    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "    assert mapped.find(b'y') < 0\n"
        "    print(pathlib.Path('/proc/self/status').read_text(), flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, "guest=ebb-x.low,", str(tmp_path / "mapped")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("RssFile"):
                assert int(line.split()[1]) > 2**16, "it is mapped and read"
            if not line.strip():
                break
        (tmp_path / "ebb-x.low.pid").write_text(str(process.pid))
        assert 40.0 < resident_mib("ebb-x.low", tmp_path) < 64.0
        process.stdin.close()
    with pytest.raises(CgroupError, match="does not run"):
        resident_mib("ebb-x.low", tmp_path)
