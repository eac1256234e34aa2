"""Suspension of a VM: whether there is room and time to save its memory to disk, and how fast that disk is. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from ebbtide.deflation import kernels

#: What a save file holds beside the guest's memory (devices, definition), and what stays free on its disk, MiB.
BESIDES_MIB: Final = 64.0
MARGIN_MIB: Final = 256.0
#: How fast a disk takes memory where that was never seen, MiB/s: slow ones do better.
PRIOR_MIB_S: Final = kernels.SAVING_MIB_S
#: A start may take longer by what reading saved memory takes at this rate, MiB/s.
RESTORE_MIB_S: Final = 16.0
#: A save may take so much longer than the disk has taken so far.
CARE: Final = 1.5
#: Of a notice, what saving may take at the most, and what a power-off gets; the rest is for the guest's programs. A
#: power-off that follows a save which was not ready has what saving leaves of its share.
SAVING_SHARE: Final = 2 / 3
POWER_OFF_SHARE: Final = 1 / 3
#: How much the last save counts in the rate, and how small one says nothing about the disk, MiB.
WEIGHT: Final = 0.5
LEAST_MIB: Final = 32.0
#: For so long the disk counts as no faster than a save that was not ready in time has shown, seconds: other work, which
#: may have held it up, has ended by then.
BELIEVED_S: Final = 3600.0


def saving_s(state_mib: float, rate_mib_s: float) -> float:
    """How long a save is given, seconds.

    :param rate_mib_s: what the disk took lately.
    """
    return CARE * (state_mib + BESIDES_MIB) / rate_mib_s


def why_not_saved(state_mib: float, free_mib: float | None, notice_s: float, rate_mib_s: float) -> str:
    """Why a VM cannot be suspended within its notice; empty if it can.

    :param state_mib: the guest's memory that is in use.
    :param free_mib: on the disk that holds saved memory; None: it is not known.
    """
    if free_mib is None:
        return "it is not known what is free on the disk for saved memory"
    needed_mib = state_mib + BESIDES_MIB + MARGIN_MIB
    if free_mib < needed_mib:
        return f"its memory would take {needed_mib:.0f} MiB of the disk for saved memory, which has {free_mib:.0f}"
    needed_s = saving_s(state_mib, rate_mib_s)
    if needed_s > notice_s * SAVING_SHARE:
        return (
            f"saving its {state_mib:.0f} MiB may take {needed_s:.0f} s at {rate_mib_s:.0f} MiB/s, "
            f"and {notice_s * SAVING_SHARE:.0f} s of its notice are for that"
        )
    return ""


def power_off_s(notice_s: float, needed_s: float) -> float:
    """What of a notice is kept for powering off, should a save that may take ``needed_s`` not be ready, seconds."""
    return max(min(notice_s * POWER_OFF_SHARE, notice_s * SAVING_SHARE - needed_s), 0.0)


@dataclass(frozen=True, slots=True)
class SavingRate:
    """How fast the disk for saved memory has shown to be. Times are seconds of one monotonic clock."""

    #: By saves that were done.
    learned_mib_s: float = PRIOR_MIB_S
    #: What one that was not ready says at the most, of how much memory it was, and until when that counts.
    most_mib_s: float = math.inf
    late_mib: float = 0.0
    until: float = -math.inf

    def mib_s(self, now: float) -> float:
        """What to reckon with."""
        return min(self.learned_mib_s, self.most_mib_s) if now < self.until else self.learned_mib_s

    def saved(self, mib: float, seconds: float) -> SavingRate:
        """With one more save seen. A small one may have gone into the host's memory only: it says nothing of whether
        the disk takes what it has not taken in time."""
        if mib < LEAST_MIB or seconds <= 0:
            return self
        learned = replace(self, learned_mib_s=(1 - WEIGHT) * self.learned_mib_s + WEIGHT * mib / seconds)
        return replace(learned, until=-math.inf) if mib >= self.late_mib else learned

    def not_ready(self, now: float, state_mib: float, seconds: float) -> SavingRate:
        """With a save of so much memory seen that was not ready after so long."""
        if seconds <= 0:
            return self
        most_mib_s = min(self.mib_s(now), state_mib / seconds)
        return replace(self, most_mib_s=most_mib_s, late_mib=state_mib, until=now + BELIEVED_S)
