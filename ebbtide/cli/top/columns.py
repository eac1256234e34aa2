"""Columns of the tables of hosts and VMs: what stands in each, by what it is sorted, how wide it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from ebbtide.cli.top.drawing import Line, Style, bar, figure, fitted, joined, pair
from ebbtide.messages.hosts import HostStatus
from ebbtide.messages.vms import ClusterVM

Row = TypeVar("Row")

MIB_PER_GIB: Final = 1024.0
#: States of VMs that hold nothing.
_OFF: Final = ("placing", "stopped", "preempted")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column.

    :param value: by what it is sorted.
    :param cell: the text, or the pieces, of so many columns.
    :param least: how wide it is at least.
    :param grows: its share of what the others leave.
    :param from_width: of the terminal, from which on it is shown.
    :param largest_first: whether sorting begins with the largest value.
    """

    title: str
    value: Callable[[Row], Any]
    cell: Callable[[Row, int], str | Line]
    least: int
    grows: int = 0
    from_width: int = 0
    largest_first: bool = False
    right: bool = False

    def line(self, row: Row, width: int, style: Style) -> Line:
        """Exactly so wide."""
        cell = self.cell(row, width)
        return [(fitted(cell, width, self.right), style)] if isinstance(cell, str) else cell


def widths(columns: Sequence[Column[Any]], width: int) -> list[tuple[Column[Any], int]]:
    """The columns that are shown and how wide each is, a space between two."""
    there = [column for column in columns if column.from_width <= width]
    spare = max(width - sum(column.least for column in there) - len(there) + 1, 0)
    shares = sum(column.grows for column in there) or 1
    return [(column, column.least + spare * column.grows // shares) for column in there]


def table_line(shown: Sequence[tuple[Column[Any], int]], row: Any, style: Style) -> Line:
    """A row of a table."""
    found: Line = []
    for column, width in shown:
        if found:
            found.append((" ", style))
        found += column.line(row, width, style)
    if style == "selected":
        # Also its bars, or one would not see which it is.
        found = [(text, "selected") for text, _ in found]
    return joined(found)


def is_off(vm: ClusterVM) -> bool:
    """Whether it holds nothing; one that failed may be there still. The dashboard has the same rule (state.js)."""
    return vm.state in _OFF or (vm.state == "failed" and vm.current.memory_mib == 0)


def taken(vm: ClusterVM, name: str) -> float:
    """What it lacks of nominal; 0 where it is off."""
    lacks: float = getattr(vm.nominal, name) - getattr(vm.current, name)
    return 0.0 if is_off(vm) else max(lacks, 0.0)


def taken_share(vm: ClusterVM) -> float:
    """The largest share of a nominal component that it lacks."""
    names = ("cpu_cores", "memory_mib")
    return max(taken(vm, name) / nominal if (nominal := getattr(vm.nominal, name)) > 0 else 0.0 for name in names)


def held(host: HostStatus, name: str) -> float:
    """What of a host is not free."""
    holds: float = getattr(host.capacity, name) - getattr(host.free, name)
    return max(holds, 0.0)


def held_share(host: HostStatus, name: str) -> float:
    capacity: float = getattr(host.capacity, name)
    return held(host, name) / capacity if capacity > 0 else 0.0


def host_bar(name: str) -> Callable[[HostStatus, int], Line]:
    """``#`` held, ``=`` held and deflatable, empty free."""

    def cell(host: HostStatus, width: int) -> Line:
        holds = held(host, name)
        deflatable = min(getattr(host.deflatable, name), holds)
        parts: list[tuple[float, str, Style]] = [(holds - deflatable, "#", "held"), (deflatable, "=", "deflatable")]
        return bar(width, getattr(host.capacity, name), parts)

    return cell


def vm_bar(name: str) -> Callable[[ClusterVM, int], Line]:
    """``#`` held, ``-`` taken of nominal, ``|`` the minimum."""

    def cell(vm: ClusterVM, width: int) -> Line:
        most = getattr(vm.ceiling or vm.nominal, name)
        current = 0.0 if is_off(vm) else getattr(vm.current, name)
        parts: list[tuple[float, str, Style]] = [(current, "#", "held"), (taken(vm, name), "-", "taken")]
        return bar(width, most, parts, getattr(vm.minimum, name))

    return cell


def _host_memory(host: HostStatus, width: int) -> str:
    return pair(held(host, "memory_mib") / MIB_PER_GIB, host.capacity.memory_mib / MIB_PER_GIB)


def _vm_memory(vm: ClusterVM, width: int) -> str:
    return "-" if is_off(vm) else pair(vm.current.memory_mib / MIB_PER_GIB, vm.nominal.memory_mib / MIB_PER_GIB)


def _vm_cores(vm: ClusterVM, width: int) -> str:
    return "-" if is_off(vm) else pair(vm.current.cpu_cores, vm.nominal.cpu_cores)


def _host_state(host: HostStatus, width: int) -> str:
    return host.state if host.mode == "active" or host.state != "ready" else host.mode


HOSTS: Final[tuple[Column[HostStatus], ...]] = (
    Column("host", lambda host: host.id, lambda host, _: host.id, 12, 3),
    Column("state", lambda host: host.state == "ready", _host_state, 11),
    Column("VMs", lambda host: len(host.vms), lambda host, _: str(len(host.vms)), 4, largest_first=True, right=True),
    Column("CPU", lambda host: held_share(host, "cpu_cores"), host_bar("cpu_cores"), 11, 4, largest_first=True),
    Column(
        "cores",
        lambda host: held(host, "cpu_cores"),
        lambda host, _: pair(held(host, "cpu_cores"), host.capacity.cpu_cores),
        10,
        largest_first=True,
        right=True,
    ),
    Column("memory", lambda host: held_share(host, "memory_mib"), host_bar("memory_mib"), 11, 4, largest_first=True),
    Column("GiB", lambda host: held(host, "memory_mib"), _host_memory, 11, largest_first=True, right=True),
    Column(
        "deflatable",
        lambda host: host.deflatable.cpu_cores,
        lambda host, _: (
            f"{figure(host.deflatable.cpu_cores)} cores {figure(host.deflatable.memory_mib / MIB_PER_GIB)} GiB"
        ),
        20,
        from_width=110,
        largest_first=True,
        right=True,
    ),
    Column(
        "why",
        lambda host: host.state_reason or host.mode_reason,
        lambda host, _: host.state_reason or host.mode_reason,
        10,
        3,
        from_width=140,
    ),
)
VMS: Final[tuple[Column[ClusterVM], ...]] = (
    Column("VM", lambda vm: vm.name, lambda vm, _: vm.name, 12, 3),
    Column("host", lambda vm: vm.host or "", lambda vm, _: vm.host or "-", 10, 1),
    Column("state", lambda vm: vm.state, lambda vm, _: vm.state, 9),
    Column("CPU", taken_share, vm_bar("cpu_cores"), 11, 4, largest_first=True),
    Column("cores", lambda vm: vm.current.cpu_cores, _vm_cores, 9, largest_first=True, right=True),
    Column("memory", lambda vm: taken(vm, "memory_mib"), vm_bar("memory_mib"), 11, 4, largest_first=True),
    Column("GiB", lambda vm: vm.current.memory_mib, _vm_memory, 9, largest_first=True, right=True),
    Column("sold as", lambda vm: vm.priority, lambda vm, _: vm.priority, 10, from_width=100),
    Column(
        "guest",
        lambda vm: vm.guest_connected,
        lambda vm, _: "connected" if vm.guest_connected else "-",
        9,
        from_width=120,
    ),
    Column("what happened last", lambda vm: vm.sentence, lambda vm, _: vm.sentence, 18, 8, from_width=140),
)
