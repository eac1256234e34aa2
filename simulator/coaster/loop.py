"""The loop: jobs come, tasks begin and end, transient servers come and go. Kernels, no numba here.

Messages take no time. At one instant ends come before arrivals.
"""

from __future__ import annotations

import heapq

from simulator.coaster.arrays import (
    ASKED_FOR,
    DRAINING,
    E_BYPASSED,
    E_JOB,
    E_LONG,
    E_NEXT,
    K_BROKEN,
    K_BYPASSES,
    K_CAME,
    K_ENTRIES,
    K_FIXED,
    K_HAVE,
    K_LEAST_PROBES,
    K_LONG,
    K_MOST,
    K_ON,
    K_OPEN,
    K_PEAK,
    K_RUN,
    K_SHORT,
    K_SHORTEST,
    K_STICKY,
    K_VALIDATE,
    K_VOID,
    N_ACTIVE_S,
    N_BUSY_S,
    N_CUTOFF_S,
    N_LIVED_S,
    N_LONGEST_S,
    N_NOW_S,
    N_PROBE_RATIO,
    N_PROVISIONING_S,
    N_SINCE_S,
    N_THRESHOLD,
    OFF,
    ON,
    V_FIRST,
    V_JOB,
    V_LAST,
    V_LONG,
    V_OPEN,
    V_RUNS_LONG,
    V_STATE,
    Coaster,
)
from simulator.coaster.checking import check
from task_matcher.draws import draw
from task_matcher.probing import goes_before, is_long, least_loaded, probes
from task_matcher.transient import wanted


def opens(s: Coaster, server: int) -> None:
    """Let a server take probes, if it is on and has no long task; else let it take none."""
    takes = s.servers[server, V_STATE] == ON and s.servers[server, V_LONG] == 0
    place = s.servers[server, V_OPEN]
    if takes and place < 0:
        s.servers[server, V_OPEN] = s.knobs[K_OPEN]
        s.open[s.knobs[K_OPEN]] = server
        s.knobs[K_OPEN] += 1
    elif not takes and place >= 0:
        s.knobs[K_OPEN] -= 1
        last = s.open[s.knobs[K_OPEN]]
        s.open[place] = last
        s.servers[last, V_OPEN] = place
        s.servers[server, V_OPEN] = -1


def append(s: Coaster, server: int, job: int, long: int) -> None:
    """Put a probe or a long task at the end of a server's queue."""
    entry = s.knobs[K_ENTRIES]
    s.knobs[K_ENTRIES] += 1
    s.entries[entry, E_JOB] = job
    s.entries[entry, E_NEXT] = -1
    s.entries[entry, E_LONG] = long
    s.entries[entry, E_BYPASSED] = 0
    if s.servers[server, V_LAST] >= 0:
        s.entries[s.servers[server, V_LAST], E_NEXT] = entry
    else:
        s.servers[server, V_FIRST] = entry
    s.servers[server, V_LAST] = entry


def left_s(s: Coaster, entry: int) -> float:
    """Work that the job of an entry has not begun, as it is estimated; of a long task its own estimate; s."""
    job = s.entries[entry, E_JOB]
    if s.entries[entry, E_LONG] != 0:
        return float(s.mean_s[job])
    return float((s.offsets[job + 1] - s.offsets[job] - s.begun[job]) * s.mean_s[job])


def take(s: Coaster, server: int) -> int:
    """Take what is next out of a server's queue; -1: there is nothing. Probes of jobs that all began are dropped."""
    best = -1
    best_before = -1
    before = -1
    entry = s.servers[server, V_FIRST]
    while entry >= 0:
        after = s.entries[entry, E_NEXT]
        job = s.entries[entry, E_JOB]
        if s.entries[entry, E_LONG] == 0 and s.begun[job] >= s.offsets[job + 1] - s.offsets[job]:
            s.knobs[K_VOID] += 1
            unlink(s, server, before, entry)
            entry = after
            continue
        if best < 0:
            best, best_before = entry, before
            if s.knobs[K_SHORTEST] == 0:
                break
        elif goes_before(left_s(s, entry), left_s(s, best), s.entries[best, E_BYPASSED], s.knobs[K_BYPASSES]):
            best, best_before = entry, before
        if s.entries[entry, E_BYPASSED] >= s.knobs[K_BYPASSES]:
            # Nobody behind it goes before it any more.
            break
        before = entry
        entry = after
    if best < 0:
        return -1
    other = s.servers[server, V_FIRST]
    while other != best:
        s.entries[other, E_BYPASSED] += 1
        other = s.entries[other, E_NEXT]
    unlink(s, server, best_before, best)
    return best


def unlink(s: Coaster, server: int, before: int, entry: int) -> None:
    """Take an entry out of a queue; ``before`` is the one ahead of it, or -1."""
    after = s.entries[entry, E_NEXT]
    if before >= 0:
        s.entries[before, E_NEXT] = after
    else:
        s.servers[server, V_FIRST] = after
    if after < 0:
        s.servers[server, V_LAST] = before


def run_task(s: Coaster, server: int, job: int, long: int, now_s: float) -> float:
    """Let a server run the next task of a job; when that ends."""
    task = s.offsets[job] + s.begun[job]
    s.begun[job] += 1
    s.knobs[K_RUN] += 1
    s.waited_s[task] = now_s - s.at_s[job]
    s.ran_on[task] = server
    s.servers[server, V_JOB] = job
    s.servers[server, V_RUNS_LONG] = long
    s.numbers[N_BUSY_S] += s.runtime_s[task]
    if long != 0:
        s.knobs[K_LONG] += 1
        s.queued_s[server] -= s.mean_s[job]
        s.expected_s[server] = now_s + s.mean_s[job]
    return float(now_s + s.runtime_s[task])


def goes_on(s: Coaster, server: int, now_s: float) -> float:
    """What an idle server does next; when that ends, -1: it has nothing to do."""
    entry = take(s, server)
    if entry < 0:
        if s.servers[server, V_STATE] == DRAINING:
            leaves(s, server, now_s)
        return -1.0
    return run_task(s, server, s.entries[entry, E_JOB], s.entries[entry, E_LONG], now_s)


def active(s: Coaster, change: int, now_s: float) -> None:
    """So many transient servers more are on."""
    s.numbers[N_ACTIVE_S] += s.knobs[K_ON] * (now_s - s.numbers[N_SINCE_S])
    s.numbers[N_SINCE_S] = now_s
    s.knobs[K_ON] += change
    s.knobs[K_PEAK] = max(s.knobs[K_PEAK], s.knobs[K_ON])


def leaves(s: Coaster, server: int, now_s: float) -> None:
    """A transient server that has nothing more to do goes."""
    s.servers[server, V_STATE] = OFF
    active(s, -1, now_s)
    lived_s = now_s - s.since_s[server]
    s.numbers[N_LIVED_S] += lived_s
    s.numbers[N_LONGEST_S] = max(s.numbers[N_LONGEST_S], lived_s)


def release(s: Coaster, now_s: float) -> None:
    """Give up one transient server: one that is only asked for, if there is one, else the one that came last."""
    found = -1
    for server in range(s.knobs[K_FIXED], len(s.servers)):
        state = s.servers[server, V_STATE]
        if state == ASKED_FOR:
            found = server
            break
        if state == ON and (found < 0 or s.since_s[server] > s.since_s[found]):
            found = server
    s.knobs[K_HAVE] -= 1
    if s.servers[found, V_STATE] == ASKED_FOR:
        s.servers[found, V_STATE] = OFF
        return
    s.servers[found, V_STATE] = DRAINING
    opens(s, found)
    if s.servers[found, V_JOB] < 0 and s.servers[found, V_FIRST] < 0:
        leaves(s, found, now_s)


def free_row(s: Coaster) -> int:
    """A transient server that is off; -1: there is none. Those that drain count in the budget until they are gone."""
    for server in range(s.knobs[K_FIXED], len(s.servers)):
        if s.servers[server, V_STATE] == OFF:
            return server
    return -1


def open_server(s: Coaster) -> int:
    """A server that a probe goes to; -1: all have long tasks.

    Eagle asks any server; one with a long task refuses, and says which have none, of which another is asked. With
    messages that take no time that is: any one without a long task, each as likely.
    """
    if s.knobs[K_OPEN] == 0:
        return -1
    return int(s.open[draw(s.draws, s.knobs[K_OPEN])])


def simulate(s: Coaster) -> float:
    """From the first job to the last end; the time of that."""
    ends = [(0.0, 0, 0)]
    ends.pop()
    jobs = len(s.at_s)
    fixed = s.knobs[K_FIXED]
    number = 0
    job = 0
    now_s = 0.0
    for server in range(fixed):
        s.servers[server, V_STATE] = ON
        opens(s, server)
    while job < jobs or len(ends) > 0:
        long_changed = False
        if len(ends) > 0 and (job >= jobs or ends[0][0] <= s.at_s[job]):
            now_s, _, server = heapq.heappop(ends)
            if s.servers[server, V_JOB] < 0:
                # It comes on, unless it was given up before.
                if s.servers[server, V_STATE] == ASKED_FOR and s.since_s[server] <= now_s:
                    s.servers[server, V_STATE] = ON
                    s.knobs[K_CAME] += 1
                    active(s, 1, now_s)
                    opens(s, server)
                    long_changed = True
            else:
                before = s.servers[server, V_JOB]
                s.done[before] += 1
                s.ended_s[before] = now_s
                s.servers[server, V_JOB] = -1
                until_s = -1.0
                if s.servers[server, V_RUNS_LONG] != 0:
                    s.servers[server, V_RUNS_LONG] = 0
                    s.servers[server, V_LONG] -= 1
                    s.expected_s[server] = 0.0
                    s.knobs[K_LONG] -= 1
                    long_changed = True
                    opens(s, server)
                elif s.knobs[K_STICKY] != 0 and s.begun[before] < s.offsets[before + 1] - s.offsets[before]:
                    # Sticky: the next task of the same job.
                    until_s = run_task(s, server, before, 0, now_s)
                if until_s < 0:
                    until_s = goes_on(s, server, now_s)
                if until_s >= 0:
                    number += 1
                    heapq.heappush(ends, (until_s, number, server))
        else:
            now_s = s.at_s[job]
            tasks = s.offsets[job + 1] - s.offsets[job]
            if is_long(s.mean_s[job], s.numbers[N_CUTOFF_S]):
                for _ in range(tasks):
                    server = least_loaded(s.queued_s, s.expected_s, s.knobs[K_SHORT], fixed, now_s)
                    append(s, server, job, 1)
                    s.queued_s[server] += s.mean_s[job]
                    s.servers[server, V_LONG] += 1
                    opens(s, server)
                    if s.servers[server, V_JOB] < 0:
                        until_s = goes_on(s, server, now_s)
                        number += 1
                        heapq.heappush(ends, (until_s, number, server))
                long_changed = True
            else:
                on_demand = 0
                count = probes(tasks, s.numbers[N_PROBE_RATIO], s.knobs[K_LEAST_PROBES])
                for i in range(count + 1):
                    if i == count:
                        # At least one copy goes to a server that nobody takes away (§3.3).
                        if on_demand > 0 or s.knobs[K_SHORT] == 0:
                            break
                        server = draw(s.draws, s.knobs[K_SHORT])
                    else:
                        server = open_server(s)
                        if server < 0:
                            server = draw(s.draws, fixed)
                    if server < fixed:
                        on_demand += 1
                    append(s, server, job, 0)
                    if s.servers[server, V_JOB] < 0:
                        until_s = goes_on(s, server, now_s)
                        if until_s >= 0:
                            number += 1
                            heapq.heappush(ends, (until_s, number, server))
            job += 1
        s.numbers[N_NOW_S] = now_s
        removed = False
        while long_changed and not removed:
            what = wanted(
                s.knobs[K_LONG], fixed + s.knobs[K_HAVE], s.numbers[N_THRESHOLD], s.knobs[K_HAVE], s.knobs[K_MOST]
            )
            server = free_row(s) if what > 0 else -1
            if what < 0:
                # Slowly: one each time (§3.3).
                release(s, now_s)
                removed = True
            elif server < 0:
                break
            else:
                s.servers[server, V_STATE] = ASKED_FOR
                s.since_s[server] = now_s + s.numbers[N_PROVISIONING_S]
                s.knobs[K_HAVE] += 1
                number += 1
                heapq.heappush(ends, (s.since_s[server], number, server))
        if s.knobs[K_VALIDATE] != 0 and s.knobs[K_BROKEN] == 0:
            s.knobs[K_BROKEN] = check(s)
    active(s, 0, now_s)
    for server in range(fixed, len(s.servers)):
        if s.servers[server, V_STATE] == ON:
            leaves(s, server, now_s)
    return now_s
