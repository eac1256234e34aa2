"""Not yet deflatable: when the guest agent of a VM that boots, reboots or was just lost will probably answer.

Without it no memory is taken from a guest; that it will come is a reason to wait before anyone is preempted. How long a
boot takes is learned from those that were seen. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

#: A boot of which nothing is known: an emulated guest on a busy machine takes so long, seconds.
PRIOR_S: Final = 30.0
#: Boots that are remembered of each VM, and VMs of which they are.
REMEMBERED: Final = 5
VMS_REMEMBERED: Final = 200
#: An agent that is late probably takes so much longer again, as a part of what it has taken.
LATE_SHARE: Final = 0.5
#: After so many times what was expected, and so many seconds at the least, an agent counts as one that never comes.
PATIENCE: Final = 4.0
LEAST_PATIENCE_S: Final = 300.0
#: No guest makes itself waited for by slow boots: what took longer counts as this, seconds.
LONGEST_S: Final = 300.0


class Silence(StrEnum):
    """Why a guest does not answer, as it stands in sentences after "which is"."""

    BOOTING = "booting"
    REBOOTING = "rebooting"
    LOST = "without its agent at the moment"


@dataclass(frozen=True, slots=True)
class NotYet:
    """A guest that will probably answer ``in_s`` seconds from now."""

    why: Silence
    in_s: float


class BootTimes:
    """How long the guests of one host took until their agents said hello.

    :param seen: seconds by VM, oldest first; the VM that was seen longest ago first.
    """

    def __init__(self, seen: Mapping[str, Iterable[float]] | None = None) -> None:
        self.seen = {vm: list(times)[-REMEMBERED:] for vm, times in (seen or {}).items()}

    def with_boot(self, vm: str, seconds: float) -> BootTimes:
        """The same with one boot more."""
        others = {name: times for name, times in self.seen.items() if name != vm}
        while len(others) >= VMS_REMEMBERED:
            others.pop(next(iter(others)))
        return BootTimes({**others, vm: [*self.seen.get(vm, ()), round(min(seconds, LONGEST_S), 3)]})

    def expected_s(self, vm: str) -> float:
        """How long a boot of a VM probably takes at the most: its longest lately, or that of three in four here."""
        if own := self.seen.get(vm):
            return max(own)
        everyone = sorted(seconds for times in self.seen.values() for seconds in times)
        return everyone[3 * (len(everyone) - 1) // 4] if everyone else PRIOR_S

    def left_s(self, vm: str, silent_s: float) -> float | None:
        """In how long a guest will probably answer that has been silent for so long; None: never."""
        expected_s = self.expected_s(vm)
        if silent_s < expected_s:
            return expected_s - silent_s
        given_up_s = max(LEAST_PATIENCE_S, PATIENCE * expected_s)
        return LATE_SHARE * silent_s if silent_s < given_up_s else None


class Readiness:
    """Since when one VM's guest is silent, and why."""

    def __init__(self) -> None:
        self._why = Silence.LOST
        self._since: float | None = None
        #: Whether the silence was seen from its beginning.
        self._seen = False
        self._boot_id = ""

    def booting(self, now: float, why: Silence = Silence.BOOTING) -> None:
        """Its guest begins to boot."""
        self._why, self._since, self._seen = why, now, True

    def off(self) -> None:
        """Its guest does not run: when it does, it boots."""
        self._why, self._since, self._seen = Silence.BOOTING, None, False

    def heard(self, now: float, boot_id: str) -> float | None:
        """Its agent has said hello.

        :returns: how long the boot took, if there was one and its beginning was seen.
        """
        since, seen, again = self._since, self._seen, bool(boot_id) and boot_id == self._boot_id
        self._why, self._since, self._seen, self._boot_id = Silence.LOST, None, False, boot_id
        return now - since if since is not None and seen and not again else None

    def not_yet(self, now: float, connected: bool, boots: BootTimes, vm: str) -> NotYet | None:
        """When the guest will probably answer; None: it does, or never will."""
        if connected:
            return None
        if self._since is None:
            self._since = now
        in_s = boots.left_s(vm, now - self._since)
        return NotYet(self._why, in_s) if in_s is not None else None
