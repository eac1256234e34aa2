"""Waiting for guests that cannot be deflated yet, before anyone is preempted: whether, and for how long."""

from __future__ import annotations

from ebbtide.deflation.resources import ZERO, ResourceVector


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
