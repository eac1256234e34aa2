"""Rule by which tasks lose a machine that shrinks under them. A kernel of manager and simulator."""

from __future__ import annotations

from typing import Any


def choose_victims(
    cores: Any, memory_mib: Any, goes: Any, count: int, over_cores: float, over_mib: float, newest: bool
) -> int:
    """Mark the tasks of one machine that must make room; how many they are.

    Tasks go one after another until the others fit, and no more than that: the newest first (the least work is lost;
    the manager's rule), or the oldest first (YARN's, Agarwal et al. 2023 §4.1). Tasks that may not be begun again stay,
    and go on with what is left. Of tasks that began at the same moment the one that got its turn last is the newest.

    :param cores: of the machine's tasks in the order in which they began, ties in the order of their turns.
    :param goes: in: which of them may be begun again; out: which of them go. 1 or 0.
    :param count: how many tasks.
    :param over_cores: what the tasks hold beyond what the machine has; not above 0: nothing.
    :param newest: False: the oldest first.
    """
    found = 0
    for step in range(count):
        place = count - 1 - step if newest else step
        if goes[place] == 0 or (over_cores <= 0 and over_mib <= 0):
            goes[place] = 0
            continue
        over_cores -= cores[place]
        over_mib -= memory_mib[place]
        goes[place] = 1
        found += 1
    return found
