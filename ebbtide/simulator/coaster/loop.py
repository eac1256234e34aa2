"""The loop: jobs come, tasks begin and end, transient servers come and go. Kernels, no numba here.

Messages take no time. At one instant ends come before arrivals.
"""

from __future__ import annotations

import heapq
import math
from typing import TypeAlias

from ebbtide.matcher.policies.cloudcoaster import (
    expected_backlog_s,
    goes_before,
    is_long,
    least_loaded,
    on_demand_probes,
    passes,
    probes,
    slack_s,
    wanted,
    wanted_by_wait,
)
from ebbtide.simulator.coaster.arrays import ASKED_FOR, DRAINING, ENTRY, KNOB, NUMBER, OFF, ON, SERVER, Coaster
from ebbtide.simulator.coaster.checking import check
from ebbtide.simulator.nodes.draws import draw

#: A heap of (time, order of entry, server): ends of tasks, and servers that come on.
Ends: TypeAlias = list[tuple[float, int, int]]


def opens(s: Coaster, server: int) -> None:
    """Let a server take probes, if it is on and has no long task; else let it take none."""
    takes = s.servers[server, SERVER.state] == ON and s.servers[server, SERVER.long] == 0
    place = s.servers[server, SERVER.open]
    if takes and place < 0:
        s.servers[server, SERVER.open] = s.knobs[KNOB.open]
        s.open[s.knobs[KNOB.open]] = server
        s.knobs[KNOB.open] += 1
    elif not takes and place >= 0:
        s.knobs[KNOB.open] -= 1
        last = s.open[s.knobs[KNOB.open]]
        s.open[place] = last
        s.servers[last, SERVER.open] = place
        s.servers[server, SERVER.open] = -1


def append(s: Coaster, server: int, job: int, long: int) -> None:
    """Put a probe or a long task at the end of a server's queue."""
    entry = s.knobs[KNOB.entries]
    s.knobs[KNOB.entries] += 1
    s.entries[entry, ENTRY.job] = job
    s.entries[entry, ENTRY.next] = -1
    s.entries[entry, ENTRY.long] = long
    s.entries[entry, ENTRY.bypassed] = 0
    if s.servers[server, SERVER.last] >= 0:
        s.entries[s.servers[server, SERVER.last], ENTRY.next] = entry
    else:
        s.servers[server, SERVER.first] = entry
    s.servers[server, SERVER.last] = entry


def begun(s: Coaster, entry: int) -> bool:
    """Whether an entry is a probe of a job all of whose tasks have begun."""
    job = s.entries[entry, ENTRY.job]
    return bool(s.entries[entry, ENTRY.long] == 0 and s.begun[job] >= s.offsets[job + 1] - s.offsets[job])


def left_s(s: Coaster, entry: int) -> float:
    """Work that the job of an entry has not begun, as it is estimated; of a long task its own estimate; s."""
    job = s.entries[entry, ENTRY.job]
    if s.entries[entry, ENTRY.long] != 0:
        return float(s.mean_s[job])
    return float((s.offsets[job + 1] - s.offsets[job] - s.begun[job]) * s.mean_s[job])


def take(s: Coaster, server: int) -> int:
    """Take what is next out of a server's queue; -1: there is nothing. Probes of jobs that all began are dropped."""
    best = -1
    best_before = -1
    before = -1
    entry = s.servers[server, SERVER.first]
    while entry >= 0:
        after = s.entries[entry, ENTRY.next]
        if begun(s, entry):
            s.knobs[KNOB.void] += 1
            unlink(s, server, before, entry)
            entry = after
            continue
        if best < 0:
            best, best_before = entry, before
            if s.knobs[KNOB.shortest] == 0:
                break
        elif goes_before(left_s(s, entry), left_s(s, best), s.entries[best, ENTRY.bypassed], s.knobs[KNOB.bypasses]):
            best, best_before = entry, before
        if s.entries[entry, ENTRY.bypassed] >= s.knobs[KNOB.bypasses]:
            # No entry behind it goes before it any more.
            break
        before = entry
        entry = after
    if best < 0:
        return -1
    other = s.servers[server, SERVER.first]
    while other != best:
        s.entries[other, ENTRY.bypassed] += 1
        other = s.entries[other, ENTRY.next]
    unlink(s, server, best_before, best)
    return best


def take_published(s: Coaster, server: int) -> int:
    """`take` as in Eagle's published simulator: a probe that got a task keeps its place, and each turn is open to all.

    The first in the queue takes it if it is a long task; one further behind counts with all that its job has left.
    """
    best = -1
    best_before = -1
    best_left_s = math.inf
    least_slack_s = math.inf
    before = -1
    entry = s.servers[server, SERVER.first]
    while entry >= 0:
        after = s.entries[entry, ENTRY.next]
        if begun(s, entry):
            s.knobs[KNOB.void] += 1
            unlink(s, server, before, entry)
            entry = after
            continue
        job = s.entries[entry, ENTRY.job]
        long = s.entries[entry, ENTRY.long] != 0
        job_left_s = float((s.offsets[job + 1] - s.offsets[job] - s.begun[job]) * s.mean_s[job])
        first = long and before < 0
        if first or passes(job_left_s, best_left_s, s.mean_s[job], least_slack_s):
            best, best_before, best_left_s = entry, before, job_left_s
            if first or s.knobs[KNOB.shortest] == 0:
                break
        if not long:
            slack = slack_s(s.mean_s[job], s.delayed_s[entry], s.numbers[NUMBER.most_delays])
            least_slack_s = min(least_slack_s, slack)
        before = entry
        entry = after
    if best < 0:
        return -1
    job = s.entries[best, ENTRY.job]
    if s.entries[best, ENTRY.long] == 0:
        other = s.servers[server, SERVER.first]
        while other != best:
            s.delayed_s[other] += s.mean_s[job]
            other = s.entries[other, ENTRY.next]
        if s.knobs[KNOB.sticky] != 0 and s.begun[job] + 1 < s.offsets[job + 1] - s.offsets[job]:
            return best
    unlink(s, server, best_before, best)
    return best


def unlink(s: Coaster, server: int, before: int, entry: int) -> None:
    """Take an entry out of a queue; ``before`` is the one ahead of it, or -1."""
    after = s.entries[entry, ENTRY.next]
    if before >= 0:
        s.entries[before, ENTRY.next] = after
    else:
        s.servers[server, SERVER.first] = after
    if after < 0:
        s.servers[server, SERVER.last] = before


def run_task(s: Coaster, server: int, job: int, long: int, now_s: float) -> float:
    """Let a server run the next task of a job; when that ends."""
    task = s.offsets[job] + s.begun[job]
    s.begun[job] += 1
    s.knobs[KNOB.run] += 1
    s.waited_s[task] = now_s - s.at_s[job]
    s.ran_on[task] = server
    s.servers[server, SERVER.job] = job
    s.servers[server, SERVER.runs_long] = long
    s.numbers[NUMBER.busy_s] += s.runtime_s[task]
    if long != 0:
        s.knobs[KNOB.long] += 1
        s.queued_s[server] -= s.mean_s[job]
        s.expected_s[server] = now_s + s.mean_s[job]
    return float(now_s + s.runtime_s[task])


def goes_on(s: Coaster, server: int, now_s: float) -> float:
    """What an idle server does next; when that ends, -1: it has nothing to do."""
    entry = take_published(s, server) if s.knobs[KNOB.published] != 0 else take(s, server)
    if entry < 0:
        if s.servers[server, SERVER.state] == DRAINING:
            leaves(s, server, now_s)
        return -1.0
    return run_task(s, server, s.entries[entry, ENTRY.job], s.entries[entry, ENTRY.long], now_s)


def active(s: Coaster, change: int, now_s: float) -> None:
    """So many transient servers more are on."""
    s.numbers[NUMBER.active_s] += s.knobs[KNOB.on] * (now_s - s.numbers[NUMBER.since_s])
    s.numbers[NUMBER.since_s] = now_s
    s.knobs[KNOB.on] += change
    s.knobs[KNOB.peak] = max(s.knobs[KNOB.peak], s.knobs[KNOB.on])


def asked(s: Coaster, change: int, now_s: float) -> None:
    """So many transient servers more are asked for."""
    s.numbers[NUMBER.asked_s] += s.knobs[KNOB.asked] * (now_s - s.numbers[NUMBER.asked_at_s])
    s.numbers[NUMBER.asked_at_s] = now_s
    s.knobs[KNOB.asked] += change


def leaves(s: Coaster, server: int, now_s: float) -> None:
    """A transient server that has nothing more to do goes."""
    s.servers[server, SERVER.state] = OFF
    active(s, -1, now_s)
    lived_s = now_s - s.since_s[server]
    s.numbers[NUMBER.lived_s] += lived_s
    s.numbers[NUMBER.longest_s] = max(s.numbers[NUMBER.longest_s], lived_s)


def leaves_before(s: Coaster, server: int, other: int) -> bool:
    """Whether of two transient servers the first is released before the other: the one that came later; where they are
    rented by the wait, one that does nothing goes before."""
    if s.knobs[KNOB.by_wait] != 0 and (s.servers[server, SERVER.job] < 0) != (s.servers[other, SERVER.job] < 0):
        return bool(s.servers[server, SERVER.job] < 0)
    return bool(s.since_s[server] > s.since_s[other])


def release(s: Coaster, now_s: float) -> None:
    """Give up one transient server: one that is only asked for, if there is one, else the first of `leaves_before`."""
    found = -1
    for server in range(s.knobs[KNOB.fixed], len(s.servers)):
        state = s.servers[server, SERVER.state]
        if state == ASKED_FOR:
            found = server
            break
        if state == ON and (found < 0 or leaves_before(s, server, found)):
            found = server
    s.knobs[KNOB.have] -= 1
    if s.servers[found, SERVER.state] == ASKED_FOR:
        s.servers[found, SERVER.state] = OFF
        asked(s, -1, now_s)
        return
    s.servers[found, SERVER.state] = DRAINING
    opens(s, found)
    if s.servers[found, SERVER.job] < 0 and s.servers[found, SERVER.first] < 0:
        leaves(s, found, now_s)


def free_row(s: Coaster) -> int:
    """A transient server that is off; -1: there is none. Those that drain count in the budget until they are gone."""
    for server in range(s.knobs[KNOB.fixed], len(s.servers)):
        if s.servers[server, SERVER.state] == OFF:
            return server
    return -1


def open_server(s: Coaster) -> int:
    """A server that a probe goes to; -1: all have long tasks.

    Eagle asks any server; one with a long task refuses, and says which have none, of which another is asked. With
    messages that take no time that is: any one without a long task, each as likely.
    """
    if s.knobs[KNOB.open] == 0:
        return -1
    return int(s.open[draw(s.draws, s.knobs[KNOB.open])])


def push(s: Coaster, ends: Ends, at_s: float, server: int) -> None:
    """Enter when a server's task ends, or when the server comes; what is entered first is first of one instant."""
    s.knobs[KNOB.entered] += 1
    heapq.heappush(ends, (at_s, s.knobs[KNOB.entered], server))


def go_on(s: Coaster, ends: Ends, server: int, now_s: float) -> None:
    """Let an idle server begin what is next."""
    until_s = goes_on(s, server, now_s)
    if until_s >= 0:
        push(s, ends, until_s, server)


def server_comes(s: Coaster, server: int, now_s: float) -> bool:
    """A transient server comes on, unless it was given up or asked for again since; whether it does."""
    if s.servers[server, SERVER.state] != ASKED_FOR or s.since_s[server] > now_s:
        return False
    s.servers[server, SERVER.state] = ON
    asked(s, -1, now_s)
    s.knobs[KNOB.came] += 1
    active(s, 1, now_s)
    opens(s, server)
    return True


def goes_on_with(s: Coaster, job: int) -> bool:
    """Whether a server that ends a short task takes the next one of the same job, whoever waits."""
    sticky = s.knobs[KNOB.sticky] != 0 and s.knobs[KNOB.published] == 0
    return bool(sticky and s.begun[job] < s.offsets[job + 1] - s.offsets[job])


def task_ends(s: Coaster, ends: Ends, server: int, now_s: float) -> bool:
    """A server's task has ended, and it goes on with another; whether it was a long task."""
    job = s.servers[server, SERVER.job]
    long = s.servers[server, SERVER.runs_long] != 0
    s.done[job] += 1
    s.ended_s[job] = now_s
    s.servers[server, SERVER.job] = -1
    if long:
        s.servers[server, SERVER.runs_long] = 0
        s.servers[server, SERVER.long] -= 1
        s.expected_s[server] = 0.0
        s.knobs[KNOB.long] -= 1
        opens(s, server)
    else:
        s.numbers[NUMBER.backlog_s] -= s.mean_s[job]
    if not long and goes_on_with(s, job):
        push(s, ends, run_task(s, server, job, 0, now_s), server)
        return False
    go_on(s, ends, server, now_s)
    return bool(long)


def long_job_comes(s: Coaster, ends: Ends, job: int, now_s: float) -> None:
    """Put each task of a long job on the server that is believed to be free first."""
    for _ in range(s.offsets[job + 1] - s.offsets[job]):
        server = least_loaded(s.queued_s, s.expected_s, s.knobs[KNOB.short], s.knobs[KNOB.fixed], now_s)
        append(s, server, job, 1)
        s.queued_s[server] += s.mean_s[job]
        s.servers[server, SERVER.long] += 1
        opens(s, server)
        if s.servers[server, SERVER.job] < 0:
            go_on(s, ends, server, now_s)


def probe(s: Coaster, ends: Ends, server: int, job: int, now_s: float) -> None:
    """Let a short job's probe wait at a server, which asks for a task at once if it is idle."""
    append(s, server, job, 0)
    if s.servers[server, SERVER.job] < 0:
        go_on(s, ends, server, now_s)


def short_job_comes(s: Coaster, ends: Ends, job: int, now_s: float) -> None:
    """Send a short job's probes; some go to servers on demand, which are not taken away (§3.3): the last ones at any
    rate, where too few of those before did."""
    fixed = s.knobs[KNOB.fixed]
    tasks = s.offsets[job + 1] - s.offsets[job]
    on_demand = on_demand_probes(tasks, s.knobs[KNOB.each_task] != 0)
    s.numbers[NUMBER.backlog_s] += tasks * s.mean_s[job]
    for left in range(probes(tasks, s.numbers[NUMBER.probe_ratio], s.knobs[KNOB.least_probes]), 0, -1):
        server = open_server(s)
        if server < 0:
            server = draw(s.draws, fixed)
        if server >= fixed and on_demand >= left:
            server = draw(s.draws, s.knobs[KNOB.short])
        if server < fixed:
            on_demand -= 1
        probe(s, ends, server, job, now_s)


def resize(s: Coaster, ends: Ends, now_s: float) -> None:
    """Ask for as many transient servers as the rule wants, or release one: slowly, one each time (§3.3)."""
    before = s.knobs[KNOB.have]
    expected_s = 0.0
    if s.knobs[KNOB.by_wait] != 0:
        passed_s = now_s - s.numbers[NUMBER.expected_at_s]
        before_s, memory_s = s.numbers[NUMBER.expected_s], s.numbers[NUMBER.memory_s]
        expected_s = expected_backlog_s(s.numbers[NUMBER.backlog_s], before_s, passed_s, memory_s)
        s.numbers[NUMBER.expected_s], s.numbers[NUMBER.expected_at_s] = expected_s, now_s
    while True:
        have, most = s.knobs[KNOB.have], s.knobs[KNOB.most]
        if s.knobs[KNOB.by_wait] != 0:
            servers = s.knobs[KNOB.open] + s.knobs[KNOB.asked]
            longest_s, kept_share = s.numbers[NUMBER.longest_wait_s], s.numbers[NUMBER.kept_share]
            what = wanted_by_wait(expected_s, servers, longest_s, kept_share, have, most)
        else:
            threshold = s.numbers[NUMBER.threshold]
            what = wanted(s.knobs[KNOB.long], s.knobs[KNOB.fixed] + have, threshold, have, most)
        if what < 0 and have == before:
            release(s, now_s)
            return
        server = free_row(s) if what > 0 else -1
        if server < 0:
            return
        s.servers[server, SERVER.state] = ASKED_FOR
        s.since_s[server] = now_s + s.numbers[NUMBER.provisioning_s]
        s.knobs[KNOB.have] += 1
        asked(s, 1, now_s)
        push(s, ends, s.since_s[server], server)


def simulate(s: Coaster) -> float:
    """From the first job to the last end; the time of that."""
    # Compilers learn the list's type from an element.
    ends = [(0.0, 0, 0)]
    ends.pop()
    jobs = len(s.at_s)
    job = 0
    now_s = 0.0
    for server in range(s.knobs[KNOB.fixed]):
        s.servers[server, SERVER.state] = ON
        opens(s, server)
    while job < jobs or len(ends) > 0:
        if len(ends) > 0 and (job >= jobs or ends[0][0] <= s.at_s[job]):
            now_s, _, server = heapq.heappop(ends)
            if s.servers[server, SERVER.job] < 0:
                long_changed = server_comes(s, server, now_s)
            else:
                long_changed = task_ends(s, ends, server, now_s)
        else:
            now_s = s.at_s[job]
            long_changed = is_long(s.mean_s[job], s.numbers[NUMBER.cutoff_s])
            if long_changed:
                long_job_comes(s, ends, job, now_s)
            else:
                short_job_comes(s, ends, job, now_s)
            job += 1
            s.knobs[KNOB.jobs] = job
            if job == jobs:
                active(s, 0, now_s)
                asked(s, 0, now_s)
                s.numbers[NUMBER.arriving_s] = s.numbers[NUMBER.active_s]
                s.numbers[NUMBER.asked_arriving_s] = s.numbers[NUMBER.asked_s]
                s.numbers[NUMBER.arrived_s] = now_s
        s.numbers[NUMBER.now_s] = now_s
        if long_changed or s.knobs[KNOB.by_wait] != 0:
            resize(s, ends, now_s)
        if s.knobs[KNOB.validate] != 0 and s.knobs[KNOB.broken] == 0:
            s.knobs[KNOB.broken] = check(s)
    active(s, 0, now_s)
    for server in range(s.knobs[KNOB.fixed], len(s.servers)):
        if s.servers[server, SERVER.state] == ON:
            leaves(s, server, now_s)
    return now_s
