"""Waiting for guests that cannot be deflated yet, or for a VM that moves away, before anyone is preempted: whether, and
for how long.
"""

from __future__ import annotations

from typing import Final

from ebbtide.deflation.resources import ZERO, ResourceVector

#: What is copied of a VM in a second at the least, on a link of 1 Gbit/s; and the shortest time for a move, seconds.
MOVE_MIB_S: Final = 100.0
SHORTEST_MOVE_S: Final = 5.0


def kept_for_notice_s(longest_s: float, left_s: float) -> float:
    """What is left of a deadline to those that may have to go all the same: half of it at the most.

    :param longest_s: of the notices that they were promised.
    """
    return min(longest_s, max(left_s, 0.0) / 2)


def movable_mib(seconds: float, mib_s: float = MOVE_MIB_S) -> float:
    """How much memory a VM may have that moves, so that nobody is preempted; 0: there is no time for a move.

    :param seconds: for the move, half of which is kept for what is written meanwhile, and for what comes after it.
    """
    return mib_s * seconds / 2 if seconds >= SHORTEST_MOVE_S else 0.0


def helps(missing: ResourceVector, deflatable: ResourceVector, coming: ResourceVector, enough: bool) -> bool:
    """Whether what cannot be taken yet is needed.

    :param missing: what a host lacks.
    :param deflatable: what can be taken there now.
    :param coming: what probably can be taken besides, once guests answer.
    :param enough: whether it has to be enough, since nothing else will be done.
    """
    needed = missing.less(deflatable).smaller(coming)
    return needed != ZERO and (not enough or missing.fits_in(deflatable + coming))


def waits_s(left_s: float, in_s: float, has_other_hosts: bool) -> float:
    """For how long a placement waits at a host, in seconds; 0: not at all.

    :param left_s: until its deadline, less what it keeps for those that may have to go all the same.
    :param in_s: when the guests will probably answer: a guess, so what is left is waited for all the same, unless there
        are other hosts to try.
    """
    return 0.0 if left_s <= 0 or (has_other_hosts and in_s > left_s) else left_s
