"""The acquirer's service with a provider that fails: nothing that is refused keeps the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster_manager.defaults import Retention
from cluster_manager.errors import RequestError
from cluster_manager.store.database import Database
from cluster_manager.store.pruning import statements
from cluster_manager.store.store import Store
from cluster_manager.tasks.acquiring import AcquirerService
from ebbtide.matcher.acquire.acquirer import Acquirer, Machine, Request, Standing
from ebbtide.matcher.acquire.provision import Provision
from ebbtide.matcher.acquire.settings import AcquirerSettings
from ebbtide.matcher.match.attempts import EngineMachine
from ebbtide.matcher.match.tasks import Task, TaskOrder
from ebbtide.messages.explanations import EventKind
from tests.manager.databases import rows_of
from tests.manager.plan_events import happen, record
from tests.manager.tasks.test_harvest_machines import SETTINGS


class Machines:
    """A provider that refuses what it is told to, and remembers what it did."""

    def __init__(self, provision: Provision) -> None:
        self.provision = provision
        self.refusing = {"request"}
        self.did: list[tuple[str, object]] = []

    async def look(self) -> Provision:
        return self.provision

    async def request(self, number: int) -> None:
        self._do("request", number)

    async def cancel(self, number: int) -> None:
        self._do("cancel", number)

    async def deallocate(self, machine: str) -> None:
        self._do("deallocate", machine)

    def _do(self, what: str, which: object) -> None:
        if what in self.refusing:
            raise RequestError(409, f"no {what} of {which}")
        self.did.append((what, which))


def service(
    clock: Callable[[], float], kept_in: Store | None = None, settings: AcquirerSettings = SETTINGS
) -> AcquirerService:
    async def nothing(*_: object) -> Any:
        return {}

    tasks: Any = SimpleNamespace(looked_at=None, trouble="", unfinished={}, machines={}, shown={})
    machines: Any = SimpleNamespace(cores=nothing, last_changes=dict, off=frozenset())
    store: Any = kept_in or SimpleNamespace(save_tasks=nothing, rows=nothing)
    return AcquirerService(settings, tasks, machines, store, lambda: None, clock)


async def test_a_machine_that_is_refused_keeps_no_other_instruction() -> None:
    """A cancellation that was lost, and a machine that was to be given back, are not lost again."""
    acquirer = service(lambda: 10.0)
    acquirer.state = Acquirer(
        {"harvest-1": Machine("harvest-1", 0.0, Standing.EMPTY)}, {1: Request(1, 0.0, None, "")}, 2, next_at=99.0
    )
    machines = Machines(Provision({"harvest-1"}, asked={2}))
    with pytest.raises(RequestError, match="no request of 1"):
        await acquirer._look(SETTINGS, machines)
    assert sorted(machines.did) == [("cancel", 2), ("deallocate", "harvest-1")]


async def test_a_pool_is_looked_after_where_the_clock_was_set_back() -> None:
    now = 1_000_000.0
    acquirer = service(lambda: now)
    leaves = Machine("harvest-1", 0.0, Standing.LEAVING)
    acquirer.state, acquirer._first = Acquirer({"harvest-1": leaves}, next_at=now + SETTINGS.period_s), False
    acquirer._tell()
    machines, tasks = Machines(Provision({"harvest-1"})), cast(Any, acquirer._tasks)
    machines.refusing.clear()
    now, tasks.looked_at = 1000.0, 999_999.0
    for _ in range(2):
        await acquirer._look(SETTINGS, machines)
        assert (acquirer.state.next_at, machines.did) == (1000.0 + SETTINGS.period_s, [])
    now, tasks.looked_at = 1002.0, 1001.0
    await acquirer._look(SETTINGS, machines)
    assert machines.did == [("deallocate", "harvest-1")], "the tasks' service has looked since it was told"
    now = 1000.0 + SETTINGS.period_s
    await acquirer._look(SETTINGS, machines)
    assert acquirer.state.next_at == now + SETTINGS.period_s, "the period is over"


async def test_a_machine_that_was_leaving_leaves_after_its_events_would_be_pruned(database: Database) -> None:
    now = 1000.0
    store = Store(database, lambda: now)
    await store.open()
    for name in ("harvest-1", "harvest-2", "others"):
        await record(store, name, "host-a")
        await happen(store, "placed", vm=name)
    rows_of(database, "UPDATE vms SET acquired = 1, priority = 'harvest' WHERE name <> 'others'")
    kinds: tuple[EventKind, ...] = ("acquirer-looked", "acquirer-decommissioned", "acquirer-decommissioned")
    for kind in kinds:
        await happen(store, kind, "it changes", vm=None if kind == "acquirer-looked" else "harvest-1")
        now += 1.0
    await happen(store, "waiting")
    for _ in range(9):
        await store.prune(statements(Retention(most_events=1, batch=1), now)["events"])
    left = rows_of(database, "SELECT kind, vm FROM events ORDER BY id")
    assert left == [
        ("placed", "harvest-2"),
        ("acquirer-looked", None),
        ("acquirer-decommissioned", "harvest-1"),
        ("waiting", None),
    ]
    acquirer = service(lambda: now, store)
    await acquirer.recall(Machines(Provision({"harvest-1", "harvest-2"})))
    assert {name for name, one in acquirer.state.machines.items() if one.standing is Standing.LEAVING} == {"harvest-1"}
    assert acquirer.state.next_at == 1000.0 + SETTINGS.period_s
    await store.close()


async def test_no_machine_is_asked_for_a_task_that_fits_none() -> None:
    size = {"cpu_cores": 2.0, "memory_mib": 500.0}
    settings = AcquirerSettings(
        least_machines=0, most_machines=4, vm={"nominal": size, "ceiling": {**size, "cpu_cores": 8.0}}
    )
    acquirer = service(lambda: 10.0, settings=settings)
    tasks, machines = cast(Any, acquirer._tasks), Machines(Provision(set()))
    machines.refusing.clear()
    tasks.looked_at = 9.0
    tasks.unfinished = {"huge": Task(TaskOrder("huge", ("true",), cores=64), "0a", 1.0)}
    await acquirer._look(settings, machines)
    assert (machines.did, acquirer.status().wanted_cores) == ([], 0)
    said = "; nothing is asked for huge with 64 cores: no machine of the pool has more than 8"
    assert acquirer.status().sentence.endswith(said)
    tasks.unfinished["large"] = Task(TaskOrder("large", ("true",), cores=8), "0b", 1.0)
    acquirer.state = replace(acquirer.state, next_at=10.0)
    await acquirer._look(settings, machines)
    assert acquirer.status().wanted_cores == 8
    assert ("request", 1) in machines.did


async def test_a_machine_is_not_given_back_before_its_engine_has_drained_it() -> None:
    acquirer = service(lambda: 10.0)
    acquirer.state = Acquirer({"harvest-1": Machine("harvest-1", 0.0, Standing.LEAVING)}, next_at=99.0)
    acquirer._first, acquirer._told = False, {"harvest-1": 1.0}
    machines, tasks = Machines(Provision({"harvest-1"})), cast(Any, acquirer._tasks)
    machines.refusing.clear()
    told = EngineMachine("harvest-1", 2, 2, drained="ebbtide: it is to be given back")
    tasks.looked_at, tasks.machines = 9.0, {"harvest-1": told}
    for shown in (replace(told, drained=""), replace(told, foreign_cores=1)):
        tasks.shown = {"harvest-1": shown}
        await acquirer._look(SETTINGS, machines)
        assert machines.did == []
    tasks.shown = {"harvest-1": told}
    await acquirer._look(SETTINGS, machines)
    assert machines.did == [("deallocate", "harvest-1")]


async def test_a_machine_that_is_off_is_none_that_is_held_and_is_not_lost() -> None:
    now = 10.0
    acquirer = service(lambda: now)
    acquirer.state, acquirer._first = Acquirer({"harvest-1": Machine("harvest-1", 0.0)}, next_at=99.0), False
    provision = Provision({"harvest-1"})
    machines, tasks, known = Machines(provision), cast(Any, acquirer._tasks), cast(Any, acquirer._machines)
    machines.refusing.clear()

    async def cores(names: list[str]) -> dict[str, int]:
        return {name: 2 * (name not in known.off) for name in names}

    known.cores, known.off, tasks.looked_at = cores, frozenset({"harvest-1"}), 9.0
    await acquirer._look(SETTINGS, machines)
    assert machines.did == [("request", 1)]
    machines.provision = Provision({"harvest-1", "harvest-2"}, {1: "harvest-2"}, asked={1})
    for at in (20.0, 10.0 + SETTINGS.period_s, 30.0 + SETTINGS.period_s):
        now, tasks.looked_at = at, at - 1.0
        await acquirer._look(SETTINGS, machines)
    assert machines.did[-1] == ("deallocate", "harvest-1")
    assert [one.name for one in acquirer.state.kept] == ["harvest-2"]
