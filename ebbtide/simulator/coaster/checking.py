"""Conservation: what must hold of servers, queues and tasks after every event. A kernel."""

from __future__ import annotations

from ebbtide.simulator.coaster.arrays import ASKED_FOR, DRAINING, ENTRY, KNOB, NUMBER, OFF, ON, SERVER, Coaster


def check(s: Coaster) -> int:
    """The first rule that does not hold, a place in `arrays.RULES`; 0 if all do."""
    running_long = 0
    transient = 0
    transient_on = 0
    draining = 0
    asked = 0
    opened = 0
    for server in range(len(s.servers)):
        state = s.servers[server, SERVER.state]
        long = s.servers[server, SERVER.runs_long]
        running_long += long
        entry = s.servers[server, SERVER.first]
        if state != ON and state != DRAINING and (s.servers[server, SERVER.job] >= 0 or entry >= 0):
            return 1
        if entry >= 0 and s.servers[server, SERVER.job] < 0:
            return 7
        expected_s = 0.0
        while entry >= 0:
            long += s.entries[entry, ENTRY.long]
            if s.entries[entry, ENTRY.long] != 0:
                expected_s += s.mean_s[s.entries[entry, ENTRY.job]]
            entry = s.entries[entry, ENTRY.next]
        if long != s.servers[server, SERVER.long]:
            return 2
        if long > 0 and (server < s.knobs[KNOB.short] or server >= s.knobs[KNOB.fixed]):
            return 3
        # Many small sums and differences: rounding is far below this.
        if abs(expected_s - s.queued_s[server]) > 1e-3 + 1e-6 * expected_s:
            return 9
        if server >= s.knobs[KNOB.fixed] and state != OFF:
            transient += 1
            if state == ASKED_FOR:
                asked += 1
            else:
                transient_on += 1
            if state == DRAINING:
                draining += 1
        place = s.servers[server, SERVER.open]
        if (state == ON and long == 0) != (place >= 0):
            return 6
        if place >= 0:
            opened += 1
            if s.open[place] != server:
                return 6
    if running_long != s.knobs[KNOB.long]:
        return 2
    if transient > s.knobs[KNOB.most]:
        return 4
    if transient_on != s.knobs[KNOB.on] or transient - draining != s.knobs[KNOB.have]:
        return 8
    if asked != s.knobs[KNOB.asked]:
        return 8
    backlog_s = 0.0
    for job in range(s.knobs[KNOB.jobs]):
        if s.mean_s[job] < s.numbers[NUMBER.cutoff_s]:
            backlog_s += (s.offsets[job + 1] - s.offsets[job] - s.done[job]) * s.mean_s[job]
    if abs(backlog_s - s.numbers[NUMBER.backlog_s]) > 1e-3 + 1e-6 * backlog_s:
        return 11
    return 6 if opened != s.knobs[KNOB.open] else 0
