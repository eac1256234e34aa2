"""`history-cost`: what the history of hosts and VMs costs a manager a report: kept, not kept, and before there was one.

A real manager with hosts that report every two seconds (as in `history`), half of the reports changed; CPU time as the
kernel counts it. ``EBB_BENCH_BEFORE``: a checkout without metrics and history, to compare with in the same run.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.figures import Figure, Figures, ratios
from benchmarks.passes import Pass
from benchmarks.placing.placement_hosts import VMS
from benchmarks.placing.placement_manager import EVERY_S, agents_of, manager_on
from benchmarks.placing.placement_store import fill
from benchmarks.watching.fleet import USAGE_EACH
from benchmarks.watching.metrics import checkouts

#: As many as a busy machine of two cores keeps up with; what the history takes grows with hosts as reports do.
HOSTS: Final = 300
#: Two samples of each host by the manager, and from a quarter of them what their VMs use.
WINDOW_S: Final = 30.0
CHANGED: Final = 0.5


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed."""
    hosts, window_s = (50, 0.5) if how.quick else (HOSTS, WINDOW_S)
    # With history off nobody tells what VMs use, as before there was one.
    wanted = {"off": None, **checkouts()}
    costs: dict[str, list[float]] = {name: [] for name in wanted}
    with tempfile.TemporaryDirectory(prefix="ebb-bench-") as name, agents_of(hosts) as agents:
        directory = Path(name)
        full, database = directory / "full.sqlite", directory / "manager.sqlite"
        fill(full, hosts, agents.port)
        for number in range(how.runs):
            order = list(wanted.items())
            for which, code in order if number % 2 else order[::-1]:
                shutil.copyfile(full, database)
                options = ("--no-history",) if which == "off" else ()
                with manager_on(directory, database, code, options) as manager:
                    agents.begin(manager.port, 0.0, 0.0)
                    agents.result()
                    before_s = manager.cpu_s()
                    agents.begin(manager.port, window_s, CHANGED, EVERY_S, USAGE_EACH if which == "now" else 0)
                    result = agents.result()
                    costs[which].append(1000 * (manager.cpu_s() - before_s) / result["answered"])
                for left in directory.glob("manager.sqlite*"):
                    left.unlink()
            found = ", ".join(f"{name} {spent[-1]:.3f} ms" for name, spent in costs.items())
            how.report(f"run {number + 1}: a report costs {found}; {result['answered'] / result['seconds']:.0f}/s")
    where = f"{hosts} hosts of {VMS} VMs, a report every {EVERY_S:g} s, {CHANGED:.0%} of them changed"
    figures = {
        "report_cpu_ms": Figure.over(costs["now"], "ms", f"the manager's CPU time a report, all that it does; {where}"),
        "report_without_cpu_ms": Figure.over(costs["off"], "ms", f"the same where no history is kept; {where}"),
        "report_to_without": Figure.over(
            ratios(costs["now"], costs["off"]), "ratio", f"CPU time a report to that without history; {where}"
        ),
    }
    if "before" in costs:
        figures["report_before_cpu_ms"] = Figure.over(
            costs["before"], "ms", f"the same before there were metrics and history; {where}"
        )
        figures["report_to_before"] = Figure.over(
            ratios(costs["now"], costs["before"]), "ratio", f"CPU time a report to that before; {where}"
        )
    return figures
