"""Suspension of a VM: whether there is room and time to save its memory to disk, and how fast that disk is. Pure."""

from __future__ import annotations

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
#: Of a notice, what saving may take at the most, and what a power-off gets; the rest is for the guest's programs.
SAVING_SHARE: Final = 2 / 3
POWER_OFF_SHARE: Final = 1 / 3
#: How much the last save counts in the rate, and how small one says nothing about the disk, MiB.
WEIGHT: Final = 0.5
LEAST_MIB: Final = 32.0


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


def learned_rate(rate_mib_s: float, saved_mib: float, seconds: float) -> float:
    """What the disk takes, MiB/s, with one more save seen."""
    if saved_mib < LEAST_MIB or seconds <= 0:
        return rate_mib_s
    return (1 - WEIGHT) * rate_mib_s + WEIGHT * saved_mib / seconds
