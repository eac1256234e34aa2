"""What a domain may touch, by its XML and its mappings."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from hostagent.limits.cgroups import CgroupError
from hostagent.limits.footprints import emulator_mib, emulator_resident_mib, host_swap, memory_of, qemu_pid

DOMAIN = """
<domain type='kvm'>
  <memory unit='KiB'>2097152</memory>
  <cpu><numa><cell id='0' memory='524288' unit='KiB'/></numa></cpu>
  <devices>
    <memory model='virtio-mem'><target>
      <size unit='KiB'>1048576</size><requested unit='KiB'>262144</requested><current unit='KiB'>131072</current>
    </target></memory>
    <memory model='dimm'><target><size unit='KiB'>524288</size></target></memory>
  </devices>
</domain>
"""


def test_boot_memory_dimms_and_what_is_requested_of_virtio_mem_may_be_touched() -> None:
    boot, regions, plugged = memory_of(ElementTree.fromstring(DOMAIN))
    assert boot == 512
    assert regions == [512, 1024, 512]
    assert plugged == 256 + 512


def test_a_domain_without_devices_has_its_memory_as_one_region() -> None:
    assert memory_of(ElementTree.fromstring("<domain><memory>1048576</memory></domain>")) == (1024, [1024], 0)


@pytest.mark.parametrize(("kind", "mib"), [("qemu", 192), ("kvm", 96), ("strange", 192)])
def test_the_emulators_allowance_depends_on_the_domains_type_alone(kind: str, mib: float) -> None:
    assert emulator_mib(ElementTree.Element("domain", type=kind)) == mib


def test_memory_of_the_guest_is_not_counted_as_the_emulators() -> None:
    smaps = "".join(
        f"7f00-7f01 rw-p 0 0:0 0\nSize: {size} kB\nRss: {anonymous} kB\nAnonymous: {anonymous} kB\nSwap: {swap} kB\n"
        for size, anonymous, swap in ((524288, 300000, 100000), (1048576, 5, 5), (65536, 40960, 10240))
    )
    assert emulator_resident_mib(smaps, [512, 1024]) == 50


def test_swap_that_pages_in_memory_still_occupy_counts_as_free(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 1 kB\nSwapCached: 1024 kB\nSwapTotal: 8192 kB\nSwapFree: 4096 kB\n")
    swap = host_swap(file)
    assert (swap.total_mib, swap.free_mib) == (8, 5)


def test_a_pid_file_of_another_process_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ebb-a.vm.pid").write_text("1")
    with pytest.raises(CgroupError, match=r"pid 1 is not the QEMU of ebb-a\.vm"):
        qemu_pid("ebb-a.vm", tmp_path)
    with pytest.raises(CgroupError, match="does not run"):
        qemu_pid("ebb-a.other", tmp_path)
