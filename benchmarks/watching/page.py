"""`page`: what the dashboard costs a browser and its manager, with a thousand hosts that report and 20,000 VMs.

A real manager with a history (`benchmarks.watching.fleet`), and one tab of a real headless Chromium; times and memory
by Chromium's own figures (Performance.getMetrics) and the kernel's.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import psutil

from benchmarks.figures import Figure, Figures
from benchmarks.passes import Pass
from benchmarks.placing.placement_hosts import VMS
from benchmarks.watching.chromium import FLAGS, chromium_path
from benchmarks.watching.fleet import CHANGED, HOSTS, Fleet, fleet

if TYPE_CHECKING:
    from playwright.sync_api import Browser, CDPSession, Page

#: What is looked at for how long, seconds, and how long the page has for reading all of the cluster meanwhile.
WINDOW_S: Final = 15.0
READING_S: Final = 35.0
LIMIT_MS: Final = 120_000.0

Taken = dict[str, list[float]]


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed."""
    # Only who measures a browser needs what drives it.
    from playwright.sync_api import sync_playwright

    hosts, window_s = (30, 2.0) if how.quick else (HOSTS, WINDOW_S)
    taken: Taken = defaultdict(list)
    with fleet(hosts) as made, sync_playwright() as playwright:
        for number in range(how.runs):
            browser = playwright.chromium.launch(executable_path=chromium_path(), args=list(FLAGS))
            try:
                _once(made, browser, window_s, taken, number)
            finally:
                browser.close()
            how.report(f"run {number + 1}: " + ", ".join(f"{name} {values[-1]:.4g}" for name, values in taken.items()))
    where = f"{hosts} hosts of {VMS} VMs, all report every 2 s, {CHANGED:.0%} of the reports changed"
    window = f"over {window_s:g} s; {where}"
    told = {
        "first_paint_ms": ("ms", "from the address to the page's first words (first-contentful-paint)"),
        "first_rows_ms": ("ms", f"from the token to the first rows of VMs; {where}"),
        "all_read_s": ("s", f"from the token until all hosts and VMs were read; {where}"),
        "search_ms": ("ms", f"from a word in the search field to its rows among all VMs; {where}"),
        "overview_cpu": ("% of one core", f"the tab's main thread with the overview on show, {window}"),
        "vms_cpu": ("% of one core", f"the tab's main thread with the list of VMs on show, {window}"),
        "chart_ms": ("ms", f"from a VM's address to its charts of 7 days; {where}"),
        "heap_mib": ("MiB", f"JavaScript's heap after a collection, everything read; {where}"),
        "tab_mib": ("MiB", f"resident memory of the tab's process; {where}"),
        "nodes": ("nodes", f"of the document, with the list of VMs on show; {where}"),
        "manager_cpu": ("% of one core", f"of the manager with one tab open, {window}"),
        "manager_cpu_alone": ("% of one core", f"of the manager without one, {window}"),
        "manager_mib": ("MiB", f"resident memory of the manager, history included; {where}"),
    }
    return {name: Figure.over(taken[name], unit, of) for name, (unit, of) in told.items()}


def _once(made: Fleet, browser: Browser, window_s: float, taken: Taken, number: int) -> None:
    made.begin(3 * window_s + READING_S)
    # The manager is the same in all runs and takes more CPU the longer it runs, so neither is always first.
    if number % 2:
        _with_tab(made, browser, window_s, taken)
        _alone(made, window_s, taken)
    else:
        _alone(made, window_s, taken)
        _with_tab(made, browser, window_s, taken)
    made.agents.result()


def _alone(made: Fleet, window_s: float, taken: Taken) -> None:
    began, before_s = time.monotonic(), made.manager.cpu_s()
    time.sleep(window_s)
    taken["manager_cpu_alone"].append(100 * (made.manager.cpu_s() - before_s) / (time.monotonic() - began))


def _with_tab(made: Fleet, browser: Browser, window_s: float, taken: Taken) -> None:
    page = browser.new_page()
    page.set_default_timeout(LIMIT_MS)
    page.goto(f"{made.manager.url}/#vms")
    paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    taken["first_paint_ms"].append(page.evaluate(paint))
    page.fill("#token", made.manager.token)
    began = time.perf_counter()
    page.press("#token", "Enter")
    page.locator("#view tbody tr").first.wait_for()
    taken["first_rows_ms"].append(1000 * (time.perf_counter() - began))
    page.locator("#summary").filter(has_text="as of").filter(has_not_text="loading").wait_for()
    taken["all_read_s"].append(time.perf_counter() - began)

    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    name = f"vm-000020-{VMS - 1}"
    began = time.perf_counter()
    page.fill("[data-query=q]", name)
    page.locator(f'#view tr[data-key="{name}"]').wait_for()
    taken["search_ms"].append(1000 * (time.perf_counter() - began))
    page.fill("[data-query=q]", "")
    before_s, began = made.manager.cpu_s(), time.monotonic()
    taken["vms_cpu"].append(_busy(session, window_s))
    taken["manager_cpu"].append(100 * (made.manager.cpu_s() - before_s) / (time.monotonic() - began))
    session.send("HeapProfiler.collectGarbage")
    taken["nodes"].append(_metrics(session)["Nodes"])
    _show(page, "overview")
    taken["overview_cpu"].append(_busy(session, window_s))
    began = time.perf_counter()
    _show(page, "vm/vm-000000-1?range=7d")
    page.locator(".chart canvas").first.wait_for()
    taken["chart_ms"].append(1000 * (time.perf_counter() - began))
    session.send("HeapProfiler.collectGarbage")
    taken["heap_mib"].append(_metrics(session)["JSHeapUsedSize"] / 2**20)
    taken["tab_mib"].append(_renderer_mib())
    taken["manager_mib"].append(made.manager.resident_mib())
    page.close()


def _show(page: Page, view: str) -> None:
    page.evaluate("view => { location.hash = view; }", view)


def _metrics(session: CDPSession) -> dict[str, float]:
    return {row["name"]: row["value"] for row in session.send("Performance.getMetrics")["metrics"]}


def _busy(session: CDPSession, window_s: float) -> float:
    """How busy the tab's main thread is, per cent of one core."""
    before, began = _metrics(session)["TaskDuration"], time.monotonic()
    time.sleep(window_s)
    return 100 * (_metrics(session)["TaskDuration"] - before) / (time.monotonic() - began)


def _renderer_mib() -> float:
    """Resident memory of the largest renderer among this process' own browsers."""
    found = [
        process.memory_info().rss
        for process in psutil.Process().children(recursive=True)
        if "--type=renderer" in process.cmdline()
    ]
    return max(found) / 2**20
