"""Samples: what a host's report and its agent's look at its VMs come to as one row each. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster_manager.history.packs import AT, HOST, MAXIMA, SEEN, WIDTH
from ebbtide.messages.history import HostUsage
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.vms import VMState

NAN: Final = math.nan
#: A VM's figures of an agent's look: resident, pressure of CPU and memory, what the guest and the application hold.
Used = tuple[float, float, float, float, float, float, float]
UNKNOWN: Final[Used] = (NAN,) * 7
Sample = NDArray[np.float64]

#: Of the columns, those that a VM has: the others are its host's.
_OF_VM: Final = AT["capacity_cpu_cores"]
_HIGHEST: Final = [number for name, number in AT.items() if name.endswith("_percent")]
_RESIDENT: Final = AT["resident_memory_mib"]
_SUMS: Final = [number for number in range(_OF_VM) if number not in _HIGHEST]


def used_by(usage: HostUsage) -> dict[str, Used]:
    """An agent's look, by VM."""
    return {
        vm.name: (
            _known(vm.resident_memory_mib),
            _known(vm.cpu_pressure_percent),
            _known(vm.memory_pressure_percent),
            _known(vm.guest_cpu_cores),
            _known(vm.guest_memory_mib),
            _known(vm.application_cpu_cores),
            _known(vm.application_memory_mib),
        )
        for vm in usage.vms
    }


def sample_of(
    report: HostReport, used: Mapping[str, Used], own: Collection[str] | None = None
) -> tuple[tuple[str, ...], Sample]:
    """The names (`HOST` first), and a row for each, without `SEEN`.

    A VM that is off holds nothing: it has no row.

    :param own: the VMs that are this host's by the manager's record; None: whatever it reports.
    """
    names, rows = [HOST], []
    for vm in report.vms:
        if vm.state is VMState.STOPPED or (own is not None and vm.name not in own):
            continue
        nominal, minimum, bound = vm.nominal, vm.minimum, vm.current
        resident, cpu, memory, guest_cores, guest_mib, application_cores, application_mib = used.get(vm.name, UNKNOWN)
        cores = _layers(nominal.cpu_cores - bound.cpu_cores, guest_cores, application_cores)
        mib = _layers(nominal.memory_mib - bound.memory_mib, guest_mib, application_mib)
        names.append(vm.name)
        rows.append(
            (
                nominal.cpu_cores, nominal.memory_mib, minimum.cpu_cores, minimum.memory_mib,
                bound.cpu_cores, bound.memory_mib, resident, cores[0], mib[0], cores[1], mib[1], cores[2], mib[2],
                cpu, cpu, memory, memory, 100.0 if vm.pressure else 0.0,
            )
        )  # fmt: skip
    sample = np.full((len(names), WIDTH), NAN)
    if rows:
        sample[1:, :_OF_VM] = rows
        vms = sample[1:]
        # Of what is not known of one there is no sum, but for what is resident.
        sample[0, _SUMS] = vms[:, _SUMS].sum(axis=0)
        some = vms[np.isfinite(vms[:, _RESIDENT]), _RESIDENT]
        sample[0, _RESIDENT] = some.sum() if some.size else NAN
        sample[0, _HIGHEST] = np.fmax.reduce(vms[:, _HIGHEST], axis=0)
    else:
        sample[0, _SUMS] = 0.0
        sample[0, _HIGHEST] = 0.0
    capacity, free = report.capacity, report.free
    host = (capacity.cpu_cores, capacity.memory_mib, free.cpu_cores, free.memory_mib, float(len(rows)))
    sample[0, _OF_VM:SEEN] = host
    return tuple(names), sample


class Step:
    """One step while it is under way: samples are added until it is over."""

    __slots__ = ("_largest", "_seen_s", "_sums", "_weights", "names", "start")

    def __init__(self, start: int, names: tuple[str, ...]) -> None:
        shape = (len(names), WIDTH)
        self.start = start
        self.names = names
        self._sums = np.zeros(shape)
        self._weights = np.zeros(shape)
        self._largest = np.full((len(names), len(MAXIMA)), NAN)
        self._seen_s = 0.0

    def add(self, sample: Sample, seconds: float) -> None:
        """A sample that stands for so many seconds."""
        known = np.isfinite(sample)
        self._sums += np.where(known, sample, 0.0) * seconds
        self._weights += known * seconds
        self._largest = np.fmax(self._largest, sample[:, MAXIMA])
        self._seen_s += seconds

    def rows(self) -> NDArray[np.float32]:
        """What it came to, shape (names, WIDTH)."""
        with np.errstate(invalid="ignore"):
            rows = (self._sums / self._weights).astype(np.float32)
        rows[:, MAXIMA] = self._largest
        rows[:, SEEN] = self._seen_s
        return rows


def _layers(missing: float, guest: float, application: float) -> tuple[float, float, float]:
    """What application, guest and hypervisor hold of what a VM lacks; the latter two add up to it."""
    if missing <= 0.0:
        return 0.0, 0.0, 0.0
    if guest != guest:
        return NAN, NAN, NAN
    guest = min(guest, missing)
    return min(application, guest) if application == application else NAN, guest, missing - guest


def _known(figure: float | None) -> float:
    return NAN if figure is None else figure
