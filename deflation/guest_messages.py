"""The bodies that pass between host, guest and application hook (docs/protocols.md).

The guest's own dataclasses use the standard library only; a test holds them to the JSON Schema of these models. What
comes from a guest is untrusted: sizes of lists and texts are limited here, and unknown fields are ignored so that a
newer guest agent can say more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

#: The only version of the guest protocol so far.
PROTOCOL: Final = 1
#: The longest line on a channel, with its newline, in bytes.
MAX_LINE: Final = 65_536

Mib = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Cpu = Annotated[int, Field(ge=0, le=4095)]
Counter = Annotated[int, Field(ge=0, lt=2**64)]
MAX_TEXT: Final = 1000
MAX_REQUEST_REASON: Final = 200
Text = Annotated[str, Field(max_length=MAX_TEXT)]
#: Words for people: cut where they are too long, since a long story is no reason to throw a promise away.
Reason = Annotated[str, BeforeValidator(lambda value: value[:MAX_TEXT] if isinstance(value, str) else value), Text]


class GuestBody(BaseModel):
    """Base of what guests say."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Hello(GuestBody):
    """Answer to ``hello``."""

    protocol: int
    nonce: Text
    agent: Text
    boot_id: Text
    capabilities: Annotated[list[Text], Field(max_length=16)]


class Cpus(GuestBody):
    """CPUs by number."""

    present: Annotated[list[Cpu], Field(max_length=4096)]
    online: Annotated[list[Cpu], Field(min_length=1, max_length=4096)]
    unpluggable: Annotated[list[Cpu], Field(max_length=4096)]


class Memory(GuestBody):
    """The guest's memory in MiB; ``floor_mib`` = total - available + reserve."""

    total_mib: Mib
    available_mib: Mib
    reserve_mib: Mib
    floor_mib: Mib
    unpluggable_mib: Mib


class Pressure(GuestBody):
    """The guest's PSI: averages over 10 s in per cent, and microseconds stalled since boot."""

    memory_some_avg10: Annotated[float, Field(ge=0, le=100)]
    memory_full_avg10: Annotated[float, Field(ge=0, le=100)]
    cpu_some_avg10: Annotated[float, Field(ge=0, le=100)]
    memory_some_total_us: Counter | None = None
    memory_full_total_us: Counter | None = None


class GuestApplication(GuestBody):
    """An application with an adapter."""

    name: Text
    resident_mib: Mib


class MemoryState(GuestBody):
    """What pressure is judged by. What is left out is not known, which is not zero."""

    boot_id: Text
    memory: Memory
    pressure: Pressure | None = None
    #: Since boot: faults that waited for a disk, and pages swapped in and out.
    major_faults: Counter | None = None
    swap_in_pages: Counter | None = None
    swap_out_pages: Counter | None = None


class GuestStatus(MemoryState):
    """Answer to ``status``. A brief one names no unpluggable CPUs and no applications."""

    uptime_s: Annotated[float, Field(ge=0)]
    cpus: Cpus
    applications: Annotated[list[GuestApplication], Field(max_length=64)] = []


class PressureNotice(MemoryState):
    """Notification ``pressure``: tasks of the guest have waited for memory."""


class RequestNotice(GuestBody):
    """Notification ``request``: somebody in the guest asks for so much more than the VM has."""

    cpu_cores: Annotated[float, Field(ge=0, le=4096, allow_inf_nan=False)] = 0.0
    memory_mib: Mib = 0.0
    reason: Annotated[str, Field(max_length=MAX_REQUEST_REASON)] = ""


Notice = PressureNotice | RequestNotice
#: Notifications by method; others are not known to this version.
NOTICES: Final[Mapping[str, type[PressureNotice] | type[RequestNotice]]] = {
    "pressure": PressureNotice,
    "request": RequestNotice,
}


class CpuFailure(GuestBody):
    """A CPU that could not be brought on or off line."""

    cpu: Cpu
    reason: Reason


class CpusSet(GuestBody):
    """Answer to ``cpus.set``, read back from the kernel."""

    online: Annotated[list[Cpu], Field(min_length=1, max_length=4096)]
    failed: Annotated[list[CpuFailure], Field(max_length=4096)] = []


class GuestAmounts(GuestBody):
    """Amounts by resource; what is left out is 0."""

    cpu_cores: Annotated[float, Field(ge=0, le=4096, allow_inf_nan=False)] = 0.0
    memory_mib: Mib = 0.0
    disk_mib_s: Mib = 0.0
    network_mib_s: Mib = 0.0


class ApplicationPromise(GuestBody):
    """Answer to ``application.deflate`` and ``application.reinflate``. ``none``: no adapter is registered."""

    request_id: Text
    state: Literal["promised", "refused", "none"]
    promised: GuestAmounts = GuestAmounts()
    expected_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    reason: Reason = ""
    retry_after_s: Annotated[float, Field(ge=0, le=86_400)] | None = None


class ApplicationRelease(GuestBody):
    """Answer to ``application.status``: measured in the application, never added to what was reclaimed."""

    request_id: Text
    state: Literal["running", "released", "failed", "unknown"]
    released: GuestAmounts = GuestAmounts()
    measured_by: Reason = ""
    reason: Reason = ""
