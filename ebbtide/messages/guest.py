"""The bodies that pass between host, guest and application hook (docs/internals/protocols.md).

The guest's own dataclasses use the standard library only; a test holds them to the JSON Schema of these models. What
comes from a guest is untrusted: texts are cleaned and cut where a line comes in (`cleaned`), sizes of lists are limited
here, and unknown fields are ignored so that a newer guest agent can say more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ebbtide.deflation.cascade.pressure import PressureReading
from ebbtide.messages.common import cleaned_text

#: The only version of the guest protocol so far.
PROTOCOL: Final = 1
#: The longest line on a channel, with its newline, in bytes.
MAX_LINE: Final = 65_536

Mib = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Cpu = Annotated[int, Field(ge=0, le=4095)]
#: CPUs on line, each once: they are counted.
Online = Annotated[list[Cpu], Field(min_length=1, max_length=4096), AfterValidator(lambda cpus: sorted(set(cpus)))]
Counter = Annotated[int, Field(ge=0, lt=2**64)]
MAX_TEXT: Final = 1000
#: Calls of hooks that one answer tells of.
MOST_HOOK_CALLS: Final = 32
MAX_REQUEST_REASON: Final = 200
Text = Annotated[str, Field(max_length=MAX_TEXT)]


def cleaned(value: Any) -> Any:
    """A parsed line of a guest with texts that can be stored, sent and shown: `cleaned_text` of each, keys included.

    :raises RecursionError: it is nested too deeply.
    """
    if isinstance(value, str):
        return cleaned_text(value, MAX_TEXT)
    if isinstance(value, list):
        return [cleaned(part) for part in value]
    if isinstance(value, dict):
        return {cleaned_text(key, MAX_TEXT): cleaned(part) for key, part in value.items()}
    return value


class GuestBody(BaseModel):
    """Base of what guests say."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Hello(GuestBody):
    """Answer to ``hello``."""

    protocol: int
    nonce: Text
    agent: Text
    boot_id: Text
    capabilities: Annotated[list[Text], Field(max_length=16)] = []


class Cpus(GuestBody):
    """CPUs by number."""

    present: Annotated[list[Cpu], Field(max_length=4096)]
    online: Online
    unpluggable: Annotated[list[Cpu], Field(max_length=4096)]


class Memory(GuestBody):
    """The guest's memory in MiB; ``floor_mib`` = total - available + reserve."""

    total_mib: Mib
    available_mib: Mib
    reserve_mib: Mib
    floor_mib: Mib
    unpluggable_mib: Mib
    #: MemFree; None: a guest agent that does not say.
    free_mib: Mib | None = None


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

    def pressure_reading(self) -> PressureReading:
        """The figures that pressure is judged by."""
        psi = self.pressure
        return PressureReading(
            boot_id=self.boot_id,
            available_mib=self.memory.available_mib,
            reserve_mib=self.memory.reserve_mib,
            some_percent=psi.memory_some_avg10 if psi else None,
            full_percent=psi.memory_full_avg10 if psi else None,
            some_total_us=psi.memory_some_total_us if psi else None,
            full_total_us=psi.memory_full_total_us if psi else None,
            major_faults=self.major_faults,
            swap_in_pages=self.swap_in_pages,
        )


class GuestStatus(MemoryState):
    """Answer to ``status``. A brief one names no unpluggable CPUs and no applications."""

    uptime_s: Annotated[float, Field(ge=0)]
    cpus: Cpus
    applications: Annotated[list[GuestApplication], Field(max_length=64)] = []
    #: Why the guest makes no cold pages free, empty where it does; None: a guest agent that does not know how to.
    cold_blocked: Text | None = None
    #: The request id of the notice of preemption that it has; empty: none, or an agent that does not say.
    notice: Text = ""


class PressureNotice(MemoryState):
    """Notification ``pressure``: tasks of the guest have waited for memory."""


class RequestNotice(GuestBody):
    """Notification ``request``: a program in the guest asks for so much more than the VM has."""

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
    reason: Text


class CpusSet(GuestBody):
    """Answer to ``cpus.set``, read back from the kernel."""

    online: Online
    failed: Annotated[list[CpuFailure], Field(max_length=4096)] = []


class ColdFreed(GuestBody):
    """Answer to ``cold.reclaim`` and ``cold.stop``: what became free, and whether there is no more to be had now."""

    freed_mib: Mib
    done: bool
    reason: Text = ""


class PreemptionTold(GuestBody):
    """Answer to ``preemption``: programs that were started for it, and those that run still."""

    programs: Annotated[int, Field(ge=0, le=1000)]
    running: Annotated[int, Field(ge=0, le=1000)]


class PreemptionWithdrawn(GuestBody):
    """Answer to ``preemption.withdrawn``: whether the guest had had that notice."""

    known: bool


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
    reason: Text = ""
    retry_after_s: Annotated[float, Field(ge=0, le=86_400)] | None = None


class ApplicationRelease(GuestBody):
    """Answer to ``application.status``: measured in the application, never added to what was reclaimed."""

    request_id: Text
    state: Literal["running", "released", "failed", "unknown"]
    released: GuestAmounts = GuestAmounts()
    measured_by: Text = ""
    reason: Text = ""


class HookCall(GuestBody):
    """One call of an application's hook, in a `GuestTrace`. ``at_s`` counts from when the guest had the request."""

    hook: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    call: Literal["capabilities", "target", "progress", "preemption"]
    at_s: Annotated[float, Field(ge=0, le=86_400)]
    seconds: Annotated[float, Field(ge=0, le=86_400)]
    #: Of HTTP; 0: there was no answer; None: there is none yet.
    status: Annotated[int, Field(ge=0, le=999)] | None = None


class GuestTrace(GuestBody):
    """Beside an answer to a request with a ``traceparent``: how long the guest took, and which hooks it called."""

    seconds: Annotated[float, Field(ge=0, le=86_400)]
    hooks: Annotated[list[HookCall], Field(max_length=MOST_HOOK_CALLS)] = []
