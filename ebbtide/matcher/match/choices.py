"""Choice of one machine: the last step of Algorithm 1 (Agarwal et al. 2023). A kernel, as in `matcher.predict.ages`."""

from __future__ import annotations

import numpy as np

from ebbtide.matcher.predict.ages import Floats, Value


def choose(
    expected: Floats,
    waits: Floats,
    probability: Floats,
    idle: Value,
    duration_s: float,
    delay: bool,
    spare: float,
    spread: float,
) -> int:
    """The machine with the least expected time, the first of several; -1: none will ever have room.

    :param expected: E_wc by machine in seconds, infinite where there will never be room. Shape (n,), as the others.
    :param waits: how long until there is room.
    :param probability: P_c; NaN counts as the least. Not looked at without ``spare``.
    :param delay: whether a busy machine may be chosen; without, the best of those with room now, or -1.
    :param idle: cores that no task uses. Not looked at without ``spread``.
    :param spare: among machines with room whose expected time is this share of the duration above the least at most,
        the one with the least P_c is taken, if the best has room itself.
    :param spread: among such machines with ``spread`` for ``spare``, the one with the most idle is taken: a shrink
        takes idle cores first, and of machines that are alike each gets tasks in turn.
    """
    if len(expected) == 0:
        return -1
    considered = expected if delay else np.where(waits == 0.0, expected, np.inf)
    best = int(considered.argmin())
    if not considered[best] < np.inf:
        return -1
    if spare > 0.0 and waits[best] == 0.0:
        near = (waits == 0.0) & (expected <= expected[best] + spare * duration_s)
        steady = np.where(np.isnan(probability), 0.0, probability)
        best = int(np.argmin(np.where(near, steady, np.inf)))
    elif spread > 0.0 and waits[best] == 0.0:
        near = (waits == 0.0) & (expected <= expected[best] + spread * duration_s)
        best = int(np.argmax(np.where(near, idle, -np.inf)))
    return best


def better_on_heartbeat(
    probability: float, duration_s: float, threshold: float, best: float, best_duration_s: float
) -> bool:
    """Whether a task is rather started on the machine that reports than the best so far (Algorithm 3).

    Of tasks that are as likely to complete the shorter, which the paper leaves open.

    :param probability: P_c of the task there; NaN, and what is not above the threshold: no.
    :param best: P_c of the best so far; below 0: there is none.
    """
    if not probability > threshold:
        return False
    return probability > best or (probability == best and duration_s < best_duration_s)
