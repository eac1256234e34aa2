"""The manager as the acquirer's provider: what is asked of it when the store, or what is asked for, fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from cluster_manager.errors import RequestError, StoreError
from cluster_manager.inventory.versions import Precondition
from cluster_manager.plans.plans import VMPhase
from cluster_manager.tasks.harvest_machines import HarvestMachines
from ebbtide.deflation.allocations import Priority
from ebbtide.matcher.acquire.settings import AcquirerSettings
from ebbtide.messages.operations import OperationState
from ebbtide.messages.requests import VMRequest

SIZE = {"cpu_cores": 2.0, "memory_mib": 500.0}
SETTINGS = AcquirerSettings(most_machines=4, vm={"nominal": SIZE, "ceiling": SIZE})


@dataclass
class World:
    """Operations and store in one: rows of VMs, and plans that end when the test says so."""

    rows_: dict[str, Any] = field(default_factory=dict)
    plans: dict[str, Any] = field(default_factory=dict)
    created: list[tuple[str, str]] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    #: Raised by the next creation, before or after it is written down; and by each deletion.
    before: Exception | None = None
    after: Exception | None = None
    busy: bool = False
    #: What happens before a deletion is taken on.
    meanwhile: Callable[[], object] = lambda: None

    async def rows(self, query: Any) -> list[Any]:
        return list(self.rows_.values())

    async def vms(self, name: str) -> list[Any]:
        return [self.rows_[name]] if name in self.rows_ else []

    async def operation(self, request_id: str, wait_s: float) -> Any:
        return self.plans.get(request_id)

    async def create(self, request: VMRequest, acquired: bool = False) -> None:
        self.created.append((request.request_id, request.vm.name))
        trouble, self.before = self.before, None
        if trouble is not None:
            raise trouble
        if request.request_id not in self.plans:
            self.put(request.vm.name, VMPhase.PLACING, request.request_id, acquired=acquired)
            self.plans[request.request_id] = SimpleNamespace(state=OperationState.RUNNING, sentence="")
        trouble, self.after = self.after, None
        if trouble is not None:
            raise trouble

    async def delete(self, name: str, request_id: str, precondition: Precondition) -> None:
        if self.busy:
            raise RequestError(409, f"{name} is migrating", "name")
        self.meanwhile()
        precondition(self.rows_[name])
        self.deleted.append(name)
        self.put(name, VMPhase.DELETING, request_id)

    def put(
        self,
        name: str,
        phase: VMPhase,
        request_id: str = "",
        host: str | None = "host-a",
        priority: Priority = Priority.HARVEST,
        acquired: bool | None = None,
    ) -> None:
        """:param acquired: None: as before."""
        if acquired is None:
            acquired = self.rows_[name].acquired if name in self.rows_ else False
        self.rows_[name] = SimpleNamespace(
            name=name,
            phase=phase,
            host=host,
            request_id=request_id or self.rows_[name].request_id,
            owes_removal=False,
            priority=priority.value,
            acquired=acquired,
            spec=SimpleNamespace(priority=priority),
        )

    def placed(self, name: str) -> None:
        self.put(name, VMPhase.RUNNING)
        self.plans[self.rows_[name].request_id] = SimpleNamespace(state=OperationState.DONE, sentence="it is there")


def provider(world: World, term: int = 1, again_s: float = 0.0) -> HarvestMachines:
    given: Any = world
    return HarvestMachines(SETTINGS, given, given, term, again_s)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_what_the_store_failed_at_is_asked_for_again_and_is_one_machine(when: str) -> None:
    world = World()
    setattr(world, when, StoreError("the disk is full"))
    machines = provider(world)
    with pytest.raises(StoreError):
        await machines.request(1)
    assert (await machines.look()).machines == frozenset()
    await machines.request(1)
    await machines.request(1)
    # The same again, whatever the store has of it; and no more once it is known to be taken on.
    assert len(world.created) == 2
    assert world.created[0] == world.created[1]
    world.placed("harvest-1")
    found = await machines.look()
    assert (found.offers, found.asked) == ({1: "harvest-1"}, {1})


async def test_what_was_refused_is_asked_for_under_another_id() -> None:
    world = World(before=RequestError(409, "taken"))
    machines = provider(world)
    with pytest.raises(RequestError):
        await machines.request(1)
    await machines.request(1)
    assert [name for _, name in world.created] == ["harvest-1", "harvest-1"]
    assert len({request_id for request_id, _ in world.created}) == 2


async def test_a_cancelled_request_that_was_never_taken_on_leaves_its_name_free() -> None:
    world = World(before=StoreError("the disk is full"))
    machines = provider(world)
    with pytest.raises(StoreError):
        await machines.request(1)
    await machines.cancel(1)
    assert (await machines.look()).asked == frozenset()
    await machines.request(2)
    assert world.created[-1][1] == "harvest-1"


async def test_a_cancelled_request_is_no_machine_and_is_deleted_when_it_has_come() -> None:
    world = World()
    machines = provider(world)
    await machines.request(1)
    await machines.cancel(1)
    assert (await machines.look()).asked == frozenset()
    assert world.deleted == []
    world.placed("harvest-1")
    world.busy = True
    assert (await machines.look()).machines == frozenset()
    world.busy = False
    found = await machines.look()
    assert (found.machines, found.offers, world.deleted) == (frozenset(), {}, ["harvest-1"])
    # The deletion failed on a host that did not answer: it is still not wanted.
    world.put("harvest-1", VMPhase.RUNNING)
    assert (await machines.look()).machines == frozenset()
    assert world.deleted == ["harvest-1"] * 2
    del world.rows_["harvest-1"]
    await machines.look()
    await machines.request(2)
    assert world.created[-1][1] == "harvest-1"


async def test_a_machine_that_is_given_back_is_there_or_not_until_it_is_gone() -> None:
    world = World()
    machines = provider(world)
    await machines.request(1)
    world.placed("harvest-1")
    assert (await machines.look()).machines == {"harvest-1"}
    await machines.deallocate("harvest-1")
    for phase in (VMPhase.DELETING, VMPhase.FAILED):
        world.put("harvest-1", phase)
        # Also for the manager of a later term.
        for one in (machines, provider(world, 2)):
            found = await one.look()
            assert (found.machines, found.silent) == (frozenset(), {"harvest-1"})
    await machines.deallocate("harvest-1")
    assert world.deleted == ["harvest-1"] * 2
    world.put("harvest-1", VMPhase.FAILED, host=None)
    assert (await machines.look()).silent == frozenset()


async def test_a_deletion_that_fails_again_and_again_is_not_tried_at_every_look() -> None:
    world = World()
    machines = provider(world, again_s=3600.0)
    await machines.request(1)
    world.placed("harvest-1")
    for _ in range(3):
        await machines.deallocate("harvest-1")
        world.put("harvest-1", VMPhase.RUNNING)
    assert world.deleted == ["harvest-1"]
    # The next VM of its name has nothing to do with that.
    del world.rows_["harvest-1"]
    await machines.look()
    await machines.request(2)
    world.placed("harvest-1")
    await machines.deallocate("harvest-1")
    assert world.deleted == ["harvest-1"] * 2
    # And what the manager owes it removes by itself.
    again = provider(world)
    world.put("harvest-1", VMPhase.FAILED)
    world.rows_["harvest-1"].owes_removal = True
    await again.deallocate("harvest-1")
    assert world.deleted == ["harvest-1"] * 2


async def test_a_machine_that_somebody_else_deletes_is_gone() -> None:
    world = World()
    machines = provider(world)
    await machines.request(1)
    world.placed("harvest-1")
    await machines.look()
    world.put("harvest-1", VMPhase.DELETING, "by-hand")
    found = await machines.look()
    assert (found.machines, found.silent, found.asked) == (frozenset(), frozenset(), frozenset())
    assert found.refusals == {1: "it is there"}


async def test_a_machine_stays_when_the_store_has_forgotten_how_it_came() -> None:
    world = World()
    machines = provider(world)
    await machines.request(1)
    world.placed("harvest-1")
    assert (await machines.look()).machines == {"harvest-1"}
    world.plans.clear()
    assert (await machines.look()).machines == {"harvest-1"}


@pytest.mark.parametrize("priority", list(Priority))
async def test_a_vm_that_somebody_else_has_opened_is_no_machine_of_its_and_keeps_its_name_and_its_disk(
    priority: Priority,
) -> None:
    """A client may have named it so, or another manager's acquirer, whose host was given to this one."""
    world = World()
    world.put("harvest-1", VMPhase.RUNNING, "acquirer-7-1-1", priority=priority)
    world.put("harvest-2", VMPhase.FAILED, "acquirer-7-delete-2", priority=priority)
    machines = provider(world)
    found = await machines.look()
    assert (found.machines, found.silent, found.under_way, found.opened) == (set(), set(), 0, set())
    assert found.others == {"harvest-1", "harvest-2"}
    for name in found.others:
        await machines.deallocate(name)
    assert world.deleted == []
    await machines.request(1)
    assert [name for _, name in world.created] == ["harvest-3"]
    assert (await machines.look()).opened == {"harvest-3"}


@pytest.mark.parametrize("priority", [Priority.FIXED, Priority.DEFLATABLE])
async def test_a_machine_that_was_resized_to_another_priority_is_its_owners(priority: Priority) -> None:
    world = World()
    world.put("harvest-1", VMPhase.RUNNING, "somebody", priority=priority, acquired=True)
    machines = provider(world)
    assert (await machines.look()).machines == set()
    await machines.deallocate("harvest-1")
    assert world.deleted == []


async def test_a_name_that_was_given_to_somebody_elses_vm_in_the_last_moment_is_not_deleted() -> None:
    world = World()
    machines = provider(world)
    await machines.request(1)
    world.placed("harvest-1")
    world.meanwhile = lambda: world.put("harvest-1", VMPhase.RUNNING, "somebody", acquired=False)
    with pytest.raises(RequestError, match="harvest-1 was not opened by this manager's acquirer"):
        await machines.deallocate("harvest-1")
    assert world.deleted == []


async def test_a_machine_that_was_resized_to_another_priority_in_the_last_moment_is_not_deleted() -> None:
    world = World()
    machines = provider(world)
    await machines.request(1)
    world.placed("harvest-1")
    world.meanwhile = lambda: world.put("harvest-1", VMPhase.RUNNING, priority=Priority.DEFLATABLE)
    with pytest.raises(RequestError, match="harvest-1 is its owner's: it is deflatable"):
        await machines.deallocate("harvest-1")
    assert world.deleted == []


async def test_no_machine_is_called_as_one_that_somebody_else_uses() -> None:
    world = World()
    given: Any = world
    machines = HarvestMachines(SETTINGS, given, given, 1, in_use=lambda: {"harvest-1", "harvest-3"})
    for number in (1, 2):
        await machines.request(number)
    assert [name for _, name in world.created] == ["harvest-2", "harvest-4"]
