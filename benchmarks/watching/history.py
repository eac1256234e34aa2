"""`history`: what it takes to show a thousand hosts and twenty thousand VMs with their history: the manager's half.

A real manager on a month of history, to which all hosts report every two seconds (`benchmarks.watching.fleet`), with
history and without, one after the other in each run.
"""

from __future__ import annotations

import json
import time
from typing import Final
from urllib.parse import quote

from benchmarks.figures import BenchmarkFailed, Figure, Figures, ratios
from benchmarks.passes import Pass
from benchmarks.placing.placement_hosts import VMS, host_name
from benchmarks.placing.placement_manager import EVERY_S, RunningManager
from benchmarks.watching.fleet import CHANGED, HOSTS, REMEMBERED, Fleet, prepared

#: Long enough for two samples of each host; and what the first of them, which has to take all apart, is left to.
WINDOW_S: Final = 32.0
SETTLE_S: Final = 20.0
DAY_S: Final = 86_400.0
#: Stretches of a history that are asked for, and how often each.
STRETCHES: Final = {"6h": 0.25 * DAY_S, "3d": 3 * DAY_S, "30d": 30 * DAY_S}
ASKED: Final = 5


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed."""
    hosts, window_s, settle_s = (50, 2.0, 1.0) if how.quick else (HOSTS, WINDOW_S, SETTLE_S)
    resident: dict[bool, list[float]] = {True: [], False: []}
    used: dict[bool, list[float]] = {True: [], False: []}
    answers: dict[str, list[float]] = {}
    with prepared(hosts) as ready:
        for number in range(how.runs):
            for history in (True, False) if number % 2 else (False, True):
                with ready.managed(history=history) as made:
                    resident[history].append(_watched(made, history, window_s, settle_s, used, answers))
            last = {name: f"{values[-1]:.0f} ms" for name, values in answers.items()}
            how.report(
                f"run {number + 1}: with history {resident[True][-1]:.0f} MiB, {used[True][-1]:.2f} ms a report; "
                f"without {resident[False][-1]:.0f} MiB, {used[False][-1]:.2f} ms; {last}"
            )
    where = f"{hosts} hosts of {VMS} VMs that report every {EVERY_S:g} s, {CHANGED:.0%} of that changed"
    month = f"the manager has a month of history of {min(hosts, REMEMBERED)} hosts, and all report"
    return {
        "manager_resident_mib": Figure.over(resident[True], "MiB", f"the manager's memory, history kept; {where}"),
        "manager_resident_without_mib": Figure.over(resident[False], "MiB", f"the same, history not kept; {where}"),
        "report_cpu_ms": Figure.over(used[True], "ms", f"the manager's CPU time a report, all that it does; {where}"),
        "report_cpu_to_without": Figure.over(
            ratios(used[True], used[False]), "ratio", f"the same to that of a manager without history; {where}"
        ),
        "history_kib_per_host": Figure.over(
            [ready.history_bytes / 2**10],
            "KiB",
            f"a month of history of a host of {VMS} VMs in the store, figures of use that never stand still",
        ),
        **{
            f"answer_{name}_ms": Figure.over(values, "ms", f"of GET {name}, median of {ASKED}; {month}; {where}")
            for name, values in answers.items()
        },
    }


def _watched(
    made: Fleet,
    history: bool,
    window_s: float,
    settle_s: float,
    used: dict[bool, list[float]],
    answers: dict[str, list[float]],
) -> float:
    """Take the figures of one manager; returns its memory in MiB."""
    made.begin(settle_s, usage=history)
    made.agents.result()
    before_s = made.manager.cpu_s()
    made.begin(window_s, usage=history)
    result = made.agents.result()
    used[history].append(1000 * (made.manager.cpu_s() - before_s) / result["answered"])
    memory_mib = made.manager.resident_mib()
    if history:
        made.begin(settle_s, usage=history)
        for name, seconds in _answers(made.manager).items():
            answers.setdefault(name, []).append(1000 * seconds)
        made.agents.result()
    return memory_mib


def _answers(manager: RunningManager) -> dict[str, float]:
    """How long answers take while reports come, seconds: the median of some."""
    paths = {"hosts": "/v1/hosts?limit=1000", "vms_page": "/v1/vms?limit=1000"}
    now = time.time()
    for name, seconds in STRETCHES.items():
        paths[f"host_history_{name}"] = f"/v1/hosts/{host_name(1)}/history?from={now - seconds:.0f}"
        paths[f"vm_history_{name}"] = f"/v1/vms/vm-{1:06d}-1/history?from={now - seconds:.0f}"
    taken: dict[str, list[float]] = {name: [] for name in (*paths, "vms_all")}
    for _ in range(ASKED):
        for name, path in paths.items():
            taken[name].append(_seconds(manager, path)[0])
        began, after = time.perf_counter(), ""
        while after is not None:
            _, body = _seconds(manager, f"/v1/vms?limit=1000{after and f'&after={quote(after)}'}")
            after = json.loads(body)["next"]
        taken["vms_all"].append(time.perf_counter() - began)
    return {name: sorted(values)[len(values) // 2] for name, values in taken.items()}


def _seconds(manager: RunningManager, path: str) -> tuple[float, bytes]:
    began = time.perf_counter()
    body = manager.get(path)
    if not body:
        raise BenchmarkFailed(f"{path} has no answer")
    return time.perf_counter() - began, body
