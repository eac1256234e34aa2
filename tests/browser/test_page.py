"""The dashboard in Chromium, with a real manager and real host agents over a make-believe hypervisor."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, get_args
from urllib.parse import parse_qsl, urlsplit

import pytest
from playwright.async_api import Browser, Error, Route

from ebbtide.cli.top.columns import is_off
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import ForgottenHost
from ebbtide.messages.vms import ManagedState
from tests.browser.chromium import Tab, tab_of
from tests.browser.stage import place, staged
from tests.cli.top.pictures import vm as make_vm
from tests.manager.cluster import vm
from tests.manager.tasks.test_tasks import becomes
from tests.manager.two_agents import TwoHosts, two_hosts

pytestmark = pytest.mark.service

FORM = {"vm.name": "orders", "vm.nominal.cpu_cores": "5", "vm.nominal.memory_mib": "1400"}


async def fill(tab: Tab, fields: dict[str, str], **selects: str) -> None:
    for name, value in fields.items():
        await tab.page.fill(f'#act [name="{name}"]', value)
    for name, value in selects.items():
        await tab.page.select_option(f'#act [name="vm.{name}"]', value)


async def bar_of(tab: Tab, selector: str) -> float:
    """The share of a bar that is held, by its drawing."""
    width = await tab.page.locator(f"{selector} svg.bar rect.used").first.get_attribute("width")
    assert width is not None
    return float(width.removesuffix("%")) / 100


async def newest(hosts: TwoHosts, name: str) -> tuple[float, str]:
    """What the manager's history says of a VM's bound CPU now, and as the page writes it."""
    assert hosts.cluster.manager is not None
    await hosts.cluster.manager.recorder.look()
    values = (await hosts.cluster.get(f"/v1/vms/{name}/history"))["columns"]["bound_cpu_cores"]
    return values[-1], f"bound {round(values[-1], 2):g},"


async def chart_says(tab: Tab, name: str, bound: str, window: str) -> None:
    await tab.go(f"vm/{name}?range={window}")
    await tab.page.locator(f'.chart [role="img"][aria-label^="CPU: "][aria-label*="{bound}"] canvas').first.wait_for()


async def test_a_vm_placed_on_the_page_deflates_another_and_bars_and_chart_move_with_the_apis_figures(
    tmp_path: Path, browser: Browser
) -> None:
    async with two_hosts(tmp_path) as hosts:
        await place(hosts, vm("shop", cpu_cores=6.0, memory_mib=1500.0))
        await place(hosts, vm("wiki", cpu_cores=6.0, memory_mib=1500.0))
        tab = await tab_of(browser)
        await tab.enter(hosts.url)
        before, said = await newest(hosts, "shop")
        await chart_says(tab, "shop", said, "1h")
        await tab.go("vms")
        full = await bar_of(tab, '[data-key="shop"]')
        assert full == 1.0

        await tab.page.keyboard.press("n")
        await fill(tab, FORM, priority="fixed")
        await tab.page.get_by_role("button", name="Try it").click()
        tried = tab.page.get_by_role("region", name="Who would shrink")
        await tried.wait_for()
        gives = await tried.inner_text()
        assert not [row for row in (await hosts.cluster.get("/v1/vms"))["vms"] if row["name"] == "orders"]
        await tab.page.get_by_role("button", name="Place a VM").last.click()
        await tab.until("dialog .outcome", "done")
        steps = await tab.page.locator("dialog .steps li").all_inner_texts()
        await tab.page.get_by_role("button", name="Close", exact=True).click()

        operation = (await hosts.cluster.get("/v1/operations?vm=orders"))["operations"][0]
        assert steps == operation["progress"]
        shrunk = next(row for row in (await hosts.cluster.get("/v1/vms"))["vms"] if row["current"] != row["nominal"])
        assert shrunk["name"] in gives
        await tab.until(f'[data-key="{shrunk["name"]}"]', "deflated")
        for row in (await hosts.cluster.get("/v1/vms"))["vms"]:
            cell = f'[data-key="{row["name"]}"] [data-head="CPU"]'
            current, nominal = row["current"]["cpu_cores"], row["nominal"]["cpu_cores"]
            await tab.until(cell, f"{current:g} of {nominal:g} cores")
            assert await bar_of(tab, cell) == pytest.approx(current / nominal, abs=1e-4)
        await tab.go("overview")
        for host in (await hosts.cluster.get("/v1/hosts"))["hosts"]:
            taken = host["capacity"]["cpu_cores"] - host["free"]["cpu_cores"]
            await tab.until(f'.hosts [data-key="{host["id"]}"]', f"{taken:g} of 6 cores not free")
        # Of memory it may be the machine's own programs.
        await tab.until(".key", "not free: held by VMs or by what else the host runs")

        after, said = await newest(hosts, shrunk["name"])
        assert after < before
        await chart_says(tab, shrunk["name"], said, "6h")
        await tab.until(".scroll .events", "deflated")
        assert tab.errors == []


async def test_what_was_refused_stands_at_its_field_and_changes_nothing(tmp_path: Path, browser: Browser) -> None:
    async with two_hosts(tmp_path) as hosts:
        tab = await tab_of(browser)
        await tab.enter(hosts.url, "vms")
        await tab.page.get_by_role("button", name="Place a VM").click()
        await fill(tab, {**FORM, "vm.name": "Not a name"})
        await tab.page.get_by_role("button", name="Place a VM").last.click()
        wrong = tab.page.locator('#act [data-key="vm.name"] .error')
        await wrong.wait_for()
        assert "lower-case letters" in await wrong.inner_text()
        assert await tab.page.locator('#act [name="vm.name"]').get_attribute("aria-invalid") == "true"
        assert await tab.page.locator('#act [name="vm.name"]').input_value() == "Not a name", "what was typed stays"
        assert (await hosts.cluster.get("/v1/operations"))["operations"] == []
        assert [error for error in tab.errors if "status of 400" not in error] == []


async def test_what_destroys_is_done_only_after_its_name_was_typed(tmp_path: Path, browser: Browser) -> None:
    async with two_hosts(tmp_path) as hosts:
        await place(hosts, vm("shop"))
        tab = await tab_of(browser)
        await tab.enter(hosts.url, "vm/shop")
        await tab.page.get_by_role("button", name="Delete").click()
        await tab.page.locator("#act .destroys").click()
        assert (await hosts.cluster.get("/v1/operations?kind=delete"))["operations"] == []
        await tab.page.fill("#confirm", "shop")
        await tab.page.locator("#act .destroys").click()
        await tab.until("dialog .outcome", "done")
        assert (await hosts.cluster.get("/v1/vms"))["vms"] == []


async def test_a_vms_page_shows_its_latest_events_newest_first(tmp_path: Path, browser: Browser) -> None:
    async with two_hosts(tmp_path) as hosts:
        await place(hosts, vm("shop"))
        found = await hosts.cluster.get("/v1/vms/shop/explain")
        event = found["events"][0]
        # As the manager answers it: oldest first.
        found["events"] = [{**event, "id": n, "sentence": f"no. {n};"} for n in range(1, 21)]

        async def answer(route: Route) -> None:
            await route.fulfill(json=found)

        tab = await tab_of(browser)
        await tab.page.route("**/v1/vms/shop/explain", answer)
        await tab.enter(hosts.url, "vm/shop")
        await tab.until(".events", "no. 20;")
        shown = " ".join(await tab.page.locator(".events li").all_inner_texts())
        assert re.findall(r"no\. (\d+);", shown) == [str(n) for n in range(20, 8, -1)]
        assert tab.errors == []


async def test_a_dialog_keeps_nothing_of_what_was_typed_for_another_vm(tmp_path: Path, browser: Browser) -> None:
    async with two_hosts(tmp_path) as hosts:
        await place(hosts, vm("shop"))
        tab = await tab_of(browser)
        await tab.enter(hosts.url, "vm/shop")
        await tab.page.get_by_role("button", name="Stop").click()
        await tab.page.fill("#confirm", "shop")
        await tab.page.get_by_role("button", name="Close", exact=True).click()
        await tab.page.get_by_role("button", name="Delete").click()
        assert await tab.page.locator("#confirm").input_value() == ""
        await tab.page.get_by_role("button", name="Close", exact=True).click()
        for _ in range(2):
            await tab.page.get_by_role("button", name="Migrate").click()
            assert not await tab.page.is_checked("#act [name=lose_disk]")
            await tab.page.check("#act [name=lose_disk]")
            await tab.page.get_by_role("button", name="Close", exact=True).click()


async def test_a_vm_that_was_made_anew_by_its_name_meanwhile_is_not_deleted(tmp_path: Path, browser: Browser) -> None:
    async with two_hosts(tmp_path) as hosts:
        await place(hosts, vm("shop"))
        tab = await tab_of(browser)
        await tab.enter(hosts.url, "vm/shop")
        await tab.page.get_by_role("button", name="Delete").click()
        await tab.page.fill("#confirm", "shop")
        await hosts.cluster.delete("shop")
        await hosts.cluster.create(vm("shop"), "create-again")
        await tab.page.locator("#act .destroys").click()
        await tab.page.locator("#act .error, dialog .outcome").first.wait_for()
        assert "look at it again" in await tab.text("dialog")
        assert [row["state"] for row in (await hosts.cluster.get("/v1/vms"))["vms"]] == ["running"]
        assert [error for error in tab.errors if "status of 412" not in error] == []


async def test_a_host_that_is_forgotten_with_its_vms_is_said(tmp_path: Path, browser: Browser) -> None:
    forgotten = ForgottenHost(id="host-a", vms=("shop", "wiki"), sentence="host-a is forgotten, with shop and wiki")

    async def forget(route: Route) -> None:
        await route.fulfill(json=forgotten.model_dump(mode="json"))

    async with two_hosts(tmp_path) as hosts:
        tab = await tab_of(browser)
        await tab.page.route("**/v1/hosts/host-a?*", forget)
        await tab.enter(hosts.url)
        await tab.page.evaluate(
            "async () => (await import('/page/actions.js')).start({ act: 'forget', host: 'host-a' })"
        )
        await tab.page.fill("#confirm", "host-a")
        await tab.page.locator("#act .destroys").click()
        await tab.page.locator("dialog .outcome, #act .error").first.wait_for()
        assert await tab.text("dialog .outcome") == forgotten.sentence
        assert await tab.page.locator("#act").count() == 0, "it is not offered again"
        assert tab.errors == []


async def test_what_is_answered_after_esc_is_not_shown_over_what_was_opened_since(
    tmp_path: Path, browser: Browser
) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def late(route: Route) -> None:
        asked.set()
        await answer.wait()
        await route.continue_()

    async with two_hosts(tmp_path) as hosts:
        await place(hosts, vm("shop"))
        tab = await tab_of(browser)
        await tab.enter(hosts.url, "vm/shop")
        await tab.page.route("**/v1/vms/shop/stop", late)
        await tab.page.get_by_role("button", name="Stop").click()
        await tab.page.fill("#confirm", "shop")
        await tab.page.locator("#act .destroys").click()
        await asked.wait()
        await tab.page.keyboard.press("Escape")
        await tab.page.keyboard.press("?")
        await tab.until("dialog h1", "Keys")
        answer.set()
        await tab.until("#view", "stopped")
        assert await tab.text("dialog h1") == "Keys"


async def test_calling_a_placement_off_does_not_delete_a_vm_that_was_started_meanwhile(
    tmp_path: Path, browser: Browser
) -> None:
    async with two_hosts(tmp_path) as hosts:
        await place(hosts, vm("shop"))
        done = (await hosts.cluster.get("/v1/operations?vm=shop"))["operations"][0]
        under_way = {**done, "state": "running"}
        tab = await tab_of(browser)
        await tab.page.route(f"**/v1/operations/{done['request_id']}", lambda route: route.fulfill(json=under_way))
        await tab.enter(hosts.url, f"operation/{done['request_id']}")
        await tab.page.get_by_role("button", name="Call it off").click()
        await tab.page.get_by_role("button", name="Call the placement of shop off").click()
        await tab.until("#act .error", "has ended")
        assert [row["state"] for row in (await hosts.cluster.get("/v1/vms"))["vms"]] == ["running"]
        assert [error for error in tab.errors if "status of 409" not in error] == []


async def test_what_got_no_answer_is_sent_again_as_the_same_request(tmp_path: Path, browser: Browser) -> None:
    async def lose_the_answer(route: Route) -> None:
        await route.fetch()
        await route.abort()

    async with two_hosts(tmp_path) as hosts:
        tab = await tab_of(browser)
        await tab.enter(hosts.url, "vms")
        await tab.page.keyboard.press("n")
        await fill(tab, FORM)
        submit = tab.page.locator('#act button[value="do"]')
        await tab.page.route("**/v1/vms", lose_the_answer, times=1)
        await submit.click()
        await tab.page.locator("#act .error").wait_for()
        await submit.click()
        await tab.until("dialog .outcome", "done")
        assert len((await hosts.cluster.get("/v1/operations?vm=orders"))["operations"]) == 1


async def test_a_task_is_cancelled_and_a_refusal_is_shown(tmp_path: Path, browser: Browser) -> None:
    async def refuse(route: Route) -> None:
        await route.fulfill(status=409, json={"title": "Conflict", "detail": "it has ended"})

    async with staged(tmp_path) as hosts:
        tab = await tab_of(browser)
        await tab.enter(hosts.url, "task/vacuum")
        await tab.page.get_by_role("button", name="Cancel the task").click()
        await tab.page.route("**/v1/tasks/vacuum?*", refuse, times=1)
        submit = tab.page.locator('#act button[value="do"]')
        await submit.click()
        await tab.until("#act .error", "it has ended")
        await submit.click()
        await tab.until("#view dd", "cancelled")
        assert (await hosts.cluster.get("/v1/tasks/vacuum"))["state"] == "cancelled"


def rewrite(path: str, text: str) -> None:
    Path(path).write_text(text)


async def test_what_a_task_prints_is_shown_as_text_and_read_again_at_a_click(tmp_path: Path, browser: Browser) -> None:
    async with staged(tmp_path) as hosts:
        output = (await becomes(hosts.cluster, "train", "running"))["output"]
        rewrite(output, "<b>epoch 1</b>\n")
        tab = await tab_of(browser)
        await tab.enter(hosts.url, "task/train")
        await tab.page.get_by_role("button", name="Read its last 16 KiB").click()
        await tab.until("#view pre", "<b>epoch 1</b>")
        rewrite(output, "x" * 20_000 + "epoch 2\n")
        await tab.page.get_by_role("button", name="Read it again").click()
        await tab.until("#view pre", "epoch 2")
        assert len(await tab.page.locator("#view pre").inner_text()) <= 16_384
        await tab.go("task/vacuum")
        await tab.page.get_by_role("button", name="Read its last 16 KiB").click()
        await tab.until("#view [role=status]", "vacuum has not begun")


async def test_a_viewer_is_offered_nothing_that_changes(tmp_path: Path, browser: Browser) -> None:
    async def viewer(route: Route) -> None:
        await route.fulfill(json={"name": "ann", "role": "viewer", "sentence": "ann has the role viewer"})

    async with staged(tmp_path) as hosts:
        tab = await tab_of(browser)
        await tab.page.route("**/v1/whoami", viewer)
        await tab.enter(hosts.url)
        for view in ("vms", "vm/shop", "host/host-a", "task/vacuum", "operations"):
            await tab.go(view)
            assert await tab.page.locator("[data-do=act]").count() == 0, view
        await tab.page.keyboard.press("n")
        assert not await tab.page.locator("dialog").is_visible()


async def test_an_address_that_is_none_of_the_pages_own_breaks_nothing(tmp_path: Path, browser: Browser) -> None:
    async with two_hosts(tmp_path) as hosts:
        tab = await tab_of(browser)
        await tab.enter(hosts.url, "constructor")
        await tab.until("#view h1", "Overview")
        await tab.page.evaluate("location.hash = 'vm/%'")
        await tab.until("#view h1", "VM %")
        for word in ("task", "operation"):
            await tab.page.evaluate(f"location.hash = '{word}/none'")
            await tab.until("#view .none", f"There is no such {word}.")
        await tab.page.evaluate("location.hash = 'vms'")
        await tab.until("#view h1", "VMs")
        assert [error for error in tab.errors if "status of 40" not in error] == []


def listed(kind: str, rows: list[Any]) -> Callable[[Route], Awaitable[None]]:
    """Answers as the manager does where it has these rows, newest first: by state, in pages."""

    async def answer(route: Route) -> None:
        query = dict(parse_qsl(urlsplit(route.request.url).query))
        chosen = [row for row in rows if query.get("state", row["state"]) == row["state"]]
        first, limit = int(query.get("after", "0")), int(query["limit"])
        following = str(first + limit) if first + limit < len(chosen) else None
        await route.fulfill(json={kind: chosen[first : first + limit], "next": following, "position": 0})

    return answer


async def test_a_task_that_runs_is_shown_however_many_were_submitted_since(tmp_path: Path, browser: Browser) -> None:
    async with staged(tmp_path) as hosts:
        task = (await hosts.cluster.get("/v1/tasks"))["tasks"][0]
        rows = [
            {**task, "name": f"task-{number}", "state": "done", "submitted_at": 1e9 + number}
            for number in reversed(range(1, 251))
        ]
        rows[-1] |= {"state": "running"}
        tab = await tab_of(browser)
        await tab.page.route("**/v1/tasks?*", listed("tasks", rows))
        await tab.enter(hosts.url, "tasks")
        await tab.until('#view [data-key="note"]', "newest 200 tasks, and all of those that wait, are released or run")
        await tab.until("#view .pager", "201 rows of tasks, page 1 of 3")
        await tab.go("tasks?state=running")
        await tab.until('[data-key="task-1"]', "running")
        await tab.go("tasks?state=done&page=2")
        await tab.page.locator('[data-key="task-51"]').wait_for()
        await tab.go("tasks?state=failed")
        await tab.until("#view .none", "There are no such tasks among them.")
        assert tab.errors == []


async def test_what_runs_is_counted_and_shown_however_much_was_asked_for_since(
    tmp_path: Path, browser: Browser
) -> None:
    async with two_hosts(tmp_path) as hosts:
        await place(hosts, vm("shop"))
        operation = (await hosts.cluster.get("/v1/operations"))["operations"][0]
        rows = [
            {**operation, "request_id": f"create-{number}", "state": "done" if number > 1100 else "running"}
            for number in reversed(range(1, 1401))
        ]
        tab = await tab_of(browser)
        await tab.page.route("**/v1/operations?*", listed("operations", rows))
        await tab.enter(hosts.url)
        await tab.until("#view .tile", "1100 operations under way")
        await tab.page.get_by_role("link", name="All 1100 operations under way").click()
        await tab.until('#view [data-key="note"]', "the newest 200, and all that run")
        await tab.until("#view .pager", "1100 of 1300 rows of operations, page 1 of 11")
        await tab.go("operations?state=running&page=11")
        await tab.page.locator('[data-key="create-1"]').wait_for()
        assert tab.errors == []


class Log:
    """A log of events, as the manager answers of it: the latest ones in pages, and a stream that ends each time."""

    def __init__(self, event: Any, newest: int) -> None:
        self.event = event
        self.newest = newest

    def rows(self, above: int) -> list[Any]:
        """Those above an id, newest first."""
        return [{**self.event, "id": number, "sentence": f"no. {number};"} for number in range(self.newest, above, -1)]

    async def page(self, route: Route) -> None:
        rows = self.rows(0)
        query = dict(parse_qsl(urlsplit(route.request.url).query))
        first, limit = int(query.get("after", "0")), int(query["limit"])
        following = str(first + limit) if first + limit < len(rows) else None
        await route.fulfill(json={"events": rows[first : first + limit], "next": following, "position": self.newest})

    async def stream(self, route: Route) -> None:
        since = int(dict(parse_qsl(urlsplit(route.request.url).query))["since_id"])
        if since > self.newest:
            said = {"title": "Conflict", "detail": "the log ends before", "code": "ahead-of-log"}
            await route.fulfill(status=409, json=said)
            return
        blocks = [f"data: {json.dumps(row)}\n\n" for row in reversed(self.rows(since))]
        await route.fulfill(content_type="text/event-stream", body="".join(blocks))


async def test_older_events_that_were_read_join_those_that_come_without_a_gap(tmp_path: Path, browser: Browser) -> None:
    async with two_hosts(tmp_path) as hosts:
        await place(hosts, vm("shop"))
        log = Log((await hosts.cluster.get("/v1/events"))["events"][0], 900)
        tab = await tab_of(browser)
        await tab.page.route("**/v1/events?*", log.page)
        await tab.page.route("**/v1/events/stream?*", log.stream)
        await tab.enter(hosts.url, "events")

        async def shown() -> list[int]:
            texts = await tab.page.locator(".events li span").all_inner_texts()
            return [int(text.split("no. ")[1].split(";")[0]) for text in texts]

        await tab.until(".events li", "no. 801;")
        assert await shown() == list(range(900, 800, -1))
        await tab.page.get_by_role("button", name="Read older ones").click()
        await tab.until(".events li", "no. 301;")
        log.newest = 1250
        await tab.until(".events li", "no. 1250;")
        assert await shown() == list(range(1250, 450, -1)), "as many as were read, and none is missing in between"
        await tab.page.get_by_role("button", name="Read older ones").click()
        await tab.until(".events li", "no. 251;")
        assert await shown() == list(range(1250, 250, -1))
        log.newest = 700
        await tab.page.locator(".events li", has_text="no. 1250;").wait_for(state="detached")
        assert await shown() == list(range(700, 600, -1)), "of a store that was put back nothing else is known"
        assert [error for error in tab.errors if "status of 409" not in error] == []


async def test_search_filters_and_keys_lead_to_what_is_looked_for(tmp_path: Path, browser: Browser) -> None:
    async with staged(tmp_path) as hosts:
        tab = await tab_of(browser)
        await tab.enter(hosts.url)
        await tab.page.keyboard.press("2")
        await tab.page.locator('[data-key="database"]').wait_for()
        await tab.page.keyboard.press("/")
        await tab.page.keyboard.type("wik")
        await tab.page.locator('[data-key="shop"]').wait_for(state="detached")
        assert await tab.page.locator("#view tbody tr").count() == 1
        assert "q=wik" in tab.page.url, "a bookmark finds it again"
        await tab.page.locator("#view h1").click()
        await tab.page.keyboard.press("5")
        await tab.until("#view h1", "Operations")
        await tab.page.keyboard.press("2")
        await tab.page.locator('[data-key="shop"]').wait_for()
        assert await tab.page.input_value("[data-query=q]") == "", "as the list, which follows no search"
        await tab.page.select_option("[data-query=priority]", "fixed")
        await tab.page.locator('[data-key="wiki"]').wait_for(state="detached")
        assert await tab.page.locator("#view tbody tr th").all_inner_texts() == ["billing", "database"]
        await tab.go("vms?priority=deflatable")
        await tab.page.locator('[data-key="wiki"]').wait_for()
        assert await tab.page.input_value("[data-query=priority]") == "deflatable"
        await tab.go("vms")
        await tab.page.locator('[data-key="database"]').wait_for()
        assert await tab.page.input_value("[data-query=priority]") == ""
        await tab.go("events?kind=none-of-these")
        assert await tab.page.input_value("[data-query=kind]") == "none-of-these"
        await tab.page.locator("#view h1").click()
        await tab.page.keyboard.press("?")
        await tab.until("dialog", "Keys")
        await tab.page.keyboard.press("Escape")
        await tab.page.goto(f"{hosts.url}/")
        await tab.page.keyboard.press("Tab")
        focused: Any = await tab.page.evaluate("document.activeElement.id")
        assert focused in ("skip", "theme"), "what comes first can be skipped"


async def test_no_text_becomes_an_element_and_no_script_but_the_pages_own_is_run(
    tmp_path: Path, browser: Browser
) -> None:
    async with two_hosts(tmp_path) as hosts:
        tab = await tab_of(browser)
        await tab.enter(hosts.url)
        with pytest.raises(Error, match="TrustedHTML"):
            await tab.page.evaluate("document.body.innerHTML = '<b>x</b>'")
        violated = await tab.page.evaluate("""() => new Promise((told) => {
            document.addEventListener("securitypolicyviolation", (event) => told(event.violatedDirective));
            const made = document.createElement("script");
            made.append("window.ran = 1");
            document.body.append(made);
        })""")
        assert violated in ("script-src-elem", "require-trusted-types-for")
        assert await tab.page.evaluate("window.ran === undefined")
        assert {url.split("/")[2] for url in tab.asked if not url.startswith("data:")} == {hosts.url.split("/")[2]}
        assert not [url for url in tab.asked if "clients" in url], "the token is in no address"
        stores = "[localStorage.length, sessionStorage.length, document.cookie.length]"
        assert await tab.page.evaluate(stores) == [0, 0, 0]
        await tab.page.reload()
        assert await tab.page.locator("#enter").is_visible(), "the token is gone with the page"


async def test_the_page_and_ebb_top_take_the_same_vms_to_be_off(tmp_path: Path, browser: Browser) -> None:
    rows = [
        make_vm("x", state=state, current=Vector(cpu_cores=1.0, memory_mib=held))
        for state in get_args(ManagedState)
        for held in (0.0, 512.0)
    ]
    async with two_hosts(tmp_path) as hosts:
        tab = await tab_of(browser)
        await tab.page.goto(hosts.url)
        told: Any = await tab.page.evaluate(
            "async (rows) => { const { isOff } = await import('/page/state.js'); return rows.map(isOff); }",
            [row.model_dump(mode="json") for row in rows],
        )
    assert told == [is_off(row) for row in rows]
    assert 0 < sum(told) < len(told)
