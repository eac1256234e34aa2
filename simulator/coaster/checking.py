"""Conservation: what must hold of servers, queues and tasks after every event. A kernel."""

from __future__ import annotations

from simulator.coaster.arrays import (
    ASKED_FOR,
    DRAINING,
    E_JOB,
    E_LONG,
    E_NEXT,
    K_FIXED,
    K_HAVE,
    K_LONG,
    K_MOST,
    K_ON,
    K_OPEN,
    K_SHORT,
    OFF,
    ON,
    V_FIRST,
    V_JOB,
    V_LONG,
    V_OPEN,
    V_RUNS_LONG,
    V_STATE,
    Coaster,
)


def check(s: Coaster) -> int:
    """The first rule that does not hold, a place in `arrays.RULES`; 0 if all do."""
    running_long = 0
    transient = 0
    transient_on = 0
    draining = 0
    opened = 0
    for server in range(len(s.servers)):
        state = s.servers[server, V_STATE]
        long = s.servers[server, V_RUNS_LONG]
        running_long += long
        entry = s.servers[server, V_FIRST]
        if state != ON and state != DRAINING and (s.servers[server, V_JOB] >= 0 or entry >= 0):
            return 1
        if entry >= 0 and s.servers[server, V_JOB] < 0:
            return 7
        expected_s = 0.0
        while entry >= 0:
            long += s.entries[entry, E_LONG]
            if s.entries[entry, E_LONG] != 0:
                expected_s += s.mean_s[s.entries[entry, E_JOB]]
            entry = s.entries[entry, E_NEXT]
        if long != s.servers[server, V_LONG]:
            return 2
        if long > 0 and (server < s.knobs[K_SHORT] or server >= s.knobs[K_FIXED]):
            return 3
        # Many small sums and differences: rounding is far below this.
        if abs(expected_s - s.queued_s[server]) > 1e-3 + 1e-6 * expected_s:
            return 9
        if server >= s.knobs[K_FIXED] and state != OFF:
            transient += 1
            if state != ASKED_FOR:
                transient_on += 1
            if state == DRAINING:
                draining += 1
        place = s.servers[server, V_OPEN]
        if (state == ON and long == 0) != (place >= 0):
            return 6
        if place >= 0:
            opened += 1
            if s.open[place] != server:
                return 6
    if running_long != s.knobs[K_LONG]:
        return 2
    if transient > s.knobs[K_MOST]:
        return 4
    if transient_on != s.knobs[K_ON] or transient - draining != s.knobs[K_HAVE]:
        return 8
    return 6 if opened != s.knobs[K_OPEN] else 0
