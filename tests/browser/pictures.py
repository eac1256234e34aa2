"""Pictures of the dashboard's views for the documentation: ``python -m tests.browser.pictures FOLDER``.

The cluster on them is the make-believe one of `tests.browser.stage`, with a day of history drawn up for it.
"""

from __future__ import annotations

import asyncio
import io
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np
import structlog
from PIL import Image
from playwright.async_api import Route

from cluster_manager.history.packs import AT, HOST, SEEN, WIDTH, Pack, encoded
from cluster_manager.store.history import HistoryRow
from tests.browser.chromium import Tab, chromium, tab_of
from tests.browser.stage import staged
from tests.manager.two_agents import TwoHosts

WIDTHS: Final = (400, 1280, 2560)
#: Height of a picture by its width: what a phone, a desk and a wall show at once.
HEIGHTS: Final = {400: 860, 1280: 800, 2560: 1300}
THEMES: Final = ("light", "dark")
VIEWS: Final = {
    "overview": "overview",
    "vms": "vms",
    "tasks": "tasks",
    "preempted": "preempted",
    "operations": "operations",
    "events": "events",
    "host": "host/host-a?range=6h",
    "vm": "vm/shop?range=6h",
    "task": "task/vacuum",
    "operation": "operation/OPERATION",
}
STEP_S: Final = 60
STEPS: Final = 6 * 60


async def remember(hosts: TwoHosts) -> None:
    """Give the first host and its VMs six hours in which they were deflated twice."""
    manager = hosts.cluster.manager
    assert manager is not None
    await manager.recorder.look()
    report = next(
        host.report for _, host in manager.hosts.items() if any(row.name == "shop" for row in host.report.vms)
    )
    generator, names = np.random.default_rng(7), (HOST, *(row.name for row in report.vms))
    values = np.full((STEPS, len(names), WIDTH), np.nan, dtype=np.float32)
    values[..., SEEN] = STEP_S
    taken = np.zeros(STEPS)
    taken[70:150], taken[230:] = 0.5, 0.8
    for number, row in enumerate(report.vms, start=1):
        share = np.zeros(STEPS) if row.priority == "fixed" else taken
        for what, nominal, minimum in (
            ("cpu_cores", row.nominal.cpu_cores, row.minimum.cpu_cores),
            ("memory_mib", row.nominal.memory_mib, row.minimum.memory_mib),
        ):
            away = share * (nominal - minimum)
            for name, figures in (
                ("nominal", nominal),
                ("minimum", minimum),
                ("bound", nominal - away),
                ("guest", away * 0.7),
                ("application", away * 0.4),
                ("hypervisor", away * 0.3),
            ):
                values[:, number, AT[f"{name}_{what}"]] = figures
            pressure = np.round(generator.exponential(1 + 6 * share), 1)
            values[:, number, AT[f"{what.split('_')[0]}_pressure_percent"]] = pressure
            values[:, number, AT[f"{what.split('_')[0]}_pressure_max_percent"]] = np.round(1.6 * pressure, 1)
        bound = values[:, number, AT["bound_memory_mib"]]
        values[:, number, AT["resident_memory_mib"]] = bound * 0.8 + generator.normal(0, 12, STEPS)
    for name, at in AT.items():
        values[:, 0, at] = values[:, 1:, at].max(axis=1) if "pressure" in name else np.nansum(values[:, 1:, at], axis=1)
    values[:, 0, AT["capacity_cpu_cores"]], values[:, 0, AT["capacity_memory_mib"]] = 6.0, 3600.0
    start = int(time.time()) // STEP_S * STEP_S - STEPS * STEP_S
    await manager.store.add_history([HistoryRow(report.id, STEP_S, start, encoded(Pack(start, STEP_S, names, values)))])


async def drawn_up(route: Route) -> None:
    """A matcher's record, since on this stage no prediction has come due."""
    deciles = [
        {
            "low": low / 10,
            "predicted": low / 10 + 0.05,
            "observed": min(low / 10 + 0.02 + 0.01 * (low % 4), 1.0),
            "count": 20 + 9 * low,
        }
        for low in range(10)
    ]
    curve = {"count": 605, "brier": 0.11, "worst_error": 0.03, "deciles": deciles}
    await route.fulfill(json={"machines": curve, "tasks": {**curve, "count": 0, "deciles": []}})


async def picture(tab: Tab, path: Path) -> int:
    """Write what is on show; how many bytes it takes."""
    raw = await tab.page.screenshot()
    image = Image.open(io.BytesIO(raw)).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    image.save(path, optimize=True)
    return path.stat().st_size  # noqa: ASYNC240 (nothing else waits)


async def take(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="ebb-pictures-") as place:
        async with staged(Path(place)) as hosts, chromium() as browser:
            await remember(hosts)
            home = next(row["host"] for row in (await hosts.cluster.get("/v1/vms"))["vms"] if row["name"] == "shop")
            (placed, *_) = (await hosts.cluster.get("/v1/operations?vm=database"))["operations"]
            for theme in THEMES:
                for width in WIDTHS:
                    tab = await tab_of(browser, viewport={"width": width, "height": HEIGHTS[width]}, color_scheme=theme)
                    await tab.page.route("**/v1/calibration", drawn_up)
                    await tab.enter(hosts.url)
                    for name, view in VIEWS.items():
                        await tab.go(view.replace("host-a", home).replace("OPERATION", placed["request_id"]))
                        if "range" in view:
                            await tab.page.locator(".chart canvas").first.wait_for()
                        if name == "vm":
                            await tab.page.locator("h2", has_text="Mechanisms").wait_for()
                        if "range" in view:
                            await tab.page.locator("h2", has_text="History").scroll_into_view_if_needed()
                        size = await picture(tab, folder / f"{name}-{width}-{theme}.png")
                        print(f"{name}-{width}-{theme}.png: {size} bytes")
                    assert tab.errors == [], tab.errors
                    await tab.page.context.close()


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    there = Path(sys.argv[1])
    there.mkdir(parents=True, exist_ok=True)
    asyncio.run(take(there))
