"""Readings that go through no agent, from files as kernels and libvirt write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.lab.errors import ReadingError
from ebbtide.lab.readings import DomainView, Reading, cpu_list, qemu_pid, resident_kib, vcpu_quotas

DOMAIN = """
<domain type='qemu'>
  <vcpu placement='static'>3</vcpu>
  <cpu><numa><cell id='0' cpus='0-2' memory='524288' unit='KiB'/></numa></cpu>
  <devices>
    <channel type='unix'>
      <source mode='bind' path='/run/lab.sock'/><target type='virtio' name='io.ebbtide.lab.0' state='connected'/>
    </channel>
    <memory model='virtio-mem'>
      <target><size unit='KiB'>786432</size><requested unit='KiB'>0</requested><current unit='KiB'>131072</current>
      </target>
    </memory>
  </devices>
</domain>
"""
SMAPS = """\
55d0-55d9 r--p 00000000 fe:00 131   /usr/bin/qemu-system-x86_64
Size:             524288 kB
Rss:              524288 kB
7f42-7f62 rw-p 00000000 00:00 0
Size:             786432 kB
KernelPageSize:        4 kB
Rss:               34816 kB
VmFlags: rd wr mr mw me nr sd
7f63-7f73 rw-p 00000000 00:00 0
Size:             524288 kB
Rss:              165888 kB
7f80-7f81 rw-p 00000000 00:00 0
Size:              65536 kB
Rss:               65536 kB
7f82-7f83 rw-p 00000000 00:00 0 [heap]
Size:             524288 kB
Rss:              111111 kB
"""


def test_a_domains_xml_gives_its_memory_and_its_lab_socket() -> None:
    view = DomainView.parse(DOMAIN)
    assert view == DomainView(524288, 786432, 131072, Path("/run/lab.sock"), 3)


def test_a_domain_without_a_lab_channel_is_refused() -> None:
    with pytest.raises(ReadingError, match=r"no channel io\.ebbtide\.lab\.0"):
        DomainView.parse(DOMAIN.replace("io.ebbtide.lab.0", "other"))


def test_only_the_mappings_of_guest_memory_count_as_resident() -> None:
    assert resident_kib(SMAPS, DomainView.parse(DOMAIN)) == 34816 + 165888


def test_a_boot_memory_as_large_as_the_device_is_counted_twice() -> None:
    view = DomainView(524288, 524288, 0, Path(), 1)
    assert resident_kib(SMAPS.replace("786432", "524288"), view) == 34816 + 165888


def test_a_mapping_that_is_not_found_is_an_error_and_no_zero() -> None:
    with pytest.raises(ReadingError, match="no anonymous mapping of 786432 KiB"):
        resident_kib(SMAPS.replace("786432", "786428"), DomainView.parse(DOMAIN))


@pytest.mark.parametrize(("text", "cpus"), [("0\n", (0,)), ("0-2\n", (0, 1, 2)), ("0,2-3\n", (0, 2, 3))])
def test_lists_of_cpus_are_read_as_the_kernel_writes_them(text: str, cpus: tuple[int, ...]) -> None:
    assert cpu_list(text) == cpus


def task(proc: Path, number: int, comm: str, cgroup: str) -> None:
    directory = proc / "77" / "task" / str(number)
    directory.mkdir(parents=True)
    (directory / "comm").write_text(comm + "\n")
    (directory / "cgroup").write_text(cgroup)


def mounted(proc: Path, line: str) -> None:
    (proc / "self").mkdir(parents=True, exist_ok=True)
    with (proc / "self" / "mountinfo").open("a") as file:
        file.write(line + "\n")


def test_quotas_are_read_from_cgroup_v1_by_vcpu_number(tmp_path: Path) -> None:
    mount = tmp_path / "cpu"
    mounted(tmp_path, f"30 25 0:26 / {tmp_path}/unified rw - cgroup2 cgroup2 rw")
    mounted(tmp_path, f"31 25 0:27 / {mount} rw,relatime - cgroup cgroup rw,cpu,cpuacct")
    for number, quota in ((0, "-1"), (1, "37000")):
        group = mount / f"machine/vm/vcpu{number}"
        group.mkdir(parents=True)
        (group / "cpu.cfs_quota_us").write_text(quota + "\n")
        (group / "cpu.cfs_period_us").write_text("100000\n")
    task(tmp_path, 82, "CPU 1/TCG", "2:cpu,cpuacct:/machine/vm/vcpu1\n0::/machine/vm\n")
    task(tmp_path, 81, "CPU 0/TCG", "2:cpu,cpuacct:/machine/vm/vcpu0\n0::/machine/vm\n")
    task(tmp_path, 80, "qemu-system-x86", "2:cpu,cpuacct:/machine/vm/emulator\n")
    assert vcpu_quotas(77, tmp_path) == (None, 0.37)


def test_quotas_are_read_from_cgroup_v2_also_below_a_mounted_root(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    mounted(tmp_path, f"30 25 0:26 /pod {mount} rw - cgroup2 cgroup2 rw")
    for number, limit in ((0, "max 100000"), (1, "50000 1000000")):
        group = mount / f"machine.slice/vcpu{number}"
        group.mkdir(parents=True)
        (group / "cpu.max").write_text(limit + "\n")
        task(tmp_path, 90 + number, f"CPU {number}/KVM", f"0::/pod/machine.slice/vcpu{number}\n")
    assert vcpu_quotas(77, tmp_path) == (None, 0.05)


def test_a_thread_without_a_cpu_controller_is_an_error(tmp_path: Path) -> None:
    mounted(tmp_path, f"30 25 0:26 / {tmp_path}/unified rw - cgroup2 cgroup2 rw")
    task(tmp_path, 90, "CPU 0/KVM", "0::/machine\n")
    with pytest.raises(ReadingError, match="no cgroup with a CPU controller"):
        vcpu_quotas(77, tmp_path)


def test_a_pid_that_belongs_to_another_process_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vm.pid").write_text("1\n")
    with pytest.raises(ReadingError, match="is not the QEMU of vm"):
        qemu_pid("vm", tmp_path)
    with pytest.raises(ReadingError, match="does not run"):
        qemu_pid("other", tmp_path)


def test_the_bound_counts_cpus_on_line_under_their_quotas() -> None:
    reading = Reading(
        memcached_limit_mib=1,
        memcached_rss_mib=1,
        cpus_online=(0, 2),
        virtio_mem_current_mib=128,
        balloon_actual_mib=500,
        vcpu_quota_cores=(0.5, 0.1, None),
        resident_mib=1,
    )
    assert (reading.cpu_cores, reading.memory_mib) == (1.5, 628)
