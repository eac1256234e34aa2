"""Finding and reading control groups: layouts of v1, hybrid and v2 hosts as files."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from hostagent.limits import cgroups
from hostagent.limits.cgroups import CgroupError, MemoryGroup, Mount, VcpuGroup, VcpuTimes, group_directory, vcpu_groups

V1_MOUNTS = """\
24 23 0:21 / {root}/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
25 23 0:22 / {root}/memory rw,relatime shared:9 - cgroup cgroup rw,memory
26 23 0:23 / {root}/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate
"""
V2_MOUNT = "26 23 0:23 / {root} rw,relatime - cgroup2 cgroup2 rw\n"
PID = 4711


class Host:
    """A make-believe /proc and cgroup tree."""

    def __init__(self, home: Path) -> None:
        self.proc, self.root = home / "proc", home / "cgroup"

    def file(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def process(self, groups: str, mounts: str) -> None:
        self.file(self.proc / "self" / "mountinfo", mounts.format(root=self.root))
        self.file(self.proc / str(PID) / "cgroup", groups)
        self.file(self.proc / str(PID) / "stat", f"{PID} (qemu (a) b) S 1 1 1 0 -1 4 900 0 77 0 1 1")
        self.file(self.proc / str(PID) / "status", "VmLck:\t 1024 kB\nVmPin:\t 0 kB\nHugetlbPages:\t 2048 kB\n")

    def group(self, path: str, **files: str) -> Path:
        directory = self.root / path
        for name, text in files.items():
            self.file(directory / name.replace("__", "."), text)
        for parent in [directory, *directory.parents]:
            if parent == self.root:
                break
            self.file(parent / "cgroup.procs", f"{PID}\n")
        return directory

    def thread(self, number: int, name: str, groups: str) -> None:
        self.file(self.proc / str(PID) / "task" / str(number) / "comm", name)
        self.file(self.proc / str(PID) / "task" / str(number) / "cgroup", groups)

    def memory(self) -> MemoryGroup:
        return MemoryGroup(PID, str(self.proc))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def v1(host: Host) -> Host:
    host.process("5:memory:/machine/qemu-1-x\n4:cpu,cpuacct:/machine/qemu-1-x/emulator\n0::/\n", V1_MOUNTS)
    host.file(host.root / "memory" / "cgroup.procs", "")
    host.group(
        "memory/machine/qemu-1-x",
        memory__usage_in_bytes="700000000\n",
        memory__limit_in_bytes="9223372036854771712\n",
        memory__stat="cache 5\nswap 4096\nworkingset_refault_anon 99\n",
        memory__swappiness="0\n",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
    )
    return host


def test_on_a_hybrid_host_the_memory_group_is_that_of_version_1(v1: Host) -> None:
    group = v1.memory()
    assert (group.version, group.path) == (1, str(v1.root / "memory/machine/qemu-1-x"))
    assert group.usage() == 700_000_000
    assert group.limit() is None
    assert group.swap() == 4096
    assert group.swappiness() == 0
    assert group.refaults() == 99, "more than the 77 major faults"
    assert group.unswappable() == 3 << 20
    assert group.swap_room() is None


def test_on_version_2_the_nearest_group_with_the_controller_counts(host: Host) -> None:
    host.process("0::/machine.slice/vm.scope/libvirt/emulator\n", V2_MOUNT)
    host.file(host.proc / "sys/vm/swappiness", "60\n")
    scope = "machine.slice/vm.scope"
    host.group(f"{scope}/libvirt", memory__current="5\n", memory__max="max\n", memory__stat="swapcached 4096\n")
    host.group(f"{scope}/libvirt/emulator", memory__pressure="some avg10=0.00 total=7\n")
    host.group(scope, memory__swap__max="8192\n", memory__swap__current="5000\n")
    group = host.memory()
    assert (group.version, group.path) == (2, str(host.root / scope / "libvirt"))
    assert (group.usage(), group.limit(), group.swappiness()) == (5, None, 60)
    assert group.swap_room() == 3192, "the scope's"
    host.group(f"{scope}/libvirt", memory__swap__current="12288\n")
    assert group.swap() == 8192, "less what is in memory again"


def test_a_group_of_a_mounted_subtree_is_found_below_the_mount(host: Host) -> None:
    mounts = "25 23 0:22 /docker/abc {root} rw - cgroup cgroup rw,memory\n"
    host.process("5:memory:/docker/abc/machine/x\n", mounts)
    assert group_directory("memory", str(PID), str(host.proc)) == (1, str(host.root / "machine/x"))


def test_escaped_mount_points_and_strange_lines_are_read() -> None:
    text = "25 23 0:22 / /a\\040b rw - cgroup cgroup rw,memory\n26 1 0:1 / / rw - ext4 /dev/vda rw\nnonsense\n"
    assert cgroups.mounts(text) == [Mount(1, ("rw", "memory"), "/", "/a b")]


def test_a_subtree_whose_name_holds_a_backslash_as_units_of_systemd_do_is_found(host: Host) -> None:
    host.process("0::/a\\x2db.scope/vm\n", "26 23 0:23 /a\\134x2db.scope {root} rw - cgroup2 cgroup2 rw\n")
    host.group("vm", cpu__max="max 100000\n")
    assert group_directory("cpu", str(PID), str(host.proc)) == (2, str(host.root / "vm"))


def test_a_process_in_no_group_and_a_controller_that_is_not_there_are_errors(host: Host) -> None:
    with pytest.raises(CgroupError, match="4711"):
        host.memory()
    host.process("4:cpu:/x\n", V1_MOUNTS)
    with pytest.raises(CgroupError, match="no cgroup hierarchy has the memory controller"):
        host.memory()


def test_nothing_is_written_to_a_group_that_does_not_hold_the_process(v1: Host) -> None:
    group = v1.memory()
    directory = Path(group.path)
    (directory / "cgroup.procs").write_text("1\n47110\n")
    with pytest.raises(CgroupError, match="does not hold process 4711"):
        group.set_limit(1)
    with pytest.raises(CgroupError, match="does not hold process 4711"):
        group.hold_at_limit(True)
    with pytest.raises(CgroupError, match="does not hold process 4711"):
        group.reclaim(1)
    assert group.limit() is None
    assert not group.holds_at_limit()


def test_a_root_group_is_never_written(host: Host) -> None:
    host.process("5:memory:/\n", V1_MOUNTS)
    host.file(host.root / "memory" / "cgroup.procs", f"{PID}\n")
    with pytest.raises(CgroupError, match="root cgroup"):
        host.memory().set_limit(1)


def test_quota_and_throttling_are_read_by_vcpu(v1: Host) -> None:
    for number in (0, 1):
        v1.thread(100 + number, f"CPU {number}/KVM\n", f"4:cpu,cpuacct:/machine/qemu-1-x/vcpu{number}\n")
        v1.group(
            f"cpu,cpuacct/machine/qemu-1-x/vcpu{number}",
            cpu__cfs_quota_us="50000\n" if number else "-1\n",
            cpu__cfs_period_us="100000\n",
            cpu__stat="nr_periods 10\nnr_throttled 4\nthrottled_time 2500000000\n",
        )
    v1.thread(90, "worker\n", "4:cpu,cpuacct:/\n")
    groups = vcpu_groups(PID, str(v1.proc))
    assert {number: group.quota() for number, group in groups.items()} == {0: None, 1: 0.5}
    assert groups[1].times() == VcpuTimes(10, 4)


def test_a_thread_that_ends_while_the_vcpus_are_looked_for_is_passed_over(v1: Host) -> None:
    v1.thread(100, "CPU 0/KVM\n", "4:cpu,cpuacct:/machine/qemu-1-x/vcpu0\n")
    v1.group("cpu,cpuacct/machine/qemu-1-x/vcpu0", cpu__cfs_quota_us="-1\n")
    (v1.proc / str(PID) / "task" / "91").mkdir()  # its files are gone
    assert list(vcpu_groups(PID, str(v1.proc))) == [0]


def test_version_2_has_its_quota_in_one_file(host: Host) -> None:
    host.process("0::/vm/vcpu0\n", V2_MOUNT)
    host.thread(7, "CPU 0/TCG", "0::/vm/vcpu0\n")
    host.group("vm/vcpu0", cpu__max="25000 100000\n", cpu__stat="usage_usec 5\nnr_periods 3\nthrottled_usec 1500\n")
    group = VcpuGroup(PID, 7, str(host.proc))
    assert group.quota() == 0.25
    assert group.times() == VcpuTimes(3, 0)


def test_a_kernel_that_cannot_limit_the_cpu_time_of_vms_is_found_without_one(host: Host) -> None:
    v1, v2 = (text.format(root=host.root) for text in (V1_MOUNTS, V2_MOUNT))
    assert cgroups.kernel_lacks_quotas(v1) == cgroups.NO_BANDWIDTH
    host.file(host.root / "cpu,cpuacct" / "cpu.cfs_quota_us", "-1\n")
    assert cgroups.kernel_lacks_quotas(v1) == ""
    host.file(host.root / "cgroup.controllers", "io memory\n")
    assert cgroups.kernel_lacks_quotas(v2) == cgroups.kernel_lacks_quotas("") == cgroups.NO_CPU_GROUPS
    host.file(host.root / "cgroup.controllers", "cpu io memory\n")
    assert cgroups.kernel_lacks_quotas(v2) == "", "no group tells"
    host.group("system.slice", cpu__weight="100\n")
    assert cgroups.kernel_lacks_quotas(v2) == cgroups.NO_BANDWIDTH
    host.group("machine.slice", cpu__weight="100\n", cpu__max="max 100000\n")
    assert cgroups.kernel_lacks_quotas(v2) == ""


def test_a_kernel_that_cannot_limit_the_memory_of_vms_is_found_without_one(host: Host) -> None:
    v2 = V2_MOUNT.format(root=host.root)
    assert cgroups.kernel_lacks_limits(V1_MOUNTS.format(root=host.root)) == ""
    assert cgroups.kernel_lacks_limits("") == cgroups.NO_MEMORY_GROUPS
    host.file(host.root / "cgroup.controllers", "cpu io\n")
    assert cgroups.kernel_lacks_limits(v2) == cgroups.NO_MEMORY_GROUPS
    host.file(host.root / "cgroup.controllers", "cpu io memory\n")
    assert cgroups.kernel_lacks_limits(v2) == "", "no group tells"
    host.group("system.slice", memory__current="5\n")
    assert cgroups.kernel_lacks_limits(v2) == cgroups.NO_RECLAIM
    host.group("machine.slice", memory__current="5\n", memory__reclaim="")
    assert cgroups.kernel_lacks_limits(v2) == ""


def test_where_zswap_is_on_no_limit_is_set_on_version_2_but_on_version_1(host: Host, tmp_path: Path) -> None:
    switch = tmp_path / "enabled"
    v1, v2 = V1_MOUNTS.format(root=host.root), V2_MOUNT.format(root=host.root)
    host.file(host.root / "cgroup.controllers", "cpu io memory\n")
    host.group("machine.slice", memory__current="5\n", memory__reclaim="")
    for said, why in (("N\n", ""), ("Y\n", cgroups.ZSWAP)):
        switch.write_text(said)
        assert cgroups.kernel_lacks_limits(v2, switch) == why
        assert cgroups.kernel_lacks_limits(v1, switch) == ""


def test_a_group_of_version_2_says_whether_its_kernel_can_reclaim(v1: Host, tmp_path: Path) -> None:
    assert v1.memory().why_no_reclaim() == ""
    host = Host(tmp_path / "v2")
    host.process("0::/machine.slice\n", V2_MOUNT)
    host.group("machine.slice", memory__current="5\n")
    assert host.memory().why_no_reclaim() == cgroups.NO_RECLAIM
    host.group("machine.slice", memory__reclaim="")
    assert host.memory().why_no_reclaim() == ""


def test_the_module_runs_where_there_is_nothing_but_an_old_python() -> None:
    module = ast.parse(Path(cgroups.__file__).read_text(), feature_version=(3, 8))
    names = {a.name.split(".")[0] for n in ast.walk(module) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module.split(".")[0] for n in ast.walk(module) if isinstance(n, ast.ImportFrom) and n.module}
    assert names <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("mounts", "controllers", "version"),
    [(V1_MOUNTS, "memory pids", 1), (V2_MOUNT, "cpu memory", 2), (V2_MOUNT, "memory", None), ("", "", None)],
)
def test_which_groups_share_out_cpu_time(host: Host, mounts: str, controllers: str, version: int | None) -> None:
    host.file(host.root / "cgroup.controllers", controllers)
    assert cgroups.cpu_version(mounts.format(root=host.root)) == version
