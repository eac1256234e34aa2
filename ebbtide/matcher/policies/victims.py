"""Rule by which tasks lose a machine that shrinks under them. A kernel of manager and simulator."""

from __future__ import annotations

from typing import Any, Final

#: YARN's order (Agarwal et al. 2023 §4.1).
OLDEST: Final = 0
#: The manager's: what runs for the longest stays.
NEWEST: Final = 1
#: The task whose end loses the least work; those that turn out not to be needed stay.
LEAST_LOST: Final = 2
#: Orders by name.
ORDERS: Final = {"oldest": OLDEST, "newest": NEWEST, "least-lost": LEAST_LOST}


def choose_victims(
    cores: Any, memory_mib: Any, lost: Any, goes: Any, count: int, over_cores: float, over_mib: float, order: int
) -> int:
    """Mark the tasks of one machine that must make room; how many they are.

    Tasks go one after another, in the order that is said, until the others fit, and no more than that. Tasks that may
    not be begun again stay, and go on with what is left. Of tasks that began at the same moment the one that got its
    turn last is the newest; of those that lose as little, the newest goes.

    :param cores: of the machine's tasks in the order in which they began, ties in the order of their turns.
    :param lost: core-seconds of work that each loses if it goes. Looked at with `LEAST_LOST` only.
    :param goes: in: which of them may be begun again; out: which of them go. 1 or 0.
    :param count: how many tasks.
    :param over_cores: what the tasks hold beyond what the machine has; not above 0: nothing.
    :param order: one of `ORDERS`.
    """
    found = 0
    if order != LEAST_LOST:
        for step in range(count):
            place = count - 1 - step if order == NEWEST else step
            if goes[place] == 0 or (over_cores <= 0 and over_mib <= 0):
                goes[place] = 0
                continue
            over_cores -= cores[place]
            over_mib -= memory_mib[place]
            found += 1
        return found
    # 2: it may go, 1: it goes.
    for place in range(count):
        goes[place] = 0 if goes[place] == 0 else 2
    while over_cores > 0 or over_mib > 0:
        best = -1
        for place in range(count):
            if goes[place] == 2 and (best < 0 or lost[place] <= lost[best]):
                best = place
        if best < 0:
            break
        goes[best] = 1
        over_cores -= cores[best]
        over_mib -= memory_mib[best]
        found += 1
    for place in range(count):
        if goes[place] == 2:
            goes[place] = 0
    # What lost most goes back first, where the others make room enough.
    while True:
        worst = -1
        for place in range(count):
            spared = over_cores + cores[place] <= 0 and over_mib + memory_mib[place] <= 0
            if goes[place] == 1 and spared and (worst < 0 or lost[place] > lost[worst]):
                worst = place
        if worst < 0:
            return found
        goes[worst] = 0
        over_cores += cores[worst]
        over_mib += memory_mib[worst]
        found -= 1
