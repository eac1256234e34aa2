"""What the lanes of a cascade share: the operation, its accounts, and the latest reading of each lane.

Memory is one lane; CPU with the bandwidths, which are limited together with it, is the other. Each has one instruction
under way at most. A reading counts for a lane only where nothing of that lane was under way while it was taken: of a
size that moves it tells neither what there was nor what there will be.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.instructions import GuestReading, Measured
from ebbtide.deflation.cascade.mechanisms import LAYER_OF, Mechanism, Mechanisms
from ebbtide.deflation.ledger import Layer, LayerAccount
from ebbtide.deflation.resources import TOLERANCE, ResourceVector

#: By which share of the deadline a layer must have ended; time that a layer leaves over passes to the next.
LAYER_ENDS: Final[Mapping[Layer, float]] = {
    Layer.APPLICATION: 0.5,
    Layer.COLD: 0.6,
    Layer.GUEST: 0.8,
    Layer.HYPERVISOR: 1.0,
}


class Lane(StrEnum):
    """What goes its own way through the layers."""

    #: The application's release, for all resources.
    APPLICATION = "application"
    #: The guest's cold pages, ahead of the lane of memory.
    COLD = "cold"
    #: CPU, and the bandwidths with it.
    CPU = "cpu"
    MEMORY = "memory"


RESOURCES_OF: Final[Mapping[Lane, tuple[str, ...]]] = {
    Lane.CPU: ("cpu_cores", "disk_mib_s", "network_mib_s"),
    Lane.MEMORY: ("memory_mib",),
}
#: What of a bound a lane changes.
_FIELDS_OF: Final[Mapping[Lane, tuple[str, ...]]] = {
    Lane.CPU: ("cpus_online", "quota_per_cpu", "cap_cores", "vcpus", "disk_mib_s", "network_mib_s"),
    Lane.MEMORY: ("balloon_mib", "plugged_mib", "dimms_mib", "fixed_mib", "limit_mib"),
}


@dataclass(slots=True)
class Job:
    """One deflation of one VM, as its lanes see it."""

    before: Bound
    target: ResourceVector
    deadline_s: float
    mechanisms: Mechanisms
    #: What is known of the bound: of each lane's part, the latest reading that counts for it.
    bound: Bound
    started: float = 0.0
    accounts: dict[Layer, LayerAccount] = field(default_factory=lambda: {layer: LayerAccount() for layer in Layer})

    @property
    def need(self) -> ResourceVector:
        """What is still missing."""
        return self.bound.size.less(self.target)

    def time_left(self, layer: Layer, now: float) -> float:
        """Until a layer must have ended, in seconds."""
        return self.started + self.deadline_s * LAYER_ENDS[layer] - now

    def usable(self, mechanism: Mechanism, need: float) -> bool:
        """Whether something is needed that this can give; says why if it could, but is blocked."""
        if need <= TOLERANCE:
            return False
        if self.mechanisms.has(mechanism):
            return True
        self.accounts[LAYER_OF[mechanism]].say(self.mechanisms.reason(mechanism))
        return False

    def read(self, bound: Bound, lanes: Collection[Lane]) -> None:
        """Take over what a reading says of these lanes."""
        fields = [name for lane in lanes for name in _FIELDS_OF.get(lane, ())]
        self.bound = replace(self.bound, **{name: getattr(bound, name) for name in fields})


class ResourceLane:
    """A lane that goes from the guest's layer to the hypervisor's."""

    lane: Lane

    def __init__(self, job: Job) -> None:
        self.job = job
        #: The layer that is at work; None: not begun, or done.
        self.layer: Layer | None = None
        self.done = False
        #: The latest reading of the guest for this lane; None: unknown, so nothing is taken by it.
        self.guest: GuestReading | None = None
        #: Whether the latest attempt to read the bound failed: then no step can be reckoned from it.
        self.blind = False
        #: Whether that is what has just been answered: what was read before tells nothing of what can be taken now.
        self.just_read = False

    def see(self, event: Measured) -> None:
        """Take in a reading of which this lane's part counts. The bound is taken over by the job."""
        self.guest, self.blind, self.just_read = event.guest, event.bound is None, True

    def hear(self, reason: str) -> None:
        """Why an instruction did less than it should, for the layer that gave it."""
        self._account.say(reason)

    @property
    def _account(self) -> LayerAccount:
        assert self.layer is not None
        return self.job.accounts[self.layer]

    def _enter(self, layer: Layer, now: float, asked: ResourceVector | None = None) -> LayerAccount:
        """Go on to a layer, which is asked for what is missing now unless something else is said."""
        self._leave(now)
        self.layer = layer
        self._account.enter(RESOURCES_OF[self.lane], self.job.need if asked is None else asked, now)
        return self._account

    def _enter_the_guest(self, now: float, asked: ResourceVector | None = None) -> bool:
        """Go on to the guest's layer. False: it can give nothing, and says why."""
        account = self._enter(Layer.GUEST, now, asked)
        why = self.job.mechanisms.why_not(Layer.GUEST)
        if not why and self.job.time_left(Layer.GUEST, now) <= 0:
            why = "no time: the deadline leaves this layer none"
        account.say(why)
        return not why

    def _leave(self, now: float) -> None:
        if self.layer is not None:
            self._account.leave(RESOURCES_OF[self.lane], now)
        self.layer = None

    def _end(self, now: float) -> None:
        self._leave(now)
        self.done = True

    @property
    def _knows_all(self) -> bool:
        """Whether guest and bound have just been read."""
        return self.just_read and self.guest is not None and not self.blind

    def _why_nothing_of_the_guest(self, now: float) -> str:
        """Why no step can be reckoned in the guest's layer; empty: it can."""
        if self.guest is None:
            return "no fresh reading of the guest, so nothing is unplugged"
        if self.blind:
            return "the size of the VM could not be read, so nothing is unplugged"
        return "stopped at its share of the deadline" if self.job.time_left(Layer.GUEST, now) <= 0 else ""
