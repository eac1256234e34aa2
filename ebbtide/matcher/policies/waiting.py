"""Policies of job waiting: jobs wait for machines paid for anyway, or get one on demand (Ambati et al. 2021).

Kernels, pure. A job that finds no room either waits, or gets a machine on demand at once, or is tried on one for a
while: most jobs are short, and a short one is done by then (§3.1).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

#: What becomes of a job.
WAIT: Final = 0
ON_DEMAND: Final = 1
TRY: Final = 2
#: It is not decided yet: trials that are under way will tell.
HOLD: Final = 3

#: A model of waits is believed if its Matthews' coefficient on stretches of time that it has not seen is at least the
#: least that the paper found (Fig. 6), and it has learned from so many jobs that waited too long.
BELIEVED_MCC: Final = 0.25
BELIEVED_LATE: Final = 100

#: Amazon's m5 family, which the paper rents from (§2.3): cores of its sizes, MiB to a core, dollars an hour for a core;
#: and what a machine costs that is reserved for three years, as a share of that.
SIZES: Final = (2, 4, 8, 16, 32, 48, 64, 96)
MIB_A_CORE: Final = 4096
CORE_HOUR: Final = 0.048
RESERVED_SHARE: Final = 0.4
#: What a spot machine costs, as a share of one on demand (§3.1).
SPOT_SHARE: Final = 0.3


def length_s(runtime_s: float, cores: int, by_core_time: bool) -> float:
    """How long a job is to the policy: its core-time (§2.3: "total core-time rather than absolute running time"), or
    its runtime; s."""
    if by_core_time:
        return runtime_s * cores
    return runtime_s


def tried_for_s(short_below_s: float, cores: int, by_core_time: bool) -> float:
    """How long a job runs on trial before it is known to be long: until its length is the threshold (§3.1); s."""
    if by_core_time:
        return short_below_s / cores
    return short_below_s


def at_arrival(length_s: float, short_below_s: float, late: bool, tries: bool) -> int:
    """What becomes of a job that finds no room: WAIT, ON_DEMAND or TRY.

    Long jobs wait (LJW), but not those that would wait too long (SWW): both must say that it waits (§2.1).

    :param length_s: what is believed of it (`length_s`); one that is not known (NaN) is long.
    :param short_below_s: t; 0: none is short.
    :param late: whether it is believed to wait b or longer.
    :param tries: whether its length is found out by trying it (`tried`).
    """
    if tries and short_below_s > 0:
        return TRY
    if late or length_s < short_below_s:
        return ON_DEMAND
    return WAIT


def tried(long_chance: float, up_to: float, trials: int, now_s: float, held_until_s: float) -> int:
    """Whether a job that finds no room is tried: TRY, HOLD, or WAIT, as one that is long.

    The paper tries all (``up_to`` 1). A trial of a long job is paid in vain, so here only what is not likely to be long
    is tried; and while others like it are on trial it is held until they have told.

    :param up_to: the chance to be long up to which a job is tried; 0 to 1.
    :param trials: of jobs like it that are under way.
    :param held_until_s: it is held no longer than that.
    """
    if long_chance > up_to:
        return WAIT
    if trials > 0 and now_s < held_until_s:
        return HOLD
    return TRY


def believed(mcc: float, late: int) -> bool:
    """Whether a model of waits is believed; if not, no job is said to be late, and who has waited b gives up.

    :param mcc: Matthews' coefficient on stretches of time that it has not seen; NaN where there is none.
    :param late: jobs that waited too long among those that it has learned from.
    """
    return mcc >= BELIEVED_MCC and late >= BELIEVED_LATE


def after_trial(late: bool) -> int:
    """What becomes of a job that has turned out long.

    It is killed and waits (§3.1); if it would wait too long it stays where it is, and loses nothing.
    """
    return ON_DEMAND if late else WAIT


def leaves_at_s(since_s: float, wait_below_s: float) -> float:
    """When a job that waits since then gives up, and gets a machine on demand (§2.1: no job waits longer than b); s."""
    return since_s + wait_below_s


def rented_cores(sizes: Ints, mib_a_core: int, cores: int, memory_mib: int) -> int:
    """Cores of the smallest size of machine that holds a job (§2.3); of several of the largest if none does.

    :param sizes: cores, ascending.
    """
    for i in range(len(sizes)):
        if sizes[i] >= cores and sizes[i] * mib_a_core >= memory_mib:
            return int(sizes[i])
    largest = sizes[len(sizes) - 1]
    by_cores = math.ceil(cores / largest)
    by_memory = math.ceil(memory_mib / (largest * mib_a_core))
    return int(max(by_cores, by_memory) * largest)
