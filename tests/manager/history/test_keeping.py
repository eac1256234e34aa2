"""Keeping of the history: in the store over restarts and leaders, coarser with age, within bounds, of own VMs only."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster_manager.errors import LostLeadership, RequestError, StoreError
from cluster_manager.history.ageing import Ageing
from cluster_manager.history.reading import Histories
from cluster_manager.history.recorder import SAMPLE_S, WRITTEN_S, Recorder
from cluster_manager.history.tiers import DAY_S, HOUR_S, TIERS
from cluster_manager.inventory.hosts import Hosts
from cluster_manager.plans.plans import VMPhase
from cluster_manager.store.caution import LOOKS
from cluster_manager.store.database import Database
from cluster_manager.store.history import HistoryRow, outdated
from cluster_manager.store.store import Store
from ebbtide.messages.common import Vector
from ebbtide.messages.history import HostUsage, VMUsage
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.vms import VMState, VMStatus
from tests.manager import cluster as clusters
from tests.manager.databases import rows_of
from tests.manager.inventory.test_hosts import report, status
from tests.manager.plan_events import record

pytestmark = pytest.mark.usefixtures("each_store")

#: A whole day, some years after the epoch.
BEGIN = 20_000 * DAY_S
NOT_KEPT = {"cpu_pressure_percent", "memory_pressure_percent", "resident_memory_mib"}


class Term:
    """One manager's time as leader: what of it keeps the history, on a store of its own, under one clock for all."""

    def __init__(self, database: Database, time: list[float]) -> None:
        self._time = time
        self.store = Store(database, self.now)
        self.hosts = Hosts(self.store, 10.0, self.now, self.now)
        self.store.on_vms = lambda names: self.hosts.changes.note("VM", names)
        self.recorder = Recorder(self.hosts, self.store, self.now, pause_s=0.0)
        self.ageing = Ageing(self.store, self.now, pause_s=0.0)
        self.histories = Histories(self.recorder, self.ageing, self.store, self.hosts, self.now)

    def now(self) -> float:
        return self._time[0]

    async def passes(self, seconds: float, *reports: HostReport, every_s: float = SAMPLE_S) -> None:
        """Time in which hosts report the same again and again."""
        end = self._time[0] + seconds
        while self._time[0] < end:
            for one in reports:
                await self.hosts.take(one)
            await self.recorder.turn()
            self._time[0] += every_s

    async def vm(self, name: str = "web", **wanted: Any) -> dict[str, list[Any]]:
        found = await self.histories.of_vm(name, wanted.get("begin"), wanted.get("end"), wanted.get("points", 2000))
        return {"times": list(found.times), **{name: list(row) for name, row in found.columns.model_dump().items()}}


@pytest.fixture
def time() -> list[float]:
    return [float(BEGIN)]


@pytest.fixture
async def term(tmp_path: Path, time: list[float]) -> AsyncIterator[Term]:
    made = Term(clusters.database_in(tmp_path), time)
    await made.store.open()
    await record(made.store, "web", "host-a")
    yield made
    await made.store.close()


def sized(cores: float, name: str = "web", **more: Any) -> VMStatus:
    fields = {"current": Vector(cpu_cores=cores, memory_mib=1000.0 * cores), **more}
    return status(name).model_copy(update=fields)


def known(series: Sequence[float | None]) -> list[float]:
    return [value for value in series if value is not None]


async def test_a_step_is_the_mean_of_its_samples_and_the_highest_pressure(term: Term) -> None:
    for number, (cores, pressure) in enumerate(((4.0, 10.0), (4.0, 50.0), (2.0, 20.0), (2.0, 20.0))):
        vm = VMUsage(name="web", cpu_pressure_percent=pressure, guest_cpu_cores=1.0, guest_memory_mib=0.0)
        term.recorder.take("host-a", HostUsage(vms=(vm,)))
        await term.passes(SAMPLE_S, report("host-a", 4.0, sized(cores, pressure="it waits" if number else None)))
    found = await term.vm(begin=BEGIN, end=BEGIN + 60)
    assert found["times"] == [BEGIN]
    assert found["bound_cpu_cores"] == [3.0]
    assert (found["cpu_pressure_percent"], found["cpu_pressure_max_percent"]) == ([25.0], [50.0])
    assert found["under_pressure_percent"] == [75.0]
    assert (found["guest_cpu_cores"], found["hypervisor_cpu_cores"]) == ([0.5], [0.5])
    assert found["resident_memory_mib"] == [None]


async def test_a_vm_that_moves_on_before_anything_is_written_has_the_history_of_both_its_hosts(
    term: Term, time: list[float]
) -> None:
    await term.passes(180, report("host-a", 4.0, sized(4.0)))
    record_move(term.store, "web", "host-b")
    await term.passes(420, report("host-b", 4.0, sized(2.0)), report("host-a", 4.0))
    found = await term.vm(begin=BEGIN, end=BEGIN + 600)
    assert sum(cores * 60 for cores in known(found["bound_cpu_cores"])) == 4 * 180 + 2 * 420
    assert sorted(await term.store.homes_of("web")) == ["host-a", "host-b"]


async def test_an_answer_says_where_its_steps_begin_and_end(term: Term) -> None:
    """They are whole: what is beside the time that was asked for is in the sums, too."""
    await term.passes(900, report("host-a", 4.0, sized(4.0)))
    found = await term.histories.of_vm("web", BEGIN + 200, BEGIN + 330, 2)
    assert (found.from_, found.to, found.times) == (BEGIN + 120, BEGIN + 360, (BEGIN + 120, BEGIN + 240))
    now = await term.histories.of_vm("web", BEGIN + 200, None, 2000)
    assert now.to == term.now()


async def test_what_was_written_is_there_after_a_restart_with_a_hole_while_no_manager_was(
    term: Term, time: list[float], tmp_path: Path
) -> None:
    await term.passes(600, report("host-a", 4.0, sized(3.0)))
    await term.recorder.write(under_way=True)
    await term.store.close()
    time[0] += 600
    later = Term(clusters.database_in(tmp_path), time)
    await later.store.open()
    await later.passes(300, report("host-a", 4.0, sized(2.0)))
    found = await later.vm(begin=BEGIN, end=time[0])
    assert found["bound_cpu_cores"] == [3.0] * 10 + [None] * 10 + [2.0] * 5
    await later.store.close()


async def test_a_new_leader_has_what_the_old_one_wrote_and_that_one_writes_no_more(
    term: Term, time: list[float], tmp_path: Path
) -> None:
    await term.passes(300, report("host-a", 4.0, sized(3.0)))
    await term.recorder.write()
    leader = Term(clusters.database_in(tmp_path), time)
    await leader.store.open()
    await term.passes(60, report("host-a", 4.0, sized(3.0)))
    with pytest.raises(LostLeadership):
        await term.recorder.write(under_way=True)
    await leader.passes(60, report("host-a", 4.0, sized(2.0)))
    found = await leader.vm(begin=BEGIN, end=time[0])
    assert found["bound_cpu_cores"] == [3.0] * 5 + [None] + [2.0]
    await leader.store.close()


async def test_a_stop_while_steps_are_written_stores_none_of_them_twice(
    term: Term, time: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    await term.passes(300, report("host-a", 4.0, sized(4.0)))
    add, begun, go_on = term.store.add_history, asyncio.Event(), asyncio.Event()

    async def held_up(rows: Sequence[HistoryRow]) -> None:
        begun.set()
        await go_on.wait()
        await add(rows)

    async def shielded(rows: Sequence[HistoryRow]) -> None:
        """As the store's own writes are."""
        await asyncio.shield(asyncio.create_task(held_up(rows), name="held up"))

    monkeypatch.setattr(term.store, "add_history", shielded)
    await term.hosts.take(report("host-a", 4.0, sized(2.0)))
    term.recorder.start()
    await begun.wait()
    stopping = asyncio.create_task(term.recorder.stop(), name="stop")
    asyncio.get_running_loop().call_soon(go_on.set)
    assert await stopping
    await term.passes(300, report("host-a", 4.0, sized(2.0)))
    await term.recorder.write(under_way=True)
    time[0] += 7 * HOUR_S
    await term.ageing.age()
    # The first five minutes would weigh as ten.
    found = await term.vm(begin=BEGIN, end=BEGIN + 600)
    assert found["bound_cpu_cores"] == [pytest.approx(3.0, abs=0.05)]


async def test_a_vm_whose_record_comes_after_its_report_is_kept_from_then_on(term: Term) -> None:
    said = report("host-a", 4.0, sized(3.0, "late"))
    await term.passes(60, said)
    await record(term.store, "late", "host-a")
    await term.passes(60, said)
    assert (await term.vm("late", begin=BEGIN, end=BEGIN + 120))["bound_cpu_cores"] == [None, 3.0]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_vm_that_is_reported_while_the_record_is_asked_or_cannot_be_is_kept_from_the_next_look_on(
    term: Term, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    await record(term.store, "late", "host-a")
    both = report("host-a", 4.0, sized(3.0), sized(2.0, "late"))
    recorded_homes = term.store.recorded_homes

    async def meanwhile(names: Collection[str]) -> Mapping[str, str]:
        monkeypatch.undo()
        await term.hosts.take(both)
        if fails:
            raise StoreError("it is away")
        return await recorded_homes(names)

    await term.hosts.take(both if fails else report("host-a", 4.0, sized(3.0)))
    monkeypatch.setattr(term.store, "recorded_homes", meanwhile)
    with contextlib.suppress(StoreError):
        await term.recorder.turn()
    await term.passes(60)
    for name, cores in (("web", 3.0), ("late", 2.0)):
        assert known((await term.vm(name, begin=BEGIN, end=BEGIN + 60))["bound_cpu_cores"]) == [cores]


async def test_a_vm_that_moved_has_one_history_over_both_hosts_and_only_its_own_host_tells_of_it(term: Term) -> None:
    here, false_claim = report("host-a", 4.0, sized(3.0)), report("host-b", 4.0, sized(0.5))
    await term.passes(300, here, false_claim)
    await term.recorder.write()
    record_move(term.store, "web", "host-b")
    await term.passes(300, report("host-a", 4.0), report("host-b", 4.0, sized(2.0)))
    found = await term.vm(begin=BEGIN, end=BEGIN + 600)
    assert found["bound_cpu_cores"] == [3.0] * 5 + [2.0] * 5
    await term.recorder.write()
    assert sorted(await term.store.homes_of("web")) == ["host-a", "host-b"]
    assert (await term.vm(begin=BEGIN, end=BEGIN + 600))["bound_cpu_cores"] == found["bound_cpu_cores"]
    host = await term.histories.of_host("host-b", BEGIN, BEGIN + 600, 2000)
    assert known(host.columns.vms) == [0.0] * 5 + [1.0] * 5


def record_move(store: Store, name: str, host: str) -> None:
    """As a migration's end records it."""
    rows_of(store._database, f"UPDATE vms SET host = '{host}' WHERE name = '{name}'")


async def test_a_vm_that_is_off_and_a_host_that_is_silent_leave_holes(term: Term, time: list[float]) -> None:
    await term.passes(60, report("host-a", 4.0, sized(3.0)))
    await term.passes(60, report("host-a", 8.0, sized(3.0, state=VMState.STOPPED, current=Vector())))
    time[0] += 15.0
    await term.passes(45)
    found = await term.vm(begin=BEGIN, end=time[0])
    assert found["bound_cpu_cores"] == [3.0, None, None]
    host = await term.histories.of_host("host-a", BEGIN, time[0], 2000)
    assert host.columns.vms == (1.0, 0.0, None)
    assert host.columns.bound_cpu_cores == (3.0, 0.0, None)


async def test_the_mean_of_a_step_times_the_seconds_that_are_known_is_what_a_vm_had(term: Term) -> None:
    await term.passes(360, report("host-a", 4.0, sized(3.0)))
    await term.passes(3240, report("host-a", 8.0, sized(3.0, state=VMState.STOPPED, current=Vector())))
    found = await term.vm(begin=BEGIN, end=BEGIN + 3600, points=2)
    assert (found["bound_cpu_cores"], found["known_s"]) == ([3.0, None], [360.0, None])
    host = await term.histories.of_host("host-a", BEGIN, BEGIN + 3600, 2)
    assert host.columns.known_s == (1800.0, 1800.0)


async def test_what_goes_over_into_the_store_while_it_is_read_counts_once(
    term: Term, monkeypatch: pytest.MonkeyPatch
) -> None:
    await term.passes(60, report("host-a", 4.0, sized(4.0)))
    await term.recorder.write()
    await term.passes(60, report("host-a", 4.0, sized(2.0)))
    read, writes = term.store.history, list[asyncio.Task[None]]()

    async def written_meanwhile(hosts: Collection[str], step_s: int, begin: int, end: int) -> list[HistoryRow]:
        if not writes:
            writes.append(asyncio.create_task(term.recorder.write(), name="write meanwhile"))
            await asyncio.wait(writes, timeout=0.2)
        return await read(hosts, step_s, begin, end)

    monkeypatch.setattr(term.store, "history", written_meanwhile)
    for _ in range(2):
        found = await term.vm(begin=BEGIN - 600, points=2)
        assert (found["bound_cpu_cores"], found["known_s"]) == ([None, 3.0], [None, 120.0])
        await asyncio.gather(*writes)


async def test_steps_grow_coarser_with_age_and_all_of_a_month_is_there(term: Term, time: list[float]) -> None:
    """Samples once a minute: what they say does not change, so that there is something to compare with."""
    sizes = [2.0, 4.0, 1.0, 3.0]
    days = 4
    for quarter in range(4 * days):
        await term.passes(6 * HOUR_S, report("host-a", 4.0, sized(sizes[quarter % 4])), every_s=150.0)
        await term.recorder.write()
        time[0] += 700.0 if quarter == 4 * days - 1 else 0.0
        await term.ageing.age()
    for _ in range(LOOKS + 1):  # the clock has gone on by hours between two looks
        await term.ageing.age()
    found = await term.vm(begin=BEGIN, end=time[0] - 700)
    assert found["times"][1] - found["times"][0] == HOUR_S
    assert found["bound_cpu_cores"] == [size for size in sizes * days for _ in range(6)]
    recent = await term.vm(begin=time[0] - 700 - 2 * DAY_S, end=time[0] - 700)
    assert recent["times"][1] - recent["times"][0] == 600
    assert recent["bound_cpu_cores"] == [size for size in sizes * 2 for _ in range(36)]
    packs = dict(rows_of(term.store._database, "SELECT step_s, count(*) FROM history GROUP BY step_s"))
    assert packs[3600] == days
    assert packs[600] <= (TIERS[1].kept_s + 2 * DAY_S) / HOUR_S
    await term.ageing.age()
    assert dict(rows_of(term.store._database, "SELECT step_s, count(*) FROM history GROUP BY step_s")) == packs


async def test_a_clock_that_was_ahead_and_is_set_back_stops_neither_writing_nor_folding(
    term: Term, time: list[float]
) -> None:
    await term.passes(300, report("host-a", 4.0, sized(3.0)))
    time[0] += 2 * DAY_S
    await term.passes(WRITTEN_S, report("host-a", 4.0, sized(3.0)))
    await term.ageing.age()
    time[0] = BEGIN + 300.0
    await term.ageing.age()
    await term.passes(2 * HOUR_S + 900, report("host-a", 4.0, sized(2.0)))
    await term.ageing.age()
    assert rows_of(term.store._database, "SELECT min(at) FROM history WHERE step_s = 60") == [(BEGIN + 300,)]
    query = f"SELECT at FROM history WHERE step_s = 600 AND at < {BEGIN + DAY_S} ORDER BY at"
    assert rows_of(term.store._database, query) == [(BEGIN,), (BEGIN + HOUR_S,)]
    found = await term.vm(begin=BEGIN + 600, end=time[0])
    assert set(found["bound_cpu_cores"]) == {2.0}


async def test_a_look_with_a_clock_that_is_days_ahead_leaves_what_is_read_when_it_is_right_again(
    term: Term, time: list[float], tmp_path: Path
) -> None:
    for _ in range(4):
        await term.passes(6 * HOUR_S, report("host-a", 4.0, sized(3.0)), every_s=150.0)
        await term.recorder.write()
        await term.ageing.age()
    await term.store.close()
    time[0] += 5 * DAY_S
    later = Term(clusters.database_in(tmp_path), time)
    await later.store.open()
    await later.ageing.age()
    time[0] += 700.0 - 5 * DAY_S
    await later.ageing.age()
    for ago, step_s in ((0.0, 600), (3 * DAY_S, HOUR_S)):
        time[0] += ago
        found = await later.vm(begin=BEGIN, end=BEGIN + DAY_S)
        assert found["times"][1] - found["times"][0] == step_s
        assert found["bound_cpu_cores"] == [3.0] * (DAY_S // step_s)
    await later.store.close()


@pytest.mark.parametrize("ahead_s", [HOUR_S, 8 * HOUR_S, 12 * HOUR_S])
async def test_a_manager_that_starts_hours_ahead_leaves_the_minutes_that_are_read_when_its_clock_is_right(
    term: Term, time: list[float], tmp_path: Path, ahead_s: float
) -> None:
    """As with a hardware clock in local time."""
    await term.passes(7 * HOUR_S, report("host-a", 4.0, sized(3.0)), every_s=60.0)
    await term.recorder.write()
    await term.ageing.age()
    await term.store.close()
    now = time[0]
    time[0] = now + ahead_s
    later = Term(clusters.database_in(tmp_path), time)
    await later.store.open()
    await later.ageing.age()
    time[0] = now
    found = await later.vm(begin=now - 6 * HOUR_S + 600, end=now - 60)
    assert found["times"][1] - found["times"][0] == 60
    assert set(found["bound_cpu_cores"]) == {3.0}
    await later.store.close()


async def test_what_is_folded_again_keeps_the_steps_whose_finer_ones_are_gone(term: Term, time: list[float]) -> None:
    for cores in (3.0, 1.0):
        await term.passes(HOUR_S / 2, report("host-a", 4.0, sized(cores)))
        await term.recorder.write()
    time[0] += 700.0
    await term.ageing.age()
    query = "SELECT at, body FROM history WHERE step_s = 600"
    before = rows_of(term.store._database, query)
    assert await term.store.prune(outdated(60, BEGIN + 900.0, 10)) > 0
    await term.store.save_knowledge("history", "{}")
    await Ageing(term.store, term.now, pause_s=0.0).age()
    assert rows_of(term.store._database, query) == before


async def test_a_host_and_a_vm_that_are_gone_are_forgotten_after_their_time(term: Term, time: list[float]) -> None:
    await term.passes(600, report("host-a", 4.0, sized(3.0)))
    await term.recorder.write()
    await record(term.store, "gone", "host-a", VMPhase.ENDED)
    term.hosts.forget("host-a")
    assert known((await term.vm(begin=BEGIN, end=BEGIN + 600))["bound_cpu_cores"]) == [3.0] * 10
    for days in (1, 5, 40):
        time[0] = BEGIN + days * DAY_S + 1000
        for _ in range(LOOKS + 1):
            await term.ageing.age()
        await term.recorder.write()
        left = rows_of(term.store._database, "SELECT count(*) FROM history")[0][0]
        assert (left > 0) is (days < 40)
    assert rows_of(term.store._database, "SELECT count(*) FROM history_homes") == [(0,)]
    with pytest.raises(RequestError, match="no host host-a"):
        await term.histories.of_host("host-a", None, None, 300)


async def test_folding_that_broke_off_is_done_again_and_comes_to_the_same(term: Term, time: list[float]) -> None:
    await term.passes(2 * HOUR_S + 300, report("host-a", 4.0, sized(3.0)), every_s=60.0)
    await term.recorder.write()
    time[0] += 400
    await term.ageing.age()
    query = "SELECT step_s, at, length(body) FROM history ORDER BY 1, 2"
    before = rows_of(term.store._database, query)
    again = Ageing(term.store, term.now, pause_s=0.0)
    await term.store.save_knowledge("history", "no JSON")
    await again.age()
    assert rows_of(term.store._database, query) == before
    assert [row[0] for row in before].count(600) == 2


async def test_a_damaged_pack_is_left_out_and_the_rest_is_read(term: Term, time: list[float]) -> None:
    await term.passes(300, report("host-a", 4.0, sized(3.0)))
    await term.recorder.write()
    await term.passes(300, report("host-a", 4.0, sized(2.0)))
    await term.recorder.write()
    rows = await term.store.history(["host-a"], 60, BEGIN, BEGIN + 300)
    await term.store.replace_history(
        ["host-a"], 60, BEGIN, BEGIN + 300, [row._replace(body=row.body[: len(row.body) // 2]) for row in rows]
    )
    assert (await term.vm(begin=BEGIN, end=BEGIN + 600))["bound_cpu_cores"] == [None] * 5 + [2.0] * 5


async def test_what_an_agent_said_counts_for_a_while_only(term: Term, time: list[float]) -> None:
    term.recorder.take("host-a", HostUsage(vms=(VMUsage(name="web", resident_memory_mib=700.0),)))
    await term.passes(480, report("host-a", 4.0, sized(3.0)))
    resident = (await term.vm(begin=BEGIN, end=BEGIN + 480))["resident_memory_mib"]
    assert resident == [700.0] * 5 + [None] * 3
    assert not math.isnan(sum(known(resident)))


async def test_the_store_is_asked_for_rows_in_batches_once_in_some_minutes_whatever_is_reported(term: Term) -> None:
    writes = 0
    add = term.store.add_history

    async def counted(rows: Any) -> None:
        nonlocal writes
        writes += 1
        await add(rows)

    term.store.add_history = counted  # type: ignore[method-assign]
    names = [f"host-{number}" for number in range(30)]
    for number in range(10):
        await term.passes(60, *(report(name, 4.0 + number) for name in names))
    assert writes == 600 // WRITTEN_S - 1
    assert rows_of(term.store._database, "SELECT count(*) FROM history") == [(30 * writes,)]
