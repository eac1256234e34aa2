"""`metrics-manager`, `metrics-agent`: what Prometheus' metrics cost a manager and a host agent: kept, and asked for.

A real manager with a thousand hosts that report (as in `placement`); a real `ebb-hostagent` over real guests. CPU time
as the kernel counts it. ``EBB_BENCH_BEFORE``: a checkout without metrics, to compare with in the same run.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import aiohttp
import psutil

from benchmarks.deflating import idle
from benchmarks.figures import BenchmarkFailed, Figure, Figures, ratios
from benchmarks.host.bench_host import BenchHost, bench, run_async
from benchmarks.passes import Pass
from benchmarks.placing.placement_hosts import VMS
from benchmarks.placing.placement_manager import agents_of, manager_on
from ebbtide.client import ManagerClient
from ebbtide.deflation.resources import ResourceVector
from ebbtide.lab import processes
from hostagent.running import OVERHEAD_MIB

HOSTS: Final = 1000
WINDOW_S: Final = 8.0
GUESTS: Final = 2
IDLE_S: Final = 30.0
SETTLE_S: Final = 15.0
SCRAPES: Final = 50
#: Between two scrapes, as deploy/prometheus has it, and between two reports of a host.
SCRAPED_EVERY_S: Final = 15.0
REPORTED_EVERY_S: Final = 2.0
BEFORE: Final = "EBB_BENCH_BEFORE"


def manager(how: Pass) -> Figures:
    """Raises BenchmarkFailed."""
    with tempfile.TemporaryDirectory(prefix="ebb-bench-") as directory:
        return _manager(Path(directory), checkouts(), how)


def agent(how: Pass) -> Figures:
    """Raises BenchmarkFailed, EbbError or LabError."""
    codes = checkouts()
    per_vm = idle.SIZE.vector() + ResourceVector(memory_mib=max(OVERHEAD_MIB.values()))
    count = 1 if how.quick else GUESTS
    with bench(per_vm * count, how.report, daemons=True) as ground:
        return run_async(_agent(ground, count, codes, how))


def checkouts() -> dict[str, Path | None]:
    """What is compared: this checkout, and the one before, if one is named."""
    found = os.environ.get(BEFORE)
    if not found:
        return {"now": None}
    if not (Path(found) / "cluster_manager").is_dir():
        raise BenchmarkFailed(f"{BEFORE}={found} is no checkout")
    return {"before": Path(found), "now": None}


def _manager(directory: Path, codes: Mapping[str, Path | None], how: Pass) -> Figures:
    hosts, window_s = (50, 0.5) if how.quick else (HOSTS, WINDOW_S)
    costs: dict[str, list[float]] = {name: [] for name in codes}
    scrapes, sizes = [], []
    with agents_of(hosts) as agents:
        for number in range(how.runs):
            for name, code in codes.items():
                with manager_on(directory, directory / f"{name}-{number}.sqlite", code) as manager:
                    agents.begin(manager.port, 0.0, 0.0)
                    agents.result()
                    before_s = manager.cpu_s()
                    agents.begin(manager.port, window_s, 0.5)
                    result = agents.result()
                    costs[name].append(1000 * (manager.cpu_s() - before_s) / result["answered"])
                    if name == "now":
                        manager.metrics()
                        before_s = manager.cpu_s()
                        for _ in range(SCRAPES):
                            sizes.append(len(manager.metrics()) / 2**10)
                        scrapes.append(1000 * (manager.cpu_s() - before_s) / SCRAPES)
            found = ", ".join(f"{name} {spent[-1]:.3f} ms" for name, spent in costs.items())
            how.report(f"run {number + 1}: a report costs {found}; a scrape {scrapes[-1]:.0f} ms")
    where = f"{hosts} hosts of {VMS} VMs, half of the reports changed"
    reports = hosts * SCRAPED_EVERY_S / REPORTED_EVERY_S
    figures = {
        "report_cpu_ms": Figure.over(costs["now"], "ms", f"the manager's CPU time a report; {where}"),
        "scrape_cpu_ms": Figure.over(scrapes, "ms", f"the manager's CPU time a scrape of its own metrics; {where}"),
        "scrape_kib": Figure.over(sizes, "KiB", f"size of the manager's own metrics; {where}"),
        "scraped_to_unscraped": Figure.over(
            [1 + scrape / reports / report for scrape, report in zip(scrapes, costs["now"], strict=True)],
            "ratio",
            f"reckoned, by scrape_cpu_ms: CPU time a report with its share of a scrape every {SCRAPED_EVERY_S:g} s, to "
            f"that without; hosts report every {REPORTED_EVERY_S:g} s; {where}",
        ),
    }
    if "before" in costs:
        figures["report_cpu_before_ms"] = Figure.over(costs["before"], "ms", f"the same without metrics; {where}")
        figures["report_to_before"] = Figure.over(
            ratios(costs["now"], costs["before"]), "ratio", f"the manager's CPU time a report to that before; {where}"
        )
    return figures


async def _agent(ground: BenchHost, count: int, codes: Mapping[str, Path | None], how: Pass) -> Figures:
    """An idle agent: before, now, and scraped through its manager."""
    token = ground.state.manager_token_file.read_text().strip()
    window_s, settle_s = (2.0, 1.0) if how.quick else (IDLE_S, SETTLE_S)
    spent: dict[str, list[float]] = {name: [] for name in (*codes, "scraped")}
    proxied: list[float] = []
    async with ManagerClient(ground.state.manager_url, token) as client:
        await idle.start(client, count, how)
        passing = _process(ground, "manager")
        for number in range(how.runs):
            # One after the other in each run, so that what settles with time is on neither side alone.
            for name, code in codes.items():
                await _restart(ground, code)
                await asyncio.sleep(settle_s)
                looking = _process(ground, ground.host.id)
                how.report(f"looking at the agent of {name} for {window_s:g} s ({number + 1} of {how.runs})")
                spent[name].append(await _idle(looking, window_s))
                if name == "now":
                    url = f"{ground.state.manager_url}/v1/hosts/{ground.host.id}/metrics"
                    # The first one of a process also makes what all later ones use.
                    await _scrape(url, token)
                    before_s, at_s = idle.cpu_s(looking), idle.cpu_s(passing)
                    for _ in range(SCRAPES):
                        await _scrape(url, token)
                    spent["scraped"].append(1000 * (idle.cpu_s(looking) - before_s) / SCRAPES)
                    proxied.append(1000 * (idle.cpu_s(passing) - at_s) / SCRAPES)
    where = f"{count} settled VMs, windows of {window_s:g} s, a manager listens"
    figures = {
        "agent_cpu": Figure.over(spent["now"], "% of one core", where),
        "agent_scrape_cpu_ms": Figure.over(spent["scraped"], "ms", f"the agent's CPU time a scrape; {where}"),
        "manager_proxied_scrape_cpu_ms": Figure.over(
            proxied, "ms", f"the manager's CPU time for passing one host's metrics on; {where}"
        ),
        "agent_scraped_to_unscraped": Figure.over(
            [1 + ms / 10 / SCRAPED_EVERY_S / share for ms, share in zip(spent["scraped"], spent["now"], strict=True)],
            "ratio",
            f"reckoned, by agent_scrape_cpu_ms: with a scrape every {SCRAPED_EVERY_S:g} s to without; {where}",
        ),
    }
    if "before" in codes:
        figures["agent_cpu_before"] = Figure.over(
            spent["before"], "% of one core", f"the same without metrics; {where}"
        )
        figures["agent_to_before"] = Figure.over(
            ratios(spent["now"], spent["before"]), "ratio", f"the agent's CPU time to that before; {where}"
        )
    return figures


async def _scrape(url: str, token: str) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(url) as response:
        if response.status != 200 or b"ebbtide_vm_bound_memory_bytes" not in await response.read():
            raise BenchmarkFailed(f"{url} answers {response.status}, and no metrics of VMs")


async def _idle(process: psutil.Process, window_s: float) -> float:
    before_s, began = idle.cpu_s(process), time.monotonic()
    await asyncio.sleep(window_s)
    return 100 * (idle.cpu_s(process) - before_s) / (time.monotonic() - began)


async def _restart(ground: BenchHost, code: Path | None) -> None:
    """Start the agent from another checkout. Its VMs run on."""
    lab = ground.lab
    state = lab.state()
    daemon = state.daemon(ground.host.id)
    if daemon.process is not None:
        await asyncio.to_thread(processes.stop, [daemon.process])
    argv = [word for word in daemon.argv if not word.startswith("PYTHONPATH=") and word != "env"]
    daemon.argv = ["env", f"PYTHONPATH={code}", *argv] if code is not None else argv
    lab.file.save(state)
    await asyncio.to_thread(lab.start_daemon, ground.host.id)
    await asyncio.to_thread(lab.wait_ready)


def _process(ground: BenchHost, name: str) -> psutil.Process:
    record = ground.lab.state().daemon(name).process
    if record is None:
        raise BenchmarkFailed(f"{name} has no process")
    return psutil.Process(record.pid)
