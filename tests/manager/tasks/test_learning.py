"""What the manager has learned of its machines: it outlives restarts and kills, and is held against what happens."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster_manager.inventory.hosts import Hosts
from cluster_manager.plans.plans import VMPhase
from cluster_manager.store.database import Database
from cluster_manager.store.rows import StoredChange
from cluster_manager.store.store import Store
from cluster_manager.tasks import knowledge as knowledge_module
from cluster_manager.tasks.core_changes import CoreChanges
from cluster_manager.tasks.knowledge import NAME, Knowledge, encoded
from cluster_manager.tasks.machines import TaskMachines
from ebbtide.matcher.match.rounds import LIVE_PREDICTION
from ebbtide.matcher.predict.predictor import PredictorOptions
from ebbtide.messages.machines import CoreChange
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.fake_engine import FakeEngine, settings
from tests.manager.inventory.test_hosts import Clock, report, status
from tests.manager.plan_events import record
from tests.manager.tasks.test_tasks import becomes, submit, task
from tests.matcher.pools import renewal_pool
from tests.waiting import until

DAY_S = 86_400.0
BEGIN_S = 1e9
MACHINES = [f"m{number}" for number in range(6)]


def host_of(machine: str) -> str:
    return "host-a" if int(machine[1:]) % 2 else "host-b"


class Term:
    """One manager's part that learns, on a store."""

    def __init__(self, database: Database, clock: Clock, options: PredictorOptions = LIVE_PREDICTION) -> None:
        self.store = Store(database, clock)
        self.clock = clock
        # Nobody who has reported is silent, however slow this machine is.
        self.hosts = Hosts(self.store, 10.0, clock, lambda: 0.0)
        #: By how much the clock was set forward while it ran.
        self.stepped_s = 0.0
        self.changes = CoreChanges(self.store, self.hosts, clock, options, lambda: clock.now - self.stepped_s)
        self.knowledge = Knowledge(self.store, self.changes)

    def probabilities(self) -> list[float | None]:
        now = self.clock.now
        return [
            value for lasts_s in (60.0, 600.0, 5000.0)
            for value in self.changes.predictor.probabilities_of(MACHINES, now, lasts_s)
        ]  # fmt: skip


@contextlib.asynccontextmanager
async def term_of(database: Database, clock: Clock, options: PredictorOptions = LIVE_PREDICTION) -> AsyncIterator[Term]:
    term = Term(database, clock, options)
    await term.store.open()
    if not await term.store.vms():
        for name in MACHINES:
            await record(term.store, name, host_of(name))
    await term.knowledge.recall()
    try:
        yield term
    finally:
        await term.store.close()


async def tell(term: Term, host: str, *changes: CoreChange) -> None:
    """A report of a host."""
    told = report(host, 8.0, *(status(name) for name in MACHINES if host_of(name) == host))
    told = told.model_copy(update={"core_changes": changes})
    await term.hosts.take(told)
    await term.changes.take(told)


async def learned_anew(term: Term) -> list[float | None]:
    """The probabilities by the store alone."""
    anew = Term(term.store._database, term.clock)
    anew.changes = CoreChanges(term.store, term.hosts, term.clock)
    await anew.changes.load()
    return anew.probabilities()


class Happening:
    """Changes of a pool on two hosts, brought by reports as time goes on."""

    def __init__(self, clock: Clock, days: float = 1.0) -> None:
        self._clock = clock
        law = lambda generator: float(generator.exponential(2500.0))  # noqa: E731
        self._left = list(renewal_pool(len(MACHINES), law, days * DAY_S, seed=3, cores=4))
        self.sequences = {"host-a": 0, "host-b": 0}

    async def until(self, term: Term, at_s: float) -> None:
        """Let it be so late, every 20 minutes a report of each host."""
        while self._clock.now < BEGIN_S + at_s:
            self._clock.now = min(self._clock.now + 1200.0, BEGIN_S + at_s)
            told: dict[str, list[CoreChange]] = {host: [] for host in self.sequences}
            while self._left and BEGIN_S + self._left[0].at <= self._clock.now:
                change = self._left.pop(0)
                host = host_of(change.machine)
                self.sequences[host] += 1
                told[host].append(
                    CoreChange(
                        sequence=self.sequences[host],
                        machine=change.machine,
                        host=host,
                        at=BEGIN_S + change.at,
                        cores_before=change.cores_before,
                        cores_after=change.cores_after,
                        cause="test",
                    )
                )
            for host, changes in told.items():
                await tell(term, host, *changes)


@pytest.fixture
def clock() -> Clock:
    made = Clock()
    made.now = BEGIN_S
    return made


async def test_a_manager_that_is_killed_goes_on_with_all_that_it_had_learned(database: Database, clock: Clock) -> None:
    """What came after the last save is learned from the store, also what reports bring of before it."""
    happening = Happening(clock)
    async with term_of(database, clock) as first:
        await happening.until(first, 0.6 * DAY_S)
        await first.knowledge.save()
        saved = first.changes.calibration()
        await happening.until(first, 0.8 * DAY_S)
        expected = first.probabilities()
    assert saved.machines.count > 100
    async with term_of(database, clock) as second:
        assert second.changes.predictor.since == first.changes.predictor.since
        # Landmarks are noted by what was known then: the second one knows of all changes in time.
        assert second.probabilities() == pytest.approx(expected, abs=0.1)
        assert None not in expected
        found = second.changes.calibration().machines
        # Outcomes that became known after the save are settled again by the changes, or as time goes on.
        assert found.count >= saved.machines.count
        again = second.changes.predictor.late
        await happening.until(second, 0.9 * DAY_S)
        assert second.changes.calibration().machines.count > found.count
        assert second.changes.predictor.late == again == 0


async def test_a_restart_without_anything_in_between_changes_nothing(database: Database, clock: Clock) -> None:
    happening = Happening(clock)
    async with term_of(database, clock) as first:
        await happening.until(first, 0.5 * DAY_S)
        first.changes.tasks.add(0.7, True)
        expected, calibration = first.probabilities(), first.changes.calibration()
        first.knowledge.start()
        await first.knowledge.stop()
    async with term_of(database, clock) as second:
        assert second.probabilities() == expected
        assert second.changes.calibration() == calibration
        assert second.changes.calibration().tasks.count == 1


async def test_a_document_that_cannot_be_used_is_learned_anew(database: Database, clock: Clock) -> None:
    happening = Happening(clock)
    async with term_of(database, clock) as first:
        await happening.until(first, 0.3 * DAY_S)
        assert first.changes.calibration().machines.count > 0
        await first.knowledge.save()
        whole = await first.store.knowledge(NAME)
    assert whole is not None
    cut = json.loads(whole)
    del cut["predictor"]["rolling"]["ended"]
    for body in ("{", "[]", '{"version": 1}', '{"version": 99}', json.dumps(cut)):
        async with term_of(database, clock) as other:
            await other.store.save_knowledge(NAME, body)
        async with term_of(database, clock) as second:
            assert second.changes.calibration().machines.count == 0
            assert None not in second.probabilities()
    async with term_of(database, clock) as other:
        await other.store.save_knowledge(NAME, whole)
    # What was counted by another window is not gone on with, either.
    options = PredictorOptions(window_s=7200.0)
    async with term_of(database, clock, options) as second:
        assert second.changes.calibration().machines.count == 0
        await second.knowledge.save()
    async with term_of(database, clock, options) as third:
        assert third.probabilities() == second.probabilities()


async def test_what_was_saved_while_the_clock_was_ahead_is_learned_anew(database: Database, clock: Clock) -> None:
    happening = Happening(clock)
    async with term_of(database, clock) as first:
        await happening.until(first, 0.3 * DAY_S)
        right = clock.now
        clock.now += 365 * DAY_S
        await first.knowledge.save()
        clock.now = right
    async with term_of(database, clock) as second:
        assert second.changes.predictor.now <= clock.now
        assert None not in second.probabilities()
        await happening.until(second, 0.6 * DAY_S)
        assert second.changes.predictor.now == clock.now
        assert second.changes.calibration().machines.count > 0
        await second.knowledge.save()
    # Managers' clocks differ by a little.
    clock.now -= 50.0
    async with term_of(database, clock) as third:
        assert third.changes.calibration().machines.count > 0


@pytest.mark.parametrize("mended_by", ["a save", "a question"])
async def test_what_a_clock_taught_that_was_ahead_for_a_moment_is_learned_again_and_not_saved(
    database: Database, clock: Clock, mended_by: str
) -> None:
    happening = Happening(clock)
    async with term_of(database, clock) as term:
        await happening.until(term, 0.1 * DAY_S)
        right = clock.now
        machines = TaskMachines(term.store, term.hosts, term.changes)
        machines.pool().predictor.advance(right)
        clock.now += 2 * DAY_S
        await tell(term, "host-a")
        term.changes.calibration()
        machines.pool().predictor.advance(clock.now)
        assert term.changes.predictor.now == clock.now
        clock.now = right
        # Reports wait for nothing of that.
        await tell(term, "host-b")
        assert term.changes.predictor.now > clock.now
        if mended_by == "a save":
            await term.knowledge.save()
        else:
            await term.changes.ranking(60.0)
        for predictor in (term.changes.predictor, machines.pool().predictor):
            assert predictor.now <= clock.now
        anew = Term(database, clock)
        anew.changes = CoreChanges(term.store, term.hosts, clock)
        await anew.changes.load()
        assert term.probabilities() == anew.probabilities()
        assert None not in term.probabilities()
        await term.knowledge.save()
    async with term_of(database, clock) as second:
        assert second.probabilities() == term.probabilities()


@pytest.mark.parametrize("mended_by", ["a question", "the next manager"])
async def test_a_clock_that_is_behind_for_a_while_when_a_term_begins_costs_nothing_that_was_learned(
    database: Database, clock: Clock, mended_by: str
) -> None:
    happening = Happening(clock)
    async with term_of(database, clock) as first:
        await happening.until(first, 0.3 * DAY_S)
        await first.knowledge.save()
        right, calibrated = clock.now, first.changes.calibration().machines.count
    assert calibrated > 0
    clock.now = right - 7 * DAY_S
    async with term_of(database, clock) as behind:
        if mended_by == "a question":
            clock.now, behind.stepped_s = right + 60.0, 7 * DAY_S
            await behind.changes.ranking(60.0)
            assert behind.probabilities() == await learned_anew(behind)
        await behind.knowledge.save()
    clock.now = right + 120.0
    async with term_of(database, clock) as last:
        assert None not in last.probabilities()
        if mended_by == "the next manager":
            assert last.probabilities() == await learned_anew(last)
        assert last.changes.calibration().machines.count >= calibrated


async def test_what_comes_while_the_past_day_is_learned_again_is_learned_once(
    database: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    happening = Happening(clock)
    async with term_of(database, clock) as term:
        await happening.until(term, 0.1 * DAY_S)
        clock.now += 2 * DAY_S
        term.changes.calibration()
        clock.now -= 2 * DAY_S
        read = term.store.core_changes_since

        def change(cores: int) -> CoreChange:
            happening.sequences["host-b"] += 1
            number, at = happening.sequences["host-b"], clock.now - 10.0 + cores
            of = {"machine": "m0", "host": "host-b", "cores_before": cores + 1, "cores_after": cores, "cause": "test"}
            return CoreChange(sequence=number, at=at, **of)

        async def reads_and_hears(at: float) -> list[StoredChange]:
            # The reports of just before and just after the query are taken in before it is answered.
            term.changes._learn("host-b", await stored(change(1)))
            found = await read(at)
            term.changes._learn("host-b", await stored(change(2)))
            return found

        async def stored(new: CoreChange) -> list[StoredChange]:
            _, found = await term.store.add_core_changes("host-b", [new], new.sequence - 1, lambda host: {})
            return found

        monkeypatch.setattr(term.store, "core_changes_since", reads_and_hears)
        await term.changes.follow_clock()
        monkeypatch.undo()
        last = term.changes.predictor.last_of("m0")
        assert last is not None
        assert (last.cores, last.at) == (2, clock.now - 8.0)
        term.changes._learn("host-b", await term.store.core_changes_of("host-b", 0))
        found = term.changes.predictor
    async with term_of(database, clock) as second:
        anew = second.changes.predictor
        assert found.lasts() == anew.lasts()
        assert found.state.all_ended.sum() == anew.state.all_ended.sum() > 0


async def test_deciles_and_brier_score_are_those_of_the_predictions(database: Database, clock: Clock) -> None:
    happening = Happening(clock)
    async with term_of(database, clock) as term:
        empty = term.changes.calibration()
        assert (empty.machines.count, empty.machines.brier, empty.machines.deciles) == (0, None, ())
        await happening.until(term, DAY_S)
        found = term.changes.calibration().machines
        assert found.count == sum(row.count for row in found.deciles)
        for row in found.deciles:
            assert row.low <= row.predicted <= row.low + 0.1
            assert 0 <= row.observed <= 1
        large = [abs(row.observed - row.predicted) for row in found.deciles if row.count >= 200]
        assert found.worst_error == (pytest.approx(max(large)) if large else None)
        # Between what it would be with all predictions at the better and at the worse end of their deciles.
        least = most = 0.0
        for row in found.deciles:
            low, high = row.low, row.low + 0.1
            least += row.count / found.count * (row.observed * (1 - high) ** 2 + (1 - row.observed) * low**2)
            most += row.count / found.count * (row.observed * (1 - low) ** 2 + (1 - row.observed) * high**2)
        assert found.brier is not None
        assert least <= found.brier <= most
        assert len(found.deciles) > 3


@pytest.mark.parametrize("asked", [False, True])
async def test_predictions_are_settled_by_what_came_late_and_not_by_time_while_their_host_is_silent(
    database: Database, clock: Clock, asked: bool
) -> None:
    mine = [name for name in MACHINES if host_of(name) == "host-a"]
    happening = Happening(clock)
    async with term_of(database, clock) as term:
        await happening.until(term, 0.6 * DAY_S)
        check = term.changes.check

        def waiting(*names: str) -> list[tuple[float, int]]:
            """Of each open prediction of these machines, its end and the cores that it is about."""
            rows = check.document()["open"]
            return [(at + lasts_s, had) for name in names for at, lasts_s, _, had, _ in rows.get(name, ())]

        def outcomes() -> tuple[int, int]:
            """So many predictions came true, and so many did not."""
            true = sum(round(row.count * row.observed) for row in check.calibration.curve())
            return true, check.calibration.count - true

        # Its machines shrink to one core in the next minute, and it is heard of again after two hours.
        at, open_then, before = clock.now + 60.0, waiting(*mine), outcomes()
        refuted = sum(end > at and had > 1 for end, had in open_then)
        rows = [row for rows in check.document()["open"].values() for row in rows]
        ended = [row[4] for row in rows if row[0] + row[1] <= clock.now]
        assert not [end for end, _ in open_then if clock.now < end <= at]
        assert refuted > 0
        for _ in range(6):
            clock.now += 1200.0
            if asked:
                await tell(term, "host-b")
                term.changes.calibration()
        assert all(row in waiting(*mine) for row in open_then if row[0] > at)
        first = happening.sequences["host-a"] + 1
        shrinks = [
            CoreChange(
                sequence=first + number,
                machine=name,
                host="host-a",
                at=at,
                cores_before=4.0,
                cores_after=1.0,
                cause="test",
            )
            for number, name in enumerate(mine)
        ]
        await tell(term, "host-a", *shrinks)
        if not asked:
            assert outcomes() == (before[0] + ended.count(False), before[1] + ended.count(True))
        # What was refuted counts when its time is over, and all of it is known.
        found = [row for name in mine for row in check.document()["open"][name]]
        over = [row for row in found if row[0] + row[1] <= clock.now + 1200.0]
        assert sum(row[4] for row in over) >= refuted
        before, clock.now = outcomes(), clock.now + 1200.0
        await tell(term, "host-a")
        term.changes.calibration()
        true, false = outcomes()
        assert false - before[1] >= sum(row[4] for row in over)
        if not asked:
            assert false - before[1] == sum(row[4] for row in over)
            assert true - before[0] == sum(not row[4] for row in over)


async def test_a_silent_hosts_machines_are_not_seen_to_keep_their_cores(database: Database, clock: Clock) -> None:
    happening = Happening(clock)
    async with term_of(database, clock) as term:
        term.hosts = Hosts(term.store, 10.0, clock, clock)
        term.changes = CoreChanges(term.store, term.hosts, clock)
        await happening.until(term, 0.3 * DAY_S)
        machines = TaskMachines(term.store, term.hosts, term.changes)
        copied = machines.pool().predictor
        assert machines.pool().predictor is copied
        predictor, before = term.changes.predictor, set(term.changes.check.document()["open"])
        assert before == set(MACHINES)
        for _ in range(5):
            clock.now += 1200.0
            await tell(term, "host-b")
            term.changes.calibration()
        noted = {name: (predictor.period.noted[row] >= 0).any() for name, row in predictor.rows.items()}
        assert noted == {name: host_of(name) == "host-b" for name in MACHINES}
        open_now = term.changes.check.document()["open"]
        made_at = {name: max(row[0] for row in rows) for name, rows in open_now.items()}
        assert {name: at == clock.now for name, at in made_at.items()} == noted
        # So do tasks' predictions, which are made from a copy.
        assert machines.pool().predictor is not copied


async def test_the_hours_in_which_no_manager_ran_are_none_in_which_all_kept_their_cores(
    database: Database, clock: Clock
) -> None:
    happening = Happening(clock)
    async with term_of(database, clock) as first:
        await happening.until(first, 0.5 * DAY_S)
        await first.hosts.save_seen()
        await first.knowledge.save()
        watched = first.changes.predictor.period.all_watched.copy()
    clock.now += 6 * 3600.0
    second = Term(database, clock)
    await second.store.open()
    await second.hosts.load()
    await second.knowledge.recall()
    for host in happening.sequences:
        await tell(second, host)
    second.changes.calibration()
    period = second.changes.predictor.period
    assert watched.sum() > 0
    assert (period.all_watched <= watched).all()
    assert not (period.noted >= 0).any()
    clock.now += 900.0
    second.changes.calibration()
    assert ((period.noted >= 0).sum(1)[list(second.changes.predictor.rows.values())] == 1).all()
    await second.store.close()


async def test_what_is_told_after_a_clock_was_set_back_is_learned_in_its_order(
    database: Database, clock: Clock
) -> None:
    """A host boots with its clock 50 minutes ahead, begins a VM, is set right, and ends it."""
    async with term_of(database, clock) as term:
        for number, (ahead_s, before, after) in enumerate([(3000.0, 0.0, 4.0), (0.0, 4.0, 2.0), (0.0, 2.0, 0.0)], 1):
            told = CoreChange(
                sequence=number,
                machine="m0",
                host="host-b",
                at=clock.now + ahead_s,
                cores_before=before,
                cores_after=after,
                cause="test",
            )
            await tell(term, "host-b", told)
            clock.now += 10.0
        again = CoreChanges(term.store, term.hosts, clock)
        await again.load()
        for changes in (term.changes, again):
            last = changes.predictor.last_of("m0")
            assert last is not None
            assert (last.cores, last.gone, changes.predictor.late) == (0, True, 0)
            assert last.at <= clock.now + 60.0
        clock.now += DAY_S
        for changes in (term.changes, again):
            changes.predictor.advance(clock.now)
            assert changes.predictor.rows == {}


def test_writing_it_down_takes_the_state_of_the_moment(clock: Clock, tmp_path: Path) -> None:
    """The document is written elsewhere while changes come in."""
    store = Store(tmp_path / "unused.sqlite", clock)
    changes = CoreChanges(store, Hosts(store, 10.0, clock), clock)
    written = changes.document()
    changes.predictor.row("later")
    assert written()["predictor"]["rows"] == {}
    generator = np.random.default_rng(1)
    for number in range(300):
        changes.predictor.period.stood_s[number % 8] = generator.random()
    assert written()["predictor"]["period"]["stood_s"]["index"] == []


def test_what_was_learned_is_encoded_in_pieces_as_at_once() -> None:
    value = {
        "rows": {f"vm-{number}": number for number in range(3000)},
        "open": {"vm \N{SNOWMAN}": [[1.5, 2.25e-9, 0.1, 4]] * 4, "none": [], "nothing": None},
        "index": list(range(25_000)),
        "one more": [0.1] * 1001,
        "empty": {},
    }
    pieces = list(encoded(value))
    assert "".join(pieces) == json.dumps(value, separators=(",", ":"))
    assert max(map(len, pieces)) < 10_000


# --- over HTTP -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("each_store")
async def test_predictions_of_tasks_are_held_against_their_ends_and_that_outlives_a_restart(tmp_path: Path) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    engine = FakeEngine(**{"low-1": 4})
    async with cluster_of(tmp_path, agent, **settings(engine)) as cluster:
        assert (await cluster.get("/v1/calibration"))["tasks"] == {
            "count": 0, "brier": None, "worst_error": None, "deciles": [],
        }  # fmt: skip
        await learned(cluster, agent)
        await cluster.create(vm("low-1"))

        async def known() -> bool:
            ranked = await cluster.get("/v1/machines?duration_s=60")
            seen = [row["completion_probability"] for row in ranked["machines"]]
            return engine.machines["low-1"].usable_cores == 3 and len(seen) == 1 and seen[0] is not None

        await until(known)
        # A task that takes all that the machine has: any shrink is one too many.
        await submit(cluster, "good", cores=3, restartable=True)
        await becomes(cluster, "good", "running")
        engine.end("good")
        await becomes(cluster, "good", "done")
        # One that may not be begun again goes on whatever happens, and says nothing.
        await submit(cluster, "once", cores=3)
        await becomes(cluster, "once", "running")
        engine.end("once")
        await becomes(cluster, "once", "done")
        found = (await cluster.get("/v1/calibration"))["tasks"]
        assert (found["count"], found["worst_error"]) == (1, None)
        (row,) = found["deciles"]
        assert (row["count"], row["observed"]) == (1, 1.0)
        assert 0.5 < row["predicted"] < 1.0
        assert row["predicted"] == pytest.approx(1 - found["brier"] ** 0.5)
        await cluster.stop_manager()
        await cluster.start_manager()
        assert (await cluster.get("/v1/calibration"))["tasks"] == found
        assert (await task(cluster, "good"))["state"] == "done"


async def learned(cluster: Cluster, agent: FakeAgent) -> None:
    """A pool of machines that were VMs here once, for the others to be judged by."""
    assert cluster.manager is not None
    now = cluster.manager._clock()
    law = lambda generator: float(generator.exponential(900.0))  # noqa: E731
    changes = list(renewal_pool(6, law, 6000.0, seed=2, cores=3))
    for machine in sorted({change.machine for change in changes}):
        await record(cluster.manager.store, machine, agent.id, VMPhase.ENDED)
    for change in changes:
        agent.add_change(change.machine, change.cores_before, change.cores_after, at=now - 6000.0 + change.at)
    await agent.send_report()


@pytest.mark.usefixtures("each_store")
async def test_what_was_learned_is_saved_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knowledge_module.Knowledge.__init__, "__defaults__", (0.05,))
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent) as cluster:
        await learned(cluster, agent)
        manager: Any = cluster.manager

        async def saved() -> bool:
            body = await manager.store.knowledge(NAME)
            return body is not None and len(json.loads(body)["predictor"]["rows"]) == 6

        await until(saved)
