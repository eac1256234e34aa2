"""Made-up hosts with 20 VMs each: as arrays for the index, and as the bodies that their agents would send.

Four kinds of hosts, of which one declares no disk; VMs of common sizes, two of three deflatable down to a quarter and
deflated to some degree. Every host with all that it has free and deflatable is another point, as in a real cluster.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.history import HostUsage, VMUsage
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.vms import VMState, VMStatus

Matrix = NDArray[np.float64]

VMS: Final = 20
OVERHEAD_MIB: Final = 64.0
#: Cores, MiB, disk and network in MiB/s.
_HOSTS: Final = np.array(
    [[64, 262144, 4000, 3000], [96, 393216, 4000, 6000], [128, 524288, 8000, 6000], [48, 786432, 0, 3000]],
    dtype=np.float64,
)
_CORES: Final = np.array([1, 2, 4, 8], dtype=np.float64)
_MIB_PER_CORE: Final = np.array([1024, 2048, 4096, 8192], dtype=np.float64)
_DISK: Final = np.array([0, 50, 100, 200], dtype=np.float64)
_NETWORK: Final = np.array([10, 50, 100], dtype=np.float64)
#: What a deflatable VM keeps of its nominal size.
_MINIMUM: Final = 0.25


class Fleet:
    """So many hosts. ``availability``: free + deflatable, shape (n, 4), less a VM's overhead."""

    def __init__(self, count: int, generator: np.random.Generator) -> None:
        self.capacity: Matrix = _HOSTS[generator.integers(0, len(_HOSTS), count)]
        cores = generator.choice(_CORES, (count, VMS))
        nominal = np.stack(
            [
                cores,
                cores * generator.choice(_MIB_PER_CORE, (count, VMS)),
                generator.choice(_DISK, (count, VMS)),
                generator.choice(_NETWORK, (count, VMS)),
            ],
            axis=-1,
        )
        low = generator.random((count, VMS, 1)) < 2 / 3
        deflated = np.where(low, generator.random((count, VMS, 1)) * (1 - _MINIMUM), 0.0)
        current = nominal * (1 - deflated)
        # What does not fit is not there: every host's VMs are as many as its capacity holds.
        held = np.cumsum(current, axis=1)
        fits = ((held <= self.capacity[:, None, :]) | (self.capacity[:, None, :] == 0)).all(axis=-1, keepdims=True)
        current = np.where(fits, current, 0.0)
        free = np.maximum(self.capacity - current.sum(axis=1), 0.0)
        deflatable = np.where(low, np.maximum(current - nominal * _MINIMUM, 0.0), 0.0).sum(axis=1)
        self.availability: Matrix = np.round(free + deflatable, 2)
        self.availability[:, 1] = np.maximum(self.availability[:, 1] - OVERHEAD_MIB * (VMS + 1), 0.0)


def demand(generator: np.random.Generator) -> ResourceVector:
    """A VM as a user would ask for it."""
    cores = float(generator.choice(_CORES)) * 2
    mib = cores * float(generator.choice(_MIB_PER_CORE))
    return ResourceVector(cores, mib, float(generator.choice(_DISK)), float(generator.choice(_NETWORK)))


#: Stands in a template for the host's own address.
ADDRESS: Final = b"192.0.2.1"


def address_of(number: int) -> str:
    """Each host has its own, all of loopback."""
    return f"127.1.{number >> 8}.{number & 255}"


def number_of(address: str) -> int | None:
    """The host that has an address; None where that is no host's."""
    first, second, high, low = (int(part) for part in address.split("."))
    return high * 256 + low if (first, second) == (127, 1) else None


def host_name(number: int) -> str:
    return f"host-{number:06d}"


#: What stands for a host's own number in a body of `report_template`.
NUMBER: Final = b"987654"


def report_template(port: int, deflated: float) -> bytes:
    """The body of a host's report, with ``NUMBER`` for its number; its first VMs are deflated by this share."""
    host = host_name(int(NUMBER))
    size = ResourceVector(4, 8192, 100, 50)

    def vm(number: int) -> VMStatus:
        return VMStatus(
            name=f"vm-{NUMBER.decode()}-{number}",
            host=host,
            domain=f"ebb-{host}.vm-{number}",
            state=VMState.RUNNING,
            priority=Priority.DEFLATABLE if number % 3 else Priority.FIXED,
            nominal=Vector.of(size),
            minimum=Vector.of(size if number % 3 == 0 else size * _MINIMUM),
            current=Vector.of(size * (1 - deflated) if number in (1, 2) else size),
            overhead_mib=OVERHEAD_MIB,
            generation=3,
            guest_connected=True,
            boot_memory_mib=1024.0,
            throttled_share=0.125 if deflated else 0.25,
        )

    report = HostReport(
        id=host,
        url=f"http://{ADDRESS.decode()}:{port}",
        incarnation="0123456789abcdef",
        capacity=Vector.of(ResourceVector(128, 524288, 8000, 6000)),
        free=Vector.of(ResourceVector(48 + 8 * deflated, 358000 + 16384 * deflated, 6000, 5000)),
        deflatable=Vector.of(ResourceVector(39, 79872, 1000, 500)),
        vm_overhead_mib=OVERHEAD_MIB,
        accelerator="kvm",
        vms=tuple(vm(number) for number in range(VMS)),
    )
    return report.model_dump_json().encode()


def usage_template() -> bytes:
    """The body of what a host's VMs use, with ``NUMBER`` for its number."""
    vms = tuple(
        VMUsage(
            name=f"vm-{NUMBER.decode()}-{number}",
            resident_memory_mib=6000.0 + number,
            cpu_pressure_percent=1.25,
            memory_pressure_percent=0.5,
            guest_cpu_cores=0.0,
            guest_memory_mib=1024.0 if number == 1 else 0.0,
            application_cpu_cores=0.0,
            application_memory_mib=512.0 if number == 1 else 0.0,
        )
        for number in range(VMS)
    )
    return HostUsage(vms=vms).model_dump_json().encode()
