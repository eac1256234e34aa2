"""The control groups of one QEMU process: found from /proc, read and written as files (cgroup v1, hybrid and v2).

libvirt's layouts: on v1 `machine/qemu-N-NAME.libvirt-qemu` in each controller's tree, on v2
`machine.slice/machine-qemu...scope/libvirt` with threaded children `emulator` and `vcpuN`, which have no memory files.
Files: Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst, Documentation/accounting/psi.rst.

Standard library only and Python 3.8, so that it can be tried on any kernel, also inside a guest. Nothing here writes
to a group whose `cgroup.procs` does not hold the process that it was asked about, nor to a root group.
"""

from __future__ import annotations

import errno
import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
_VCPU_THREAD = re.compile(r"CPU (\d+)/")
#: cgroup v1 writes "no limit" as the largest number of pages; anything near it is none.
_UNLIMITED_BYTES = 1 << 60
#: Files that only groups with the controller have: pressure and cpu.stat are in every group of v2.
_MARKS = {"memory": "memory.current", "cpu": "cpu.max"}
#: Why a kernel is in no position to limit the memory of VMs.
NO_MEMORY_GROUPS = "no control group of this kernel limits memory"
NO_RECLAIM = "this kernel cannot reclaim from a control group (memory.reclaim, Linux 5.19)"
ZSWAP = "zswap keeps swapped pages in the VM's own control group, so the kernel could kill QEMU at the limit"
#: Whether pages are compressed before they go to swap. On v2 they stay charged to the group they are of.
_ZSWAP = Path("/sys/module/zswap/parameters/enabled")

#: CPU shares of a group whose were never set (v1: cpu.shares, v2: cpu.weight), and the most that one takes, by version.
DEFAULT_SHARES = {1: 1024, 2: 100}
MOST_SHARES = {1: 262_144, 2: 10_000}
#: Why a kernel is in no position to limit the CPU time of VMs.
NO_CPU_GROUPS = "no control group of this kernel limits CPU time"
NO_BANDWIDTH = "this kernel gives control groups no CPU quotas (CONFIG_CFS_BANDWIDTH)"


class CgroupError(Exception):
    """A group or a file of it is missing, or may not be written; the text says which."""


class Mount(NamedTuple):
    """One mounted hierarchy. ``controllers`` is empty for v2."""

    version: int
    controllers: tuple[str, ...]
    root: str
    point: str


class VcpuTimes(NamedTuple):
    """What cpu.stat of one vCPU's group says of its quota since the group was made."""

    periods: int
    throttled: int


def own_mountinfo() -> str:
    """The text of /proc/self/mountinfo."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        return file.read()


def mounts(mountinfo: str) -> list[Mount]:
    """The hierarchies in the text of /proc/PID/mountinfo."""
    found = []
    for line in mountinfo.splitlines():
        fields, _, tail = line.partition(" - ")
        words, kinds = fields.split(), tail.split(" ", 2)
        if len(words) < 5 or len(kinds) < 3:
            continue
        if kinds[0] == "cgroup2":
            found.append(Mount(2, (), _unescaped(words[3]), _unescaped(words[4])))
        elif kinds[0] == "cgroup":
            found.append(Mount(1, tuple(kinds[2].split(",")), _unescaped(words[3]), _unescaped(words[4])))
    return found


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), path)


def memberships(text: str) -> dict[str, str]:
    """Path of the group by controller out of the text of /proc/PID/cgroup; v2 stands under the empty name."""
    found = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            found[controller] = path
    return found


def group_directory(controller: str, process: str = "self", proc: str = "/proc") -> tuple[int, str]:
    """Version and directory of the group of a process (or ``PID/task/TID``) that has the files of a controller.

    :raises CgroupError: no hierarchy has the controller, or the process has ended.
    """
    try:
        groups = memberships(read(os.path.join(proc, process, "cgroup")))
        hierarchies = mounts(read(os.path.join(proc, "self", "mountinfo")))
    except OSError as error:
        raise CgroupError(f"the cgroups of process {process} cannot be read: {error}") from error
    for mount in hierarchies:
        if mount.version == 1 and controller in mount.controllers and controller in groups:
            return 1, _inside(mount, groups[controller])
    for mount in hierarchies:
        if mount.version == 2 and "" in groups:
            # A threaded child has no memory controller: the nearest group above that has is the one that counts.
            directory = _inside(mount, groups[""])
            while directory.startswith(mount.point):
                if os.path.exists(os.path.join(directory, _MARKS[controller])):
                    return 2, directory
                directory = os.path.dirname(directory)
    raise CgroupError(f"no cgroup hierarchy has the {controller} controller for process {process}")


def _inside(mount: Mount, path: str) -> str:
    below = path[len(mount.root) :] if mount.root != "/" and path.startswith(mount.root) else path
    return os.path.normpath(os.path.join(mount.point, below.lstrip("/")))


def read(path: str) -> str:
    """:raises OSError: as it comes."""
    with open(path) as file:
        return file.read()


def write(path: str, text: str) -> None:
    """Write in one system call, so that EBUSY and EAGAIN are seen: buffered files report them at close, if at all.

    :raises OSError: as it comes.
    """
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def keyed(text: str) -> dict[str, int]:
    """Files such as memory.stat and cpu.stat: one name and number a line."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[1].lstrip("-").isdigit():
            found[words[0]] = int(words[1])
    return found


def stalled_us(text: str) -> int:
    """Total stall time of a PSI file in us."""
    match = re.search(r"^some .*\btotal=(\d+)", text, re.MULTILINE)
    if match is None:
        raise CgroupError("a pressure file has no line some with a total")
    return int(match.group(1))


class MemoryGroup:
    """The memory group of one process. All sizes in bytes.

    :raises CgroupError: the process is in no memory group.
    """

    def __init__(self, pid: int, proc: str = "/proc") -> None:
        self.pid = pid
        self._proc = proc
        self.version, self.path = group_directory("memory", str(pid), proc)

    def _read(self, name: str) -> str:
        try:
            return read(os.path.join(self.path, name))
        except OSError as error:
            raise CgroupError(f"{name} of process {self.pid}'s cgroup cannot be read: {error}") from error

    def _number(self, name: str) -> int | None:
        text = self._read(name).strip()
        return None if text == "max" or int(text) >= _UNLIMITED_BYTES else int(text)

    # --- readings ------------------------------------------------------------------------------------------------

    def usage(self) -> int:
        """What is charged to the group, page cache and the kernel's part included."""
        return self._number("memory.current" if self.version == 2 else "memory.usage_in_bytes") or 0

    def limit(self) -> int | None:
        """The hard limit; None where there is none."""
        return self._number("memory.max" if self.version == 2 else "memory.limit_in_bytes")

    def stat(self) -> dict[str, int]:
        return keyed(self._read("memory.stat"))

    def swap(self) -> int:
        """How much of the group is in swap and not in memory now."""
        if self.version == 2:
            try:
                used = self._number("memory.swap.current") or 0
            except CgroupError:  # a kernel without swap accounting
                return self._status("VmSwap")
            # Pages that have been fetched back and keep their place in swap are charged there too.
            return max(used - self.stat().get("swapcached", 0), 0)
        swapped = self.stat().get("swap")
        return self._status("VmSwap") if swapped is None else swapped

    def swap_room(self) -> int | None:
        """How much more the group may put into swap by its own and its parents' swap limits; None: no limit."""
        rooms = [room for directory in self._upwards() for room in [_swap_room(self.version, directory)]]
        known = [room for room in rooms if room is not None]
        return min(known) if known else None

    def _upwards(self) -> Iterator[str]:
        directory = self.path
        while os.path.exists(os.path.join(directory, "cgroup.procs")):
            yield directory
            directory = os.path.dirname(directory)

    def swappiness(self) -> int:
        """With 0 a group that is at its limit never swaps: v1 has it for each group, v2 the host's."""
        if self.version == 1:
            return int(self._read("memory.swappiness"))
        try:
            return int(read(os.path.join(self._proc, "sys", "vm", "swappiness")))
        except OSError as error:
            raise CgroupError(f"the host's swappiness cannot be read: {error}") from error

    def unswappable(self) -> int:
        """Memory of the process that no swap can take: locked, pinned by devices, huge pages."""
        return self._status("VmLck") + self._status("VmPin") + self._status("HugetlbPages")

    def refaults(self) -> int:
        """Pages that had been swapped out and were needed again, or the process's major faults, whichever is more."""
        # After the last ")": the command's name may hold blanks. majflt is field 12 (proc_pid_stat(5)).
        fields = self._process("stat").rpartition(")")[2].split()
        return max(self.stat().get("workingset_refault_anon", 0), int(fields[9]))

    def stalled_us(self) -> int:
        """Time that something in the group waited for memory, us: the host's on v1, which has no PSI of a group."""
        own = os.path.join(self.path, "memory.pressure")
        try:
            return stalled_us(read(own if self.version == 2 else os.path.join(self._proc, "pressure", "memory")))
        except OSError as error:
            raise CgroupError(f"memory pressure cannot be read: {error}") from error

    def _process(self, name: str) -> str:
        try:
            return read(os.path.join(self._proc, str(self.pid), name))
        except OSError as error:
            raise CgroupError(f"process {self.pid} cannot be read: {error}") from error

    def _status(self, name: str) -> int:
        match = re.search(rf"^{name}:\s+(\d+) kB", self._process("status"), re.MULTILINE)
        return int(match.group(1)) * 1024 if match else 0

    # --- changes -------------------------------------------------------------------------------------------------

    def check_ours(self) -> None:
        """:raises CgroupError: the group is not, or no longer, the process's own."""
        parent = os.path.dirname(self.path)
        if not os.path.exists(os.path.join(parent, "cgroup.procs")):
            raise CgroupError(f"process {self.pid} is in the root cgroup, which is not to be limited")
        if str(self.pid) not in self._read("cgroup.procs").split():
            raise CgroupError(f"cgroup {self.path} does not hold process {self.pid}")

    def _write(self, name: str, text: str) -> None:
        self.check_ours()
        write(os.path.join(self.path, name), text)

    def why_no_reclaim(self) -> str:
        """Why memory cannot be taken from the group; empty where it can. On v1 the limit itself takes it."""
        return "" if self.version == 1 or os.path.exists(os.path.join(self.path, "memory.reclaim")) else NO_RECLAIM

    def reclaim(self, amount: int) -> int:
        """Have the kernel take memory from the group, without any limit (v2 only, kernel 5.19 and later).

        :returns: by how much the usage fell, which may be less than asked for; never negative.
        :raises CgroupError: the kernel cannot do that.
        """
        before = self.usage()
        try:
            self._write("memory.reclaim", str(amount))
        except OSError as error:
            if error.errno != errno.EAGAIN:  # EAGAIN: less than asked for, which the usage shows
                raise CgroupError(f"memory.reclaim: {error}") from error
        return max(before - self.usage(), 0)

    def set_limit(self, limit: int | None) -> bool:
        """Set or lift the hard limit. On v2 a limit below the usage could kill: it is refused here.

        :returns: False if the usage is above it and could not be brought below, so that nothing has changed.
        :raises CgroupError: it cannot be set for another reason.
        """
        self.check_ours()
        if self.version == 2 and limit is not None and limit < self.usage():
            return False
        try:
            if self.version == 2:
                self._write("memory.max", "max" if limit is None else str(limit))
            else:
                self._write("memory.limit_in_bytes", str(-1 if limit is None else limit))
        except OSError as error:
            if error.errno == errno.EBUSY:
                return False
            raise CgroupError(f"the memory limit cannot be set: {error}") from error
        return True

    def hold_at_limit(self, hold: bool) -> bool:
        """Let the process wait instead of being killed when its limit cannot be kept (v1's memory.oom_control).

        :returns: whether the kernel can do that; v2 cannot.
        :raises CgroupError: the file could not be written.
        """
        if self.version == 2 or not os.path.exists(os.path.join(self.path, "memory.oom_control")):
            return False
        try:
            self._write("memory.oom_control", "1" if hold else "0")
        except OSError as error:
            raise CgroupError(f"memory.oom_control: {error}") from error
        return True

    def holds_at_limit(self) -> bool:
        """Whether `hold_at_limit` is in force."""
        if self.version == 2 or not os.path.exists(os.path.join(self.path, "memory.oom_control")):
            return False
        return keyed(self._read("memory.oom_control")).get("oom_kill_disable") == 1

    def stands_still(self) -> bool:
        """Whether the process waits at its limit: nothing could be reclaimed, and the kernel does not try again."""
        return self.holds_at_limit() and keyed(self._read("memory.oom_control")).get("under_oom") == 1


def _swap_room(version: int, directory: str) -> int | None:
    names = ("memory.swap.max", "memory.swap.current")
    if version == 1:
        names = ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes")
    try:
        limit, used = (read(os.path.join(directory, name)).strip() for name in names)
    except OSError:
        return None  # the root group, or no swap accounting
    return None if limit == "max" or int(limit) >= _UNLIMITED_BYTES else max(int(limit) - int(used), 0)


class CpuGroup:
    """One group of the CPU controller."""

    def __init__(self, version: int, path: str) -> None:
        self.version, self.path = version, path

    def quota(self) -> float | None:
        """Quota over period, in cores; None where there is no limit."""
        if self.version == 2:
            quota, period = read(os.path.join(self.path, "cpu.max")).split()
            return None if quota == "max" else int(quota) / int(period)
        quota_us = int(read(os.path.join(self.path, "cpu.cfs_quota_us")))
        return None if quota_us < 0 else quota_us / int(read(os.path.join(self.path, "cpu.cfs_period_us")))

    def times(self) -> VcpuTimes:
        """Periods and throttling: zero where the group never had a quota."""
        stat = keyed(read(os.path.join(self.path, "cpu.stat")))
        return VcpuTimes(stat.get("nr_periods", 0), stat.get("nr_throttled", 0))

    def burst_us(self) -> int | None:
        """What of earlier periods may be used in one, us; None where the kernel has no bursts."""
        try:
            return int(read(self._burst))
        except FileNotFoundError:
            return None

    def set_burst(self, share: float) -> None:
        """Let it burst by a share of its quota: nothing without a quota, or where the kernel has no bursts.

        :raises CgroupError: it reads otherwise afterwards.
        :raises OSError: the kernel refused it.
        """
        before, quota = self.burst_us(), self.quota()
        if before is None:
            return
        wanted = 0 if quota is None else int(share * quota * self._period_us())
        if before == wanted:
            return
        write(self._burst, str(wanted))
        has = self.burst_us()
        if has != wanted:
            raise CgroupError(f"{self._burst} is {has} instead of {wanted}")

    @property
    def _burst(self) -> str:
        return os.path.join(self.path, "cpu.max.burst" if self.version == 2 else "cpu.cfs_burst_us")

    def _period_us(self) -> int:
        if self.version == 2:
            return int(read(os.path.join(self.path, "cpu.max")).split()[1])
        return int(read(os.path.join(self.path, "cpu.cfs_period_us")))


class VcpuGroup(CpuGroup):
    """The CPU group of one vCPU's thread.

    :raises CgroupError: the thread is in no CPU group.
    """

    def __init__(self, pid: int, thread: int, proc: str = "/proc") -> None:
        super().__init__(*group_directory("cpu", os.path.join(str(pid), "task", str(thread)), proc))


def vcpu_groups(pid: int, proc: str = "/proc") -> dict[int, VcpuGroup]:
    """The CPU group of each vCPU thread (QEMU names them ``CPU N/KVM`` and ``CPU N/TCG``), by vCPU number.

    :raises CgroupError: the process has ended or is in no CPU group.
    """
    found = {}
    tasks = os.path.join(proc, str(pid), "task")
    try:
        for thread in os.listdir(tasks):
            match = _VCPU_THREAD.match(_comm(os.path.join(tasks, thread)))
            if match:
                found[int(match.group(1))] = VcpuGroup(pid, int(thread), proc)
    except OSError as error:
        raise CgroupError(f"the threads of process {pid} cannot be read: {error}") from error
    return found


def _comm(thread: str) -> str:
    """The name of a thread; empty where it has ended since it was listed: QEMU's pool threads come and go."""
    try:
        return read(os.path.join(thread, "comm"))
    except (FileNotFoundError, ProcessLookupError):
        return ""


def cpu_version(mountinfo: str) -> int | None:
    """The version of the control groups that share out CPU time; None: there are none.

    :param mountinfo: the text of /proc/self/mountinfo.
    """
    hierarchies = mounts(mountinfo)
    if any(mount.version == 1 and "cpu" in mount.controllers for mount in hierarchies):
        return 1
    return 2 if any(mount.version == 2 and "cpu" in _controllers(mount) for mount in hierarchies) else None


def kernel_lacks_limits(mountinfo: str, zswap: Path = _ZSWAP) -> str:
    """Why the memory of no VM can be limited on this host; empty where it can. Reads a few directories.

    :param mountinfo: the text of /proc/self/mountinfo.
    """
    hierarchies = mounts(mountinfo)
    if any(mount.version == 1 and "memory" in mount.controllers for mount in hierarchies):
        return ""
    for mount in hierarchies:
        if mount.version == 2 and "memory" in _controllers(mount):
            # Not in the root group, where some kernels have it that others have below only.
            groups = os.path.join(glob.escape(mount.point), "*")
            some = glob.glob(os.path.join(groups, _MARKS["memory"]))  # none: it is not known
            if some and not glob.glob(os.path.join(groups, "memory.reclaim")):
                return NO_RECLAIM
            return ZSWAP if _zswaps(zswap) else ""
    return NO_MEMORY_GROUPS


def _zswaps(switch: Path) -> bool:
    try:
        return switch.read_text(encoding="ascii").strip() in ("Y", "1")
    except OSError:
        return False


def kernel_lacks_quotas(mountinfo: str) -> str:
    """Why the CPU time of no VM can be limited on this host; empty where it can. Reads a few directories.

    :param mountinfo: the text of /proc/self/mountinfo.
    """
    for mount in mounts(mountinfo):
        if mount.version == 1 and "cpu" in mount.controllers:
            return "" if os.path.exists(os.path.join(mount.point, "cpu.cfs_quota_us")) else NO_BANDWIDTH
        if mount.version == 2 and "cpu" in _controllers(mount):
            groups = os.path.join(glob.escape(mount.point), "*")
            some = glob.glob(os.path.join(groups, "cpu.weight"))  # none: it is not known
            return NO_BANDWIDTH if some and not glob.glob(os.path.join(groups, _MARKS["cpu"])) else ""
    return NO_CPU_GROUPS


def _controllers(mount: Mount) -> list[str]:
    try:
        return read(os.path.join(mount.point, "cgroup.controllers")).split()
    except OSError:
        return []


def cgroup_layout(mounts: str) -> str:
    """v1, hybrid, v2 or none, from the text of /proc/mounts (systemd's words for the layouts)."""
    kinds = {fields[2] for line in mounts.splitlines() if len(fields := line.split()) > 2}
    if "cgroup" in kinds:
        return "hybrid" if "cgroup2" in kinds else "v1"
    return "v2" if "cgroup2" in kinds else "none"
