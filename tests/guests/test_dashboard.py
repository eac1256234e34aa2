"""The dashboard in Chromium over a lab of two hosts with real guests: a VM that is placed on the page deflates another.

What the page shows is held against the API, and the API against libvirt, cgroup files and the guest's kernel.
"""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from ebbtide.client import ManagerClient
from ebbtide.deflation.allocations import Priority
from ebbtide.lab.errors import ReadingError
from ebbtide.lab.readings import Gauge
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec
from tests.browser.chromium import Tab, chromium, tab_of
from tests.browser.test_page import bar_of, fill
from tests.guests.conftest import RunningLab
from tests.guests.prometheus import until
from tests.guests.test_layers import vm

pytestmark = [pytest.mark.guest, pytest.mark.timeout(1500)]

#: Only the larger host has room for either, and neither cores nor memory for both.
LOW = VMSpec(
    name="shrinks",
    priority=Priority.DEFLATABLE,
    nominal=Vector(cpu_cores=3, memory_mib=768),
    minimum=Vector(cpu_cores=0.5, memory_mib=448),
)
HIGH = {"vm.name": "placed", "vm.nominal.cpu_cores": "4", "vm.nominal.memory_mib": "2300"}


def written(value: float) -> str:
    """A figure as the page writes it."""
    return f"{round(value, 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0):g}"


class Api:
    """The manager without our client, which the page does not use either."""

    def __init__(self, lab: RunningLab) -> None:
        self._url = lab.state.manager_url
        self._headers = {"Authorization": f"Bearer {lab.token}"}

    async def get(self, path: str) -> Any:
        async with (
            aiohttp.ClientSession(self._url, headers=self._headers) as session,
            session.get(path) as response,
        ):
            assert response.status == 200, await response.text()
            return await response.json()

    async def bound_cores(self, name: str) -> float:
        """What the history says last of a VM's bound CPU; 0: nothing yet."""
        values = (await self.get(f"/v1/vms/{name}/history"))["columns"].get("bound_cpu_cores") or [0.0]
        return float(values[-1] or 0.0)


async def calm(lab: RunningLab, client: ManagerClient, domain: str) -> None:
    """Until the guest has booted, holds all that it was sold, and can give what it has above its minimum."""

    async def spare() -> bool:
        found = await client.vm(LOW.name)
        host = await client.host(found.host or "")
        try:
            await Gauge(domain, lab.state.uri).read()
        except ReadingError:
            return False
        return found.current == LOW.nominal and host.deflatable.memory_mib >= 768 - 448 - 1

    await until(spare, bool, 700.0)


async def shows_what_the_api_says(tab: Tab, api: Api) -> None:
    """All sizes on the views of hosts and VMs, in words and as bars; until the page has heard of it."""
    await tab.go("vms")
    for row in (await api.get("/v1/vms"))["vms"]:
        for head, name, unit in (("CPU", "cpu_cores", "cores"), ("memory", "memory_mib", "MiB")):
            cell = f'[data-key="{row["name"]}"] [data-head="{head}"]'
            current, nominal = row["current"][name], row["nominal"][name]
            await tab.until(cell, f"{written(current)} of {written(nominal)} {unit}")
            assert await bar_of(tab, cell) == pytest.approx(current / nominal, abs=1e-4)
    await tab.go("overview")
    hosts = (await api.get("/v1/hosts"))["hosts"]
    assert len(hosts) == 2
    for host in hosts:
        card = f'.hosts [data-key="{host["id"]}"]'
        for name, unit in (("cpu_cores", "cores"), ("memory_mib", "MiB")):
            capacity = host["capacity"][name]
            used = max(capacity - host["free"][name], 0.0)
            figure = f'{card} [data-key="{name}"]'
            await tab.until(figure, f"{written(used)} of {written(capacity)} {unit} not free")
            assert await bar_of(tab, figure) == pytest.approx(used / capacity, abs=1e-4)


async def chart_follows(tab: Tab, api: Api, moved: Any) -> None:
    """Until the history has moved, and the chart on show says what it says."""

    async def alike() -> tuple[float, str]:
        bound = await api.bound_cores(LOW.name)
        label = await tab.page.locator('.chart [role="img"][aria-label^="CPU: "]').first.get_attribute("aria-label")
        assert label is not None
        return bound, label

    await until(alike, lambda now: moved(now[0]) and f"bound {written(now[0])}," in now[1], 300.0)


async def test_a_vm_placed_on_the_page_deflates_a_real_guest_and_the_page_shows_what_api_and_kernel_say(
    lab: RunningLab,
) -> None:
    api, token = Api(lab), lab.token
    async with vm(lab, LOW) as (client, domain), chromium() as browser:
        await calm(lab, client, domain)
        tab = await tab_of(browser)
        await tab.enter(lab.state.manager_url, "vms", token)
        await shows_what_the_api_says(tab, api)
        await tab.go(f"vm/{LOW.name}?range=1h")
        await chart_follows(tab, api, lambda bound: bound == LOW.nominal.cpu_cores)

        await tab.page.keyboard.press("n")
        await fill(tab, HIGH, priority="fixed")
        await tab.page.get_by_role("button", name="Try it").click()
        would = tab.page.get_by_role("region", name="Who would shrink")
        await would.wait_for()
        assert LOW.name in await would.inner_text()
        assert [row["name"] for row in (await api.get("/v1/vms"))["vms"]] == [LOW.name], "a try changes nothing"
        try:
            await tab.page.get_by_role("button", name="Place a VM").last.click()
            await tab.page.locator("dialog .outcome.done").wait_for(timeout=300_000)
            steps = await tab.page.locator("dialog .steps li").all_inner_texts()
            await tab.page.get_by_role("button", name="Close", exact=True).click()
            operation = (await api.get("/v1/operations?vm=placed"))["operations"][0]
            assert (operation["state"], operation["host"]) == ("done", lab.state.hosts[0].id)
            assert steps == operation["progress"]

            low = await client.vm(LOW.name)
            assert low.current.cpu_cores == 2.0
            assert low.minimum.memory_mib <= low.current.memory_mib < LOW.nominal.memory_mib - 100
            real = await Gauge(domain, lab.state.uri).read()
            assert real.cpu_cores == pytest.approx(low.current.cpu_cores, abs=0.01)
            assert real.memory_mib == pytest.approx(low.current.memory_mib, abs=2)
            await shows_what_the_api_says(tab, api)
            await tab.go("vms")
            await tab.until(f'[data-key="{LOW.name}"]', "deflated")
            await tab.go(f"vm/{LOW.name}?range=1h")
            await chart_follows(tab, api, lambda bound: bound == 2.0)
            await tab.until(".scroll .events", "deflated")
            ledger = tab.page.locator("section", has=tab.page.locator("h2", has_text="Layers of its last resize"))
            told = await ledger.inner_text()
            explained = (await api.get(f"/v1/vms/{LOW.name}/explain"))["explanation"]["resizes"][-1]["outcome"]
            assert explained["sentence"] in told
            for row in explained["ledger"]:
                assert written(row["verified"]) in told, row

            assert tab.errors == []
            await tab.go("vm/placed")
            await tab.page.get_by_role("button", name="Delete").click()
            await tab.page.fill("#confirm", "placed")
            await tab.page.locator("#act .destroys").click()
            await tab.page.locator("dialog .outcome.done").wait_for(timeout=300_000)
            await tab.page.get_by_role("button", name="Close", exact=True).click()
        finally:
            if any(row.name == "placed" for row in await client.vms()):
                await client.wait(await client.delete("placed"), limit_s=300)

        async def grown() -> bool:
            return (await client.vm(LOW.name)).current == LOW.nominal

        await until(grown, bool, 300.0)
        await shows_what_the_api_says(tab, api)
        # The view of a VM may ask for it once more after it is gone.
        assert [error for error in tab.errors if "status of 404" not in error] == []
        assert not [url for url in tab.asked if token in url]
