"""What the manager keeps of its hosts: reports that repeat, come late or all at once; who is open; what is promised."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from cluster_manager.inventory import hosts as inventory
from cluster_manager.inventory.availability import Availability, Ranking
from cluster_manager.inventory.hosts import SAVED, Hosts
from cluster_manager.plans.plans import Arrival
from cluster_manager.store.database import Database
from cluster_manager.store.store import Line, Store
from ebbtide.deflation.modes import HostMode
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.machines import CoreChange
from ebbtide.messages.vms import VMState, VMStatus
from ebbtide.rest.credentials import report_token
from tests.manager import cluster as clusters
from tests.manager.cluster import cluster_of, vm
from tests.manager.fake_agent import HOSTS_KEY, FakeAgent
from tests.manager.plan_events import record

each_store = pytest.mark.usefixtures("each_store")

CORES = 8.0
OVERHEAD_MIB = 100.0


def status(name: str, priority: str = "deflatable", cpu_cores: float = 4.0, memory_mib: float = 4000.0) -> VMStatus:
    size = Vector(cpu_cores=cpu_cores, memory_mib=memory_mib)
    return VMStatus.model_validate(
        {
            "name": name,
            "host": "host-a",
            "domain": f"ebb-host-a.{name}",
            "state": VMState.RUNNING,
            "priority": priority,
            "nominal": size,
            "minimum": size if priority == "fixed" else Vector(cpu_cores=0.5, memory_mib=500.0),
            "current": size,
            "overhead_mib": OVERHEAD_MIB,
            "generation": 1,
            "guest_connected": True,
            "boot_memory_mib": 400.0,
        }
    )


def report(name: str = "host-a", free_cores: float = CORES, *vms: VMStatus, mode: str = "active") -> HostReport:
    return HostReport(
        id=name,
        url="http://127.0.0.1:1",
        incarnation="1",
        capacity=Vector(cpu_cores=CORES, memory_mib=16_000.0),
        free=Vector(cpu_cores=free_cores, memory_mib=8000.0),
        deflatable=Vector(cpu_cores=1.0, memory_mib=1000.0),
        vm_overhead_mib=OVERHEAD_MIB,
        accelerator="kvm",
        mode=HostMode(mode),
        vms=vms,
    )


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Writes(Store):
    """A store that says what was written to its hosts, and can be held up or fail."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, lambda: 1.0)
        self.batches: list[list[str]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures = 0
        self.told: list[list[str]] = []
        self.telling = asyncio.Event()
        self.telling.set()
        self.untold = 0

    async def save_hosts(self, reports: Sequence[HostReport], lines: Sequence[Line] = ()) -> None:
        if lines:
            self.told.append([kind for kind, *_ in lines])
            await self.telling.wait()
            if self.untold:
                self.untold -= 1
                raise OSError("the disk is full")
        else:
            self.batches.append([one.id for one in reports])
            await self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise OSError("the disk is full")
        await super().save_hosts(reports, lines)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Writes]:
    store = Writes(clusters.database_in(tmp_path))
    await store.open()
    yield store
    await store.close()


def hosts_of(store: Store, clock: Clock) -> Hosts:
    return Hosts(store, 10.0, lambda: 5.0, clock)


def ranked(availability: Availability, cores: float, purpose: Ranking = "place", mib: float = 1000.0) -> list[str]:
    demand = ResourceVector(cores, mib)
    return availability.rank(demand, 16, purpose, PlacementPolicy.FIRST_FIT, np.random.default_rng(0))


# --- who is open -----------------------------------------------------------------------------------------------------


@each_store
async def test_a_silent_host_is_closed_and_open_again_with_its_next_report_even_the_same(store: Writes) -> None:
    clock = Clock()
    hosts = hosts_of(store, clock)
    body = report()
    await hosts.take(body)
    hosts.remember(body, b"body")
    assert ranked(hosts.availability, 4) == ["host-a"]
    clock.now += 10.0
    assert ranked(hosts.availability, 4) == ["host-a"]
    clock.now += 0.1
    assert ranked(hosts.availability, 4) == []
    assert hosts.repeat("host-a", b"body")
    assert ranked(hosts.availability, 4) == ["host-a"]
    clock.now += 9.0
    assert hosts.repeat("host-a", b"body")
    clock.now += 9.0
    assert ranked(hosts.availability, 4) == ["host-a"], "the repeated report counts for its age"


@each_store
async def test_a_host_whose_mode_takes_no_vms_is_not_open(store: Writes) -> None:
    hosts = hosts_of(store, Clock())
    for mode, expected in (("active", ["host-a"]), ("draining", []), ("paused", []), ("active", ["host-a"])):
        await hosts.take(report(mode=mode))
        assert ranked(hosts.availability, 4) == expected


@each_store
async def test_what_a_report_and_an_answer_at_the_same_time_say_is_told_once(store: Writes) -> None:
    hosts = hosts_of(store, Clock())
    await hosts.take(report())
    await asyncio.gather(*(hosts.take(report(mode="paused")) for _ in range(3)))
    assert [event.kind for event in await store.events(10)].count("mode") == 1


def told_of() -> HostReport:
    """A report with three pieces of news against `report`'s."""
    asks = status("low-1").model_copy(update={"asks": Vector(cpu_cores=1.0)})
    off = status("low-2").model_copy(update={"state": VMState.STOPPED, "off_reason": "its domain has ended"})
    return report("host-a", CORES, asks, off, mode="paused")


@each_store
async def test_who_is_told_of_a_report_finds_what_it_says(store: Writes) -> None:
    hosts = hosts_of(store, Clock())
    for name in ("low-1", "low-2"):
        await record(store, name, "host-a")
    await hosts.take(report())
    store.telling.clear()
    before = hosts.changes.latest
    taking = asyncio.create_task(hosts.take(told_of()), name="take")
    async with asyncio.timeout(20):
        while not store.told:
            await asyncio.sleep(0)
    (found,) = await hosts.page(10, None)
    assert (found.mode, found.vms) == (HostMode.PAUSED, ("low-1", "low-2"))
    assert hosts.changes.since("host's VMs", before) == {"host-a"}
    assert ranked(hosts.availability, 1) == []
    store.telling.set()
    await taking
    assert store.told == [["mode", "stopped", "pressure"]], "all at once"
    assert [event.kind for event in await store.events(3)] == ["pressure", "stopped", "mode"]


@each_store
async def test_news_that_could_not_be_written_are_told_by_the_next_report_once(store: Writes) -> None:
    hosts = hosts_of(store, Clock())
    for name in ("low-1", "low-2"):
        await record(store, name, "host-a")
    await hosts.take(report())
    store.untold = 2
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is full"):
            await hosts.take(told_of())
    for _ in range(2):
        await hosts.take(told_of())
    assert store.told == [["mode", "stopped", "pressure"]] * 3
    assert [event.kind for event in await store.events(10)].count("mode") == 1
    await hosts.take(report())
    assert store.told[3:] == [["mode"]]


@each_store
async def test_news_that_a_manager_did_not_write_before_it_was_killed_are_told_by_the_next_one_once(
    store: Writes,
) -> None:
    for name in ("low-1", "low-2"):
        await record(store, name, "host-a")
    await hosts_of(store, Clock()).take(report())
    for killed in (True, False, False):
        hosts = hosts_of(store, Clock())
        await hosts.load()
        store.telling.clear()
        taking = asyncio.create_task(hosts.take(told_of()), name="take")
        async with asyncio.timeout(20):
            while not taking.done() and len(store.told) < 1 + (not killed):
                await asyncio.sleep(0)
        if killed:
            taking.cancel()
        store.telling.set()
        await asyncio.gather(taking, return_exceptions=True)
    assert store.told == [["mode", "stopped", "pressure"]] * 2
    assert [event.kind for event in await store.events(10)].count("mode") == 1


@each_store
async def test_news_whose_plan_is_cancelled_while_they_wait_for_the_store_are_told_by_the_next_report(
    store: Writes,
) -> None:
    hosts = hosts_of(store, Clock())
    await hosts.take(report())
    async with hosts._saving:
        asked = asyncio.create_task(hosts.take(report(mode="paused")), name="a plan's question")
        async with asyncio.timeout(20):
            while not hosts._saving._waiters:
                await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    await hosts.take(report(mode="paused"))
    await hosts.take(report(mode="paused"))
    assert [event.kind for event in await store.events(10)].count("mode") == 1
    (stored,) = await store.hosts()
    assert HostReport.model_validate_json(stored.report_json) == report(mode="paused")


@each_store
async def test_hosts_of_an_earlier_run_are_known_and_not_open_until_they_report(store: Writes) -> None:
    clock = Clock()
    await hosts_of(store, clock).take(report())
    hosts = hosts_of(store, clock)
    await hosts.load()
    assert len(hosts) == 1
    assert not hosts.is_ready("host-a")
    assert ranked(hosts.availability, 1) == []
    await hosts.take(report())
    assert ranked(hosts.availability, 1) == ["host-a"]
    await hosts.settle()


@each_store
async def test_a_stored_body_is_a_repeated_one_also_where_somebody_has_read_it(
    store: Writes,
) -> None:
    await hosts_of(store, Clock()).take(report())
    (stored,) = await store.hosts()
    for asked in (False, True):
        hosts = hosts_of(store, Clock())
        await hosts.load()
        if asked:
            assert hosts.state("host-a")[0] == "silent"
            assert [host.report.id for host in hosts.all()] == ["host-a"]
        assert not hosts.repeat("host-a", b"another")
        assert hosts.repeat("host-a", stored.report_json.encode())
        assert ranked(hosts.availability, 1) == ["host-a"]


@each_store
async def test_when_a_host_was_last_seen_is_stored_now_and_then_though_its_reports_say_nothing_new(
    store: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "SEEN", 2)
    now, monotonic = Clock(), Clock()
    hosts = Hosts(store, 10.0, now, monotonic)

    async def stored() -> list[float]:
        later = hosts_of(store, Clock())
        await later.load()
        return [status.seen_at for status in await later.page(10, None)]

    for name in ("host-a", "host-b", "host-c"):
        await hosts.take(report(name))
    now.now, monotonic.now = 5000.0, 200.0
    for name in ("host-a", "host-b", "host-c"):
        await hosts.take(report(name))
    await hosts.save_seen()
    assert await stored() == [5000.0] * 3
    now.now, monotonic.now = 6000.0, 300.0
    await hosts.take(report("host-b"))
    now.now, monotonic.now = 7000.0, 400.0
    assert await stored() == [5000.0] * 3
    await hosts.save_seen()
    assert await stored() == [5000.0, 6000.0, 5000.0]


# --- what is promised ------------------------------------------------------------------------------------------------


def arrival(cores: float, name: str = "new") -> Arrival:
    """Of a fixed VM."""
    return Arrival(name, size := ResourceVector(cores, 1000.0), size, 60.0)


def test_the_room_that_a_plan_has_chosen_is_no_others_until_it_ends() -> None:
    availability = Availability()
    availability.open(report(free_cores=4.0))
    assert ranked(availability, 5.0) == ["host-a"], "4 free and 1 deflatable"
    availability.reserve("plan-1", "host-a", arrival(3.0))
    assert (ranked(availability, 2.0), ranked(availability, 2.1)) == (["host-a"], [])
    availability.open(report(free_cores=5.0))
    assert ranked(availability, 3.0) == ["host-a"], "a new report leaves the promise"
    availability.reserve("plan-1", "host-b", arrival(3.0))
    assert ranked(availability, 6.0) == ["host-a"]
    availability.open(report("host-b"))
    assert ranked(availability, 6.1) == [], "a promise counts for a host that opens later"
    availability.reserve("plan-1", None)
    assert ranked(availability, 9.0) == ["host-b"]


def test_the_room_of_a_vm_that_its_host_charges_by_now_counts_once() -> None:
    availability = Availability()
    large = report(free_cores=16.0).model_copy(update={"capacity": Vector(cpu_cores=16.0, memory_mib=16_000.0)})
    availability.open(large)
    availability.reserve("plan-1", "host-a", arrival(8.0, "high-1"))
    assert (availability.reserved("host-a").cpu_cores, ranked(availability, 9.1)) == (8.0, [])
    starting = status("high-1", "fixed", 8.0, 1000.0).model_copy(update={"state": VMState.STARTING})
    charged = {"vms": (starting,), "free": Vector(cpu_cores=8.0, memory_mib=7000.0)}
    availability.open(large.model_copy(update=charged))
    assert (availability.reserved("host-a").cpu_cores, ranked(availability, 8.0)) == (0.0, ["host-a"])
    # One that is off holds nothing there.
    off = starting.model_copy(update={"state": VMState.STOPPED, "start_size": Vector(), "current": Vector()})
    availability.open(large.model_copy(update={"vms": (off,)}))
    assert ranked(availability, 9.1) == []


def test_of_low_priority_vms_that_are_to_come_their_minimums_count_where_guests_would_be_waited_for() -> None:
    availability = Availability()
    availability.open(report(free_cores=4.0))
    assert ranked(availability, 1.0, "wait") == []
    size, keeps = ResourceVector(4.0, 1000.0), ResourceVector(1.0, 300.0)
    availability.reserve("plan-1", "host-a", Arrival("low-1", size, keeps, 60.0))
    assert (ranked(availability, 2.0), ranked(availability, 2.0, "preempt")) == ([], [])
    assert (ranked(availability, 4.0, "wait"), ranked(availability, 4.1, "wait")) == (["host-a"], [])
    availability.reserve("plan-1", None)
    assert ranked(availability, 1.0, "wait") == []


def test_each_vm_costs_its_overhead_the_promised_ones_too() -> None:
    availability = Availability()
    availability.open(report())
    assert ranked(availability, 1.0, mib=9000.0 - OVERHEAD_MIB) == ["host-a"]
    assert ranked(availability, 1.0, mib=9000.0 - OVERHEAD_MIB + 1) == []
    availability.reserve("plan-1", "host-a", arrival(1.0))
    assert ranked(availability, 1.0, mib=8000.0 - 2 * OVERHEAD_MIB) == ["host-a"]
    assert ranked(availability, 1.0, mib=8000.0 - 2 * OVERHEAD_MIB + 1) == []
    assert availability.offers("place", 3) == [("host-a", ResourceVector(8.0, 8000.0 - 2 * OVERHEAD_MIB))]


def test_preemption_counts_what_low_priority_vms_are_charged() -> None:
    availability = Availability()
    availability.open(report("host-a", 0.0, status("low-1"), status("high-1", "fixed")))
    assert ranked(availability, 4.0, "preempt", 8000.0 + 4000.0) == ["host-a"], "its VM and its overhead"
    assert ranked(availability, 4.1, "preempt") == []
    assert ranked(availability, 1.1) == []


@each_store
async def test_a_placement_under_way_keeps_its_room_from_others(tmp_path: Path) -> None:
    """Both fit the host alone, and not together; the second must not be sent there to find out."""
    host = FakeAgent("host-a", cpu_cores=4.0, memory_mib=8000.0)
    other = FakeAgent("host-b", cpu_cores=4.0, memory_mib=2000.0)
    async with cluster_of(tmp_path, host, other) as cluster:
        host.trouble.never_ends = True
        first = {"request_id": "first", "vm": vm("first", "fixed", 3.0, 6000.0), "deadline_s": 3.0}
        assert (await cluster.call("POST", "/v1/vms", json=first))[0] == 202
        await asyncio.wait_for(host.polled.wait(), 20)
        body = vm("second", "fixed", 3.0, 1500.0)
        assert (await cluster.create(body, policy="first-fit")).host == "host-b"
        host.end_pending()
        assert (await cluster.ended("first")).host == "host-a"


# --- reports ---------------------------------------------------------------------------------------------------------


@each_store
async def test_the_same_body_again_is_answered_without_being_read_and_any_other_is_read(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, silent_after_s=60.0) as cluster:
        assert cluster.manager is not None
        taken = []
        plain = cluster.manager.hosts.take

        async def take(report: HostReport) -> None:
            taken.append(report.free.cpu_cores)
            await plain(report)

        cluster.manager.hosts.take = take  # type: ignore[method-assign]

        async def send(one: HostReport) -> object:
            path, options = f"/v1/hosts/{one.id}/report", {"data": one.model_dump_json()}
            status, answer = await cluster.call("POST", path, report_token(HOSTS_KEY, one.id), **options)
            assert status == 200, answer
            return answer

        change = CoreChange(
            sequence=1, machine="vm-1", host="host-a", at=1.0, cores_before=0.0, cores_after=1.0, cause="test"
        )
        first = report().model_copy(update={"core_changes": (change,)})
        assert await send(first) == await send(first) == {"epoch": 1, "acknowledged": 1}
        await send(report(free_cores=2.0))
        assert await send(report(free_cores=2.0)) == {"epoch": 1, "acknowledged": 1}
        await send(first)
        assert taken == [CORES, 2.0, CORES]


@each_store
async def test_what_is_read_in_between_makes_the_last_body_news_again(store: Writes) -> None:
    hosts = hosts_of(store, Clock())
    body = report()
    await hosts.take(body)
    hosts.remember(body, b"body")
    await hosts.take(report(free_cores=1.0))
    assert not hosts.repeat("host-a", b"body")
    hosts.remember(body, b"body")
    assert not hosts.repeat("host-a", b"body"), "it is no longer the host's report"


@each_store
async def test_a_body_as_an_earlier_run_has_stored_it_is_no_news_and_opens_its_host(store: Writes) -> None:
    body = report("host-a", 4.0, status("low-1"))
    await hosts_of(store, Clock()).take(body)
    hosts = hosts_of(store, Clock())
    await hosts.load()
    assert not hosts.repeat("host-a", report("host-a", 3.0, status("low-1")).model_dump_json().encode())
    assert ranked(hosts.availability, 4.0) == []
    assert hosts.repeat("host-a", body.model_dump_json().encode())
    assert hosts.repeat("host-a", body.model_dump_json().encode())
    assert (ranked(hosts.availability, 5.0), ranked(hosts.availability, 5.1)) == (["host-a"], [])
    await hosts.settle()
    assert len(store.batches) == 1


@each_store
async def test_only_what_is_worth_it_is_written(store: Writes) -> None:
    hosts = hosts_of(store, Clock())
    low = status("low-1")
    await hosts.take(report("host-a", 4.0, low))
    moving = low.model_copy(update={"throttled_share": 0.5, "pressure": "stalls"})
    await hosts.take(report("host-a", 3.0, moving))
    assert len(store.batches) == 1
    smaller = moving.model_copy(update={"current": Vector(cpu_cores=2.0, memory_mib=4000.0)})
    await hosts.take(report("host-a", 3.0, smaller))
    await hosts.take(report("host-a", 3.0))
    assert len(store.batches) == 3
    (stored,) = await store.hosts()
    assert HostReport.model_validate_json(stored.report_json) == report("host-a", 3.0)


@each_store
async def test_reports_that_come_together_are_stored_together_some_at_a_time(store: Writes) -> None:
    hosts = hosts_of(store, Clock())
    names = [f"host-{number:02d}" for number in range(40)]
    store.gate.clear()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(hosts.take(report(name)), name=name) for name in names]
        async with asyncio.timeout(20):
            while not store.batches:
                await asyncio.sleep(0)
        assert len(hosts._unsaved) == 40 - SAVED
        assert not any(task.done() for task in tasks), "none is taken before it is stored"
        store.gate.set()
    # A command's own write waits for one of them at the most.
    assert store.batches == [names[:16], names[16:32], names[32:]]
    assert [stored.id for stored in await store.hosts()] == sorted(names)


@each_store
async def test_a_write_that_fails_fails_its_own_report_and_the_others_are_stored_after_all(store: Writes) -> None:
    hosts = hosts_of(store, Clock())
    store.gate.clear()
    store.failures = 2
    names = [f"host-{number}" for number in range(4)]
    tasks = [asyncio.create_task(hosts.take(report(name)), name=name) for name in names]
    async with asyncio.timeout(20):
        while len(hosts._unsaved) < 3:
            await asyncio.sleep(0)
    store.gate.set()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(end) for end in ended] == [OSError, OSError, type(None), type(None)]
    assert [hosts.get(name) is not None for name in names] == [False, False, True, True]
    assert set(names[2:]) <= {stored.id for stored in await store.hosts()}


@each_store
async def test_a_report_that_is_overtaken_by_a_later_one_does_not_stand(store: Writes) -> None:
    hosts = hosts_of(store, Clock())
    await hosts.take(report("host-a", 4.0, status("low-1")))
    store.gate.clear()
    early = asyncio.create_task(hosts.take(report("host-a", 8.0)), name="early")
    async with asyncio.timeout(20):
        while len(store.batches) < 2:
            await asyncio.sleep(0)
    late = report("host-a", 3.0, status("low-1"))
    await asyncio.wait_for(hosts.take(late), 20)
    store.gate.set()
    await early
    known = hosts.get("host-a")
    assert known is not None
    assert known.report == late
    (stored,) = await store.hosts()
    assert HostReport.model_validate_json(stored.report_json) == late


@each_store
async def test_a_restarted_manager_acknowledges_what_is_stored_at_once(store: Writes) -> None:
    changes = [
        CoreChange(sequence=n, machine="vm-1", host="host-a", at=n, cores_before=0.0, cores_after=1.0, cause="test")
        for n in (1, 2, 7)
    ]
    await record(store, "vm-1", "host-a")
    await store.add_core_changes("host-a", changes)
    assert await store.acknowledged() == {"host-a": 7}


@each_store
async def test_a_vm_that_was_paused_while_others_grew_grows_when_it_runs_again(tmp_path: Path) -> None:
    agent = FakeAgent("host-a", cpu_cores=3.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent) as cluster:
        await cluster.create(vm("low-1"))
        low = agent.vms["low-1"]
        smaller = low.current.model_copy(update={"cpu_cores": 1.0})
        agent.vms["low-1"] = low.model_copy(
            update={"state": VMState.PAUSED, "current": smaller, "off_reason": "paused"}
        )
        async with asyncio.timeout(10):
            while not await cluster.events("paused"):
                await asyncio.sleep(0.05)
        (row,) = (await cluster.get("/v1/vms?state=paused"))["vms"]
        assert (row["name"], row["state"], row["current"]["cpu_cores"]) == ("low-1", "paused", 1.0)
        assert row["sentence"].startswith("host-a says that it is paused")
        assert (await cluster.get("/v1/vms?state=running"))["vms"] == []
        agent.vms["low-1"] = low.model_copy(update={"current": smaller})
        async with asyncio.timeout(10):
            while agent.cores("low-1") < 3.0:
                await asyncio.sleep(0.05)


@each_store
async def test_a_vm_that_went_off_by_itself_is_told_of_once_and_its_room_is_shared(tmp_path: Path) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent) as cluster:
        await cluster.create(vm("low-1"))
        await cluster.create(vm("low-2"))
        await cluster.create(vm("high-1", "fixed", 3.0, 800.0))
        assert agent.cores("low-2") < 3.0
        gone = {
            "state": VMState.STOPPED,
            "current": Vector(),
            "overhead_mib": 0.0,
            "off_reason": "its domain has ended",
        }
        start_size = agent.vms["low-1"].current
        agent.vms["low-1"] = agent.vms["low-1"].model_copy(update={**gone, "start_size": start_size})
        async with asyncio.timeout(10):
            while agent.cores("low-2") < 3.0:
                await asyncio.sleep(0.05)
        (event,) = await cluster.events("stopped")
        assert (event["vm"], "`ebb vm start low-1` starts it" in event["sentence"]) == ("low-1", True)
        (row,) = [row for row in (await cluster.get("/v1/vms"))["vms"] if row["name"] == "low-1"]
        assert (row["state"], row["host"]) == ("stopped", "host-a")
        assert not await cluster.events("preempted")
