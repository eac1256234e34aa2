"""A compromised host that says anything of others, beside an honest one: what is the other's stays as it is."""

from __future__ import annotations

import asyncio
import re
import time
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog
from aiohttp import web

from cluster_manager import manager as manager_module
from cluster_manager.api.forms import MANAGER
from cluster_manager.store.rows import StoredVM
from cluster_manager.tasks import core_changes
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.modes import HostMode
from ebbtide.messages.common import MOST, Vector
from ebbtide.messages.hosts import HostReport, ReportReply
from ebbtide.messages.migrations import MigrationAddress
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMStatus
from ebbtide.rest.credentials import command_token, report_token
from ebbtide.rest.rates import Rate
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import HOSTS_KEY, FakeAgent
from tests.manager.lifecycle import ask
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store")


class Rogue(FakeAgent):
    """A host agent that replaces fields of its reports, whoever asks for them."""

    def __init__(self, host_id: str, **capacity: float) -> None:
        super().__init__(host_id, **capacity)
        self.says: dict[str, Any] = {}
        #: What it says of each of its VMs.
        self.lies: dict[str, Any] = {}

    def report(self) -> HostReport:
        made = super().report()
        told = tuple(vm.model_copy(update=self.lies) for vm in made.vms)
        return made.model_copy(update={"vms": told, **self.says})


@dataclass
class Pair:
    """host-b is honest and has the VM ``low-b``; host-a is not."""

    cluster: Cluster
    honest: FakeAgent
    rogue: Rogue
    address: str = ""
    before: dict[str, VMStatus] = field(default_factory=dict)

    def check_honest(self) -> None:
        assert self.honest.vms == self.before
        assert self.honest.mode is HostMode.ACTIVE
        assert self.honest.done == [("create", "low-b")]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    honest, rogue = FakeAgent("host-b", cpu_cores=4.0, memory_mib=4000.0), Rogue("host-a")
    async with cluster_of(tmp_path, honest, rogue) as cluster:
        assert (await cluster.create(vm("low-b"))).host == "host-b"
        made = Pair(cluster, honest, rogue, honest.report().url, dict(honest.vms))
        yield made
        made.check_honest()


def claims(pair: Pair) -> dict[str, Any]:
    """That host-b's VM is here, on a large host that has only this VM to preempt."""
    size = Vector(cpu_cores=100.0, memory_mib=100_000.0)
    fat = pair.honest.vms["low-b"].model_copy(update={"current": size, "nominal": size, "minimum": size})
    return {"capacity": size, "free": Vector(), "deflatable": Vector(), "vms": (fat,)}


@pytest.mark.parametrize("late", [False, True], ids=["in its reports", "when it is read"])
async def test_a_large_request_deletes_no_vm_of_another_host_that_this_one_claims(pair: Pair, late: bool) -> None:
    """The manager takes the claimed VM for a victim, and the claimed address for the place where it is deleted."""
    pair.rogue.says = claims(pair) | ({} if late else {"url": pair.address})
    await pair.rogue.send_report()
    if late:
        pair.rogue.says["url"] = pair.address
    ended = await pair.cluster.create(vm("big", "fixed", cpu_cores=50.0, memory_mib=9000.0))
    assert ended.state is OperationState.FAILED
    assert pair.rogue.done == []
    assert (await pair.cluster.get("/v1/vms/low-b"))["state"] == "running"


async def test_pausing_a_host_pauses_no_other_one(pair: Pair) -> None:
    pair.rogue.says = {"url": pair.address}
    await pair.rogue.send_report()
    command = {"request_id": "pause", "mode": "paused", "reason": "test"}
    status, _ = await pair.cluster.call("PUT", "/v1/hosts/host-a/mode", json=command)
    # It is host-a that is paused, where it proved to be before, or none.
    assert status in (202, 503)
    pair.check_honest()


async def test_an_address_counts_when_it_has_proved_to_be_that_hosts(pair: Pair) -> None:
    moved = Rogue("host-a")
    await moved.start()
    try:
        told = [(pair.rogue.report().url, pair.rogue), (pair.address, pair.rogue), (moved.report().url, moved)]
        for at, (url, where) in enumerate(told):
            where.mode = HostMode.ACTIVE
            pair.rogue.says = {"url": url}
            await pair.rogue.send_report()
            command = {"request_id": f"pause-{at}", "mode": "paused", "reason": "test"}
            assert (await pair.cluster.call("PUT", "/v1/hosts/host-a/mode", json=command))[0] == 202
            assert where.mode is HostMode.PAUSED
    finally:
        await moved.close()


async def test_a_vm_is_sent_to_no_address_that_its_next_host_only_reports(pair: Pair) -> None:
    pair.honest.peers = {"host-a": pair.rogue}
    elsewhere = MigrationAddress(
        uri="qemu+tls://127.0.0.9/system", listen="127.0.0.9", disk_dir="/disks", image_dir="/images"
    )
    # Where it is called, it has proved to be.
    await pair.cluster.get("/v1/hosts/host-a/templates")
    pair.rogue.says = {"url": "http://127.0.0.9:7101", "migration": elsewhere}
    await pair.cluster.ready()
    stays = await ask(pair.cluster, "low-b", "migrate", host="host-a", live=True, copy_storage=True)
    assert stays.sentence == (
        "low-b stays on host-b: host-a is at 127.0.0.1, and wants VMs to be sent to 127.0.0.9 and 127.0.0.9"
    )
    assert pair.rogue.done == []


async def test_a_core_change_of_another_hosts_vm_is_dropped(pair: Pair) -> None:
    await pair.honest.send_report()
    before = await pair.cluster.get("/v1/core-changes?machine=low-b")
    assert len(before["core_changes"]) == 1
    for moment in (None, 1e10):
        pair.rogue.add_change("low-b", 3.0, 0.0, moment)
    pair.rogue.add_change("unknown", 3.0, 0.0)
    await pair.rogue.send_report()
    assert pair.rogue.changes == [], "they are acknowledged, so that they do not come again"
    assert await pair.cluster.get("/v1/core-changes?machine=low-b") == before
    assert (await pair.cluster.get("/v1/core-changes?machine=unknown"))["core_changes"] == []


async def test_pressure_of_another_hosts_vm_is_no_event(pair: Pair) -> None:
    asks = pair.honest.vms["low-b"].model_copy(update={"asks": Vector(memory_mib=500.0)})
    pair.rogue.says = {"vms": (asks,)}
    await pair.rogue.send_report()
    assert await pair.cluster.events("pressure") == []


async def test_a_host_fills_the_event_log_with_nothing(pair: Pair) -> None:
    """Else those of other hosts would be pruned for its own."""
    for _ in range(40):
        for mode in (HostMode.PAUSED, HostMode.ACTIVE):
            pair.rogue.says = {"mode": mode}
            await pair.rogue.send_report()
    assert 40 <= len((await pair.cluster.get("/v1/events?kind=mode&limit=1000"))["events"]) <= 60


async def test_a_host_fills_the_log_with_nothing_either(pair: Pair) -> None:
    with structlog.testing.capture_logs() as logged:
        for number in range(60):
            for mode in (HostMode.PAUSED, HostMode.ACTIVE):
                pair.rogue.says = {"mode": mode, "mode_reason": f"{number} " * 100}
                await pair.rogue.send_report()
    assert 1 <= sum(line["event"] == "event not written: its host has too many" for line in logged) <= 20


async def test_names_that_a_host_makes_up_and_drops_are_no_changed_vms(pair: Pair) -> None:
    assert pair.cluster.server is not None
    changes = pair.cluster.server.app[MANAGER].hosts.changes
    made_up = pair.honest.vms["low-b"]
    before = changes.latest
    for number in range(3):
        pair.rogue.says = {"vms": (made_up.model_copy(update={"name": f"made-up-{number}"}),)}
        await pair.rogue.send_report()
    assert changes.since("host's VMs", before) == {"host-a"}
    assert changes.since("VM", before) == set()


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:80/path",
        "http://127.0.0.1:80/",
        "http://127.0.0.1:80?query=1",
        "http://127.0.0.1:80#fragment",
        "http://user:secret@127.0.0.1:80",
        "http://127.0.0.1:1@example.org",
        "http://127.0.0.1:65536",
        "http://127.0.0.1:0",
        "http://",
        "http://127.0.0.1:80\n",
        "http://127.0.0.1\\@example.org",
        "file:///etc/passwd",
        "http://127.0.0.1:\N{ARABIC-INDIC DIGIT ONE}",
    ],
)
async def test_a_registered_address_is_scheme_host_and_port(pair: Pair, address: str) -> None:
    body = pair.rogue.report().model_dump(mode="json") | {"url": address}
    async with aiohttp.ClientSession(headers=pair.rogue.headers) as session:
        url = f"{pair.rogue.manager}/v1/hosts/host-a/report"
        async with session.post(url, json=body) as response:
            assert response.status == 400
            assert (await response.json())["field"] == "url"


async def test_registrations_are_capped(tmp_path: Path) -> None:
    agents = [FakeAgent(f"host-{letter}") for letter in "abc"]
    async with cluster_of(tmp_path, *agents, most_hosts=2) as cluster:
        assert len((await cluster.get("/v1/hosts"))["hosts"]) == 2
        refused = []
        for agent in agents:
            body = agent.report().model_dump(mode="json")
            async with cluster.session.post(
                f"{agent.manager}/v1/hosts/{agent.id}/report", json=body, headers=agent.headers
            ) as response:
                refused.append(response.status)
        assert sorted(refused) == [200, 200, 403]


async def test_what_a_host_has_opens_nothing_of_another_one(pair: Pair) -> None:
    """Neither of its tokens, towards the manager, towards the other host, or turned round."""
    own = (command_token(HOSTS_KEY, "host-a"), report_token(HOSTS_KEY, "host-a"))
    body = pair.honest.report().model_dump(mode="json")
    for token in own:
        for host in ("host-b", "host-new"):
            said = body | {"id": host, "url": pair.rogue.report().url}
            status, _ = await pair.cluster.call("POST", f"/v1/hosts/{host}/report", token, json=said)
            assert status in (401, 403)
        for method, path in (("GET", "/v1/vms"), ("DELETE", "/v1/vms/low-b?request_id=d")):
            assert (await pair.cluster.call(method, path, token))[0] == 401
        headers = {"Authorization": f"Bearer {token}"}
        url = f"{pair.address}/v1/vms/low-b?request_id=d&reason=delete"
        async with pair.cluster.session.delete(url, headers=headers) as response:
            assert response.status == 401
    assert [host["id"] for host in (await pair.cluster.get("/v1/hosts"))["hosts"]] == ["host-a", "host-b"]


class CookieHost(Rogue):
    """A host by name, as other hosts of its domain are: it sets cookies, and notes those that it is sent."""

    def __init__(self, host_id: str, cookie: str = "", **capacity: float) -> None:
        super().__init__(host_id, **capacity)
        self.cookie = cookie
        self.cookies: list[str] = []

    def report(self) -> HostReport:
        made = super().report()
        return made.model_copy(update={"url": made.url.replace("127.0.0.1", "localhost")})

    async def _get_host(self, request: web.Request) -> web.Response:
        self.cookies += request.headers.getall("Cookie", [])
        response = await super()._get_host(request)
        if self.cookie:
            response.set_cookie("session", self.cookie)
        return response


async def test_a_cookie_of_one_host_goes_to_no_other(tmp_path: Path) -> None:
    """A few large ones, and each host of that domain would refuse the manager's requests for their heads."""
    size: Any = {"cpu_cores": 6.0, "memory_mib": 2400.0}
    honest, rogue = CookieHost("host-b", **size), CookieHost("host-a", "x" * 3000, **size)
    async with cluster_of(tmp_path, rogue, honest) as cluster:
        for agent in (rogue, honest, rogue):
            command = {"request_id": f"pause-{agent.id}", "mode": "paused"}
            assert (await cluster.call("PUT", f"/v1/hosts/{agent.id}/mode", json=command))[0] == 202
        assert rogue.reads
        assert honest.reads
        assert rogue.cookies + honest.cookies == []


@dataclass
class Evacuation:
    """``own`` runs on host-a, which is about to be taken over; host-b has ``low-b`` and takes ``own`` next."""

    cluster: Cluster
    rogue: Rogue
    honest: FakeAgent

    async def ask(self, method: str, path: str, **body: Any) -> OperationState:
        request_id = f"ask-{len(body)}-{method.lower()}"
        status, answer = await self.cluster.call(method, path, json={"request_id": request_id, **body})
        assert status == 202, answer
        return (await self.cluster.ended(request_id)).state

    async def says(self, **changes: Any) -> None:
        self.rogue.lies = changes
        await self.rogue.send_report()

    async def row_of(self, name: str) -> StoredVM:
        assert self.cluster.manager is not None
        return (await self.cluster.manager.store.vms(name))[0]


@pytest.fixture
async def evacuation(tmp_path: Path) -> AsyncIterator[Evacuation]:
    size = {"cpu_cores": 8.0, "memory_mib": 4000.0}
    rogue, honest = Rogue("host-a", **size), FakeAgent("host-b", **size)
    honest.mode = HostMode.PAUSED
    async with cluster_of(tmp_path, rogue, honest) as cluster:
        assert (await cluster.create(vm("own", cpu_cores=1.0, memory_mib=500.0))).host == "host-a"
        rogue.mode, honest.mode = HostMode.PAUSED, HostMode.ACTIVE
        await cluster.ready()
        assert (await cluster.create(vm("low-b"))).host == "host-b"
        yield Evacuation(cluster, rogue, honest)


async def test_a_vm_takes_no_more_from_its_next_host_than_was_ever_sold(evacuation: Evacuation) -> None:
    """Its host says that it is fixed and large: moved away from there, others would be shrunk and preempted for it."""
    size = Vector(cpu_cores=8.0, memory_mib=3500.0)
    await evacuation.says(priority=Priority.FIXED, nominal=size, minimum=size)
    done = await evacuation.ask("POST", "/v1/vms/own/migrate", lose_disk=True, host="host-b")
    assert done is OperationState.DONE
    own, low = evacuation.honest.vms["own"], evacuation.honest.vms["low-b"]
    assert (own.priority, own.nominal.cpu_cores) == (Priority.DEFLATABLE, 1.0)
    assert low.current == low.nominal


@pytest.mark.parametrize("kind", ["resize", "migrate"])
async def test_what_a_vm_is_to_become_names_no_other_vm(evacuation: Evacuation, kind: str) -> None:
    """The host says that its VM is to be ``low-b`` at its next start: the change would be one of host-b's VM."""
    before = await evacuation.row_of("low-b")
    later = before.spec.model_copy(update={"nominal": Vector(cpu_cores=1.0, memory_mib=500.0)})
    await evacuation.says(at_next_start=later)
    if kind == "resize":
        await evacuation.ask("PATCH", "/v1/vms/own", nominal={"memory_mib": 450.0})
    else:
        await evacuation.ask("POST", "/v1/vms/own/migrate", lose_disk=True, host="host-b")
        assert (await evacuation.row_of("own")).host == "host-b"
    assert await evacuation.row_of("low-b") == before
    assert evacuation.honest.done[0] == ("create", "low-b")
    assert ("delete", "low-b") not in evacuation.honest.done


LOUD = "\x00\x1b[2J\u202e" + "x" * 30_000


async def test_words_of_a_host_can_be_stored_sent_and_shown(pair: Pair) -> None:
    loud = pair.honest.vms["low-b"].model_copy(update={"contention": LOUD, "off_reason": LOUD, "pressure": LOUD})
    for mode in (HostMode.PAUSED, HostMode.ACTIVE, HostMode.PAUSED):
        said = {"mode": mode, "mode_reason": LOUD, "accelerator": LOUD[:9], "incarnation": LOUD[:9]}
        pair.rogue.says = said | ({"vms": (loud,)} if mode is HostMode.ACTIVE else {})
        body = pair.rogue.report().model_dump_json()
        async with pair.cluster.session.post(
            f"{pair.rogue.manager}/v1/hosts/host-a/report", data=body, headers=pair.rogue.headers
        ) as response:
            assert response.status == 200
    events = await pair.cluster.events("mode")
    assert len(events) >= 3
    assert all(len(event["sentence"]) < 5000 and event["sentence"].isprintable() for event in events)
    host = await pair.cluster.get("/v1/hosts/host-a")
    assert len(host["mode_reason"]) <= 4000


async def test_a_reason_that_no_database_knows_silences_no_host(pair: Pair) -> None:
    """An operator's, which comes back with each report of that host."""
    command = {"request_id": "pause", "mode": "paused", "reason": "a\x00b"}
    assert (await pair.cluster.call("PUT", "/v1/hosts/host-a/mode", json=command))[0] == 202
    body = pair.rogue.report().model_dump_json()
    url = f"{pair.rogue.manager}/v1/hosts/host-a/report"
    async with pair.cluster.session.post(url, data=body, headers=pair.rogue.headers) as response:
        assert response.status == 200
    assert (await pair.cluster.get("/v1/hosts/host-a"))["mode"] == "paused"


async def test_a_refusal_that_no_database_knows_ends_no_placement(tmp_path: Path) -> None:
    """Another host is tried, as after any refusal."""
    rogue, honest = (
        Rogue("host-a", cpu_cores=3.0, memory_mib=1200.0),
        FakeAgent("host-b", cpu_cores=30.0, memory_mib=12_000.0),
    )
    async with cluster_of(tmp_path, rogue, honest) as cluster:
        rogue.trouble.fails["create"] = LOUD
        ended = await cluster.create(vm("web"))
        assert (ended.state, ended.host) == (OperationState.DONE, "host-b"), ended
        assert "create" in rogue.arrived, "the rogue was tried first, or nothing is shown"
        assert all(sentence.isprintable() for sentence in ended.progress)


async def test_core_changes_of_a_host_fill_no_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too much for now is taken later: nothing of an honest host's is lost."""
    monkeypatch.setattr(core_changes, "_TAKEN", Rate(per_s=100.0, burst=50.0))
    async with cluster_of(tmp_path, rogue := Rogue("host-a", cpu_cores=6.0, memory_mib=2400.0)) as cluster:
        await cluster.create(vm("own"))
        await rogue.send_report()
        began = time.monotonic()
        for number in range(200):
            rogue.add_change("own", 3.0 - number % 2, 2.0 + number % 2)
        await rogue.send_report()
        left = len(rogue.changes)
        assert left >= 150 - (time.monotonic() - began) * 100

        async def taken() -> bool:
            # The same body again and again, but for its number.
            await rogue.send_report()
            return not rogue.changes

        await until(taken)
        rows = (await cluster.get("/v1/core-changes?machine=own&limit=1000"))["core_changes"]
        assert len(rows) == 201


async def test_a_host_that_dated_its_changes_ahead_has_no_say_when_its_vm_has_moved_away(tmp_path: Path) -> None:
    size = {"cpu_cores": 6.0, "memory_mib": 2400.0}
    rogue, honest = Rogue("host-a", **size), FakeAgent("host-b", **size)
    honest.mode = HostMode.PAUSED
    async with cluster_of(tmp_path, rogue, honest) as cluster:
        assert (await cluster.create(vm("moved"))).host == "host-a"
        rogue.add_change("moved", 3.0, 2.0, time.time() + 55.0)
        await rogue.send_report()
        honest.mode = HostMode.ACTIVE
        await honest.send_report()
        body = {"request_id": "move", "lose_disk": True, "host": "host-b"}
        assert (await cluster.call("POST", "/v1/vms/moved/migrate", json=body))[0] == 202
        assert (await cluster.ended("move")).state is OperationState.DONE
        await rogue.send_report()
        await honest.send_report()
        before = await cluster.get("/v1/core-changes?machine=moved")
        assert {row["host"] for row in before["core_changes"]} == {"host-a", "host-b"}
        rogue.add_change("moved", 3.0, 0.0, time.time() + 57.0)
        await rogue.send_report()
        assert rogue.changes == []
        assert await cluster.get("/v1/core-changes?machine=moved") == before


async def test_a_change_from_years_ahead_is_dated_back(tmp_path: Path) -> None:
    """What the VM's next host tells would be older than the last that is known, and passed over."""
    async with cluster_of(tmp_path, rogue := Rogue("host-a", cpu_cores=6.0, memory_mib=2400.0)) as cluster:
        await cluster.create(vm("own"))
        rogue.add_change("own", 3.0, 2.0, 1e11)
        await rogue.send_report()
        newest = (await cluster.get("/v1/core-changes?machine=own"))["core_changes"][0]
        assert newest["cores_after"] == 2.0
        assert newest["at"] <= time.time() + 60.0
        assert cluster.manager is not None
        last = cluster.manager.core_changes.predictor.last_of("own")
        assert last is not None
        assert last.at <= time.time() + 60.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("capacity", {"memory_mib": 1e12}), ("free", {"cpu_cores": 2e9}), ("vm_overhead_mib", 1e308),
        ("budget_number", 2**53), ("sequence", 10**30), ("vms.current", {"memory_mib": 1e12}),
        ("vms.nominal", {"disk_mib_s": 1e12}), ("vms.ceiling", {"cpu_cores": 1e12}), ("vms.generation", 2**60),
        ("vms.asks", {"memory_mib": 1e12}), ("vms.boot_memory_mib", 1e308),
    ],
)  # fmt: skip
async def test_a_figure_that_no_host_has_is_refused_where_it_comes_in(pair: Pair, field: str, value: Any) -> None:
    body = pair.rogue.report().model_dump(mode="json")
    body["vms"] = [pair.honest.vms["low-b"].model_dump(mode="json")]
    at, _, name = field.rpartition(".")
    (body["vms"][0] if at else body)[name] = value
    url = f"{pair.rogue.manager}/v1/hosts/host-a/report"
    async with pair.cluster.session.post(url, json=body, headers=pair.rogue.headers) as response:
        assert response.status == 400
        assert name in (await response.json())["field"]


async def test_the_largest_figures_of_a_host_leave_every_answer_whole(pair: Pair) -> None:
    most = Vector(cpu_cores=MOST, memory_mib=MOST, disk_mib_s=MOST, network_mib_s=MOST)
    row = pair.honest.vms["low-b"].model_copy(update={"nominal": most, "current": most, "minimum": Vector()})
    vms = tuple(row.model_copy(update={"name": f"v-{number}", "overhead_mib": 1e6}) for number in range(200))
    pair.rogue.says = {"capacity": most, "free": Vector(), "deflatable": most, "vm_overhead_mib": 1e6, "vms": vms}
    pair.rogue.says |= {"overcommitted": Vector()}
    body = pair.rogue.report().model_dump_json()
    url = f"{pair.rogue.manager}/v1/hosts/host-a/report"
    async with pair.cluster.session.post(url, data=body, headers=pair.rogue.headers) as response:
        assert response.status == 200, await response.text()
    for size in (1e9, 9e8, 1e5):
        for priority in ("fixed", "deflatable"):
            request = {"request_id": "dry", "vm": vm("dry", priority, min(size, 4096.0), size), "dry_run": True}
            status, answer = await pair.cluster.call("POST", "/v1/vms", json=request)
            assert status == 200, answer
    for path in ("/v1/hosts", "/v1/vms", "/v1/machines"):
        await pair.cluster.get(path)


async def test_reports_of_one_host_are_taken_one_after_the_other(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in one turn of the loop, a hundred large ones would hold up all that others ask."""
    assert pair.cluster.manager is not None
    take, at_work, most = pair.cluster.manager.take_report, 0, 0

    async def counted(report: HostReport, raw: bytes) -> ReportReply:
        nonlocal at_work, most
        own = report.id == "host-a"
        at_work += own
        most = max(most, at_work)
        try:
            return await take(report, raw)
        finally:
            at_work -= own

    monkeypatch.setattr(pair.cluster.manager, "take_report", counted)
    url, headers = f"{pair.rogue.manager}/v1/hosts/host-a/report", pair.rogue.headers

    async def send(number: int) -> int:
        body = pair.rogue.report().model_copy(update={"accelerator": f"a-{number}"}).model_dump_json()
        async with pair.cluster.session.post(url, data=body, headers=headers) as response:
            return response.status

    assert await asyncio.gather(*map(send, range(40))) == [200] * 40
    assert most == 1


async def test_a_host_that_reports_without_a_pause_leaves_time_for_others(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its largest reports takes as long as hundreds of an honest host's."""
    assert pair.cluster.manager is not None
    monkeypatch.setattr(manager_module, "REPORTED_BYTES_PER_S", 1e4)
    pair.rogue.trouble.mute = True
    url, headers = f"{pair.rogue.manager}/v1/hosts/host-a/report", pair.rogue.headers

    async def send(word: str) -> None:
        body = pair.rogue.report().model_copy(update={"accelerator": word * 100_000}).model_dump_json()
        async with pair.cluster.session.post(url, data=body, headers=headers):
            pass

    def told() -> str:
        assert pair.cluster.manager is not None
        host = pair.cluster.manager.hosts.get("host-a")
        return host.report.accelerator[:1] if host is not None else ""

    sending = [asyncio.create_task(send("x"))]
    try:
        await until(lambda: _is(told, "x"))
        sending.append(asyncio.create_task(send("y")))
        for _ in range(3):
            pair.honest.reported.clear()
            async with asyncio.timeout(5):
                await pair.honest.reported.wait()
        assert told() == "x", "the next one waits for ten seconds"
    finally:
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)


async def _is(told: Callable[[], str], word: str) -> bool:
    return told() == word


async def test_a_compressed_answer_without_end_costs_little_memory(tmp_path: Path) -> None:
    packer = zlib.compressobj(wbits=31)
    bomb = b"".join([*(packer.compress(b" " * 1_000_000) for _ in range(300)), packer.flush()])

    class Bomb(Rogue):
        async def _get_host(self, request: web.Request) -> web.Response:
            return web.Response(body=bomb, headers={"Content-Encoding": "gzip"}, content_type="application/json")

    async with cluster_of(tmp_path, Bomb("host-a", cpu_cores=6.0, memory_mib=2400.0)) as cluster:
        forget_the_most()
        before_kib = most_kib()
        ended = await cluster.create(vm("web"))
        assert ended.state is OperationState.FAILED
        assert most_kib() - before_kib < 100_000


def forget_the_most() -> None:
    """Begin `most_kib` anew: an earlier test may have needed more."""
    Path("/proc/self/clear_refs").write_text("5")


def most_kib() -> int:
    """The most memory that this process has had resident."""
    (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kib)
