"""Bodies of the guest channel, protocol version 1. A vector maps component names (`memory_mib`, ...) to amounts."""

from __future__ import annotations

from dataclasses import dataclass

PROTOCOL = 1


@dataclass
class HelloParams:
    """`hello`: a new conversation begins."""

    protocol: int
    nonce: str
    vm: str
    token: str


@dataclass
class HelloResult:
    """Answer to `hello`; the nonce is the host's own."""

    protocol: int
    nonce: str
    agent: str
    boot_id: str
    capabilities: list[str]


@dataclass
class CpuStatus:
    """CPU numbers; `unpluggable` in the order in which they should be taken."""

    present: list[int]
    online: list[int]
    unpluggable: list[int]


@dataclass
class MemoryStatus:
    """MiB. `floor_mib` = total - available + reserve: what the guest needs now. `free_mib` is MemFree."""

    total_mib: float
    available_mib: float
    reserve_mib: float
    floor_mib: float
    unpluggable_mib: float
    free_mib: float


@dataclass
class Pressure:
    """Pressure stall information: per cent of the last 10 s, and microseconds since boot."""

    memory_some_avg10: float
    memory_full_avg10: float
    cpu_some_avg10: float
    memory_some_total_us: int
    memory_full_total_us: int


@dataclass
class Paging:
    """Counters since boot: faults that waited for a disk, and pages swapped, None where the kernel has no swap."""

    major_faults: int
    swap_in_pages: int | None
    swap_out_pages: int | None


@dataclass
class ApplicationSize:
    """Resident size of an application, as its adapter measured it."""

    name: str
    resident_mib: float


@dataclass
class StatusResult:
    """Answer to `status`; `pressure` is null where the kernel has no pressure stall information.

    A brief one leaves `cpus.unpluggable` and `applications` empty. `cold_blocked`: why no cold pages are made free;
    empty where they are. `notice`: the request id of the notice of preemption that this guest has; empty: none.
    """

    boot_id: str
    uptime_s: float
    cpus: CpuStatus
    memory: MemoryStatus
    pressure: Pressure | None
    major_faults: int
    swap_in_pages: int | None
    swap_out_pages: int | None
    applications: list[ApplicationSize]
    cold_blocked: str
    notice: str


@dataclass
class PressureNotice:
    """Notification `pressure`: tasks wait for memory. The fields are those of `status`."""

    boot_id: str
    memory: MemoryStatus
    pressure: Pressure | None
    major_faults: int
    swap_in_pages: int | None
    swap_out_pages: int | None


@dataclass
class RequestNotice:
    """Notification `request`: amounts that are asked for beyond what the VM has."""

    cpu_cores: float
    memory_mib: float
    reason: str


@dataclass
class CpusSetParams:
    """`cpus.set`: the CPUs that are to be on line, all others off."""

    online: list[int]


@dataclass
class ColdReclaimParams:
    """`cold.reclaim`: make so much of the coldest memory free, within this time."""

    memory_mib: float
    deadline_s: float


@dataclass
class ColdFreedResult:
    """Answer to `cold.reclaim` and `cold.stop`: what became free since; `done`: there is no more to be had now."""

    freed_mib: float
    done: bool
    reason: str


@dataclass
class CpuFailure:
    """A CPU that stayed as it was."""

    cpu: int
    reason: str


@dataclass
class CpusSetResult:
    """What the kernel says after `cpus.set`."""

    online: list[int]
    failed: list[CpuFailure]


@dataclass
class SizeRange:
    """Sizes of one component that an application can have, in its unit."""

    current: float
    minimum: float
    maximum: float
    step: float


@dataclass
class AdapterCapabilities:
    """What an application's hook offers; `name` is that of the drop-in file."""

    name: str
    version: str
    resources: dict[str, SizeRange]
    expected_s: float
    reversible: bool
    modes: list[str]


@dataclass
class ApplicationCapabilitiesResult:
    """Answer to `application.capabilities`; hooks that do not answer are left out."""

    adapters: list[AdapterCapabilities]


@dataclass
class DeflateParams:
    """`application.deflate`: `target` is the size that the VM will have, `bound_mib` what it may hold now, and
    `full_cores` its cores at full size; 0: the host does not say."""

    request_id: str
    deadline_s: float
    mode: str
    target: dict[str, float]
    bound_mib: float
    full_cores: float


@dataclass
class DeflateResult:
    """`state`: promised, refused, or none where no adapter is registered. `promised` holds amounts."""

    request_id: str
    state: str
    promised: dict[str, float]
    expected_s: float
    reason: str
    retry_after_s: float | None


@dataclass
class ApplicationStatusResult:
    """`state`: running, released, failed or unknown. `released` holds measured amounts."""

    request_id: str
    state: str
    released: dict[str, float]
    measured_by: str
    reason: str


@dataclass
class ReinflateParams:
    """`application.reinflate`: as `application.deflate`, in the other direction. `full`: the target has all of the
    VM's memory."""

    request_id: str
    deadline_s: float
    target: dict[str, float]
    bound_mib: float
    full_cores: float
    full: bool = False


@dataclass
class ReinflateResult:
    """`state`: promised, refused or none."""

    request_id: str
    state: str
    reason: str


@dataclass
class PreemptionParams:
    """`preemption`: the VM goes in so many seconds; `kind` is what becomes of it (`stop`, `suspend`, `delete`)."""

    request_id: str
    seconds_left: float
    kind: str
    reason: str


@dataclass
class PreemptionResult:
    """Drop-in programs that were started for this notice, and those that run still."""

    programs: int
    running: int


@dataclass
class WithdrawalParams:
    """`preemption.withdrawn`: the VM of that notice stays, or is back where it was."""

    request_id: str
    reason: str


@dataclass
class WithdrawalResult:
    """Whether this guest had had that notice."""

    known: bool


@dataclass
class HookCall:
    """One call of a hook, in a `CallTrace`; `at_s` after the request came. `status` of HTTP, 0: none, null: not yet."""

    hook: str
    call: str
    at_s: float
    seconds: float
    status: int | None


@dataclass
class CallTrace:
    """`trace` beside the result of a request that has a `traceparent`: how long it took, and the hooks called."""

    seconds: float
    hooks: list[HookCall]
