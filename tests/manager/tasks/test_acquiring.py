"""The acquirer at the manager, over HTTP, on both kinds of stores: harvest VMs come and go on fake hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete

from cluster_manager.errors import RequestError
from cluster_manager.store import schema
from cluster_manager.tasks.harvest_machines import HarvestMachines
from ebbtide.matcher.acquire.settings import AcquirerSettings
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMState
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.fake_engine import FakeEngine, settings
from tests.manager.tasks.test_tasks import becomes, condition, looked_since, submit
from tests.waiting import until

each_store = pytest.mark.usefixtures("each_store")
SIZE = {"cpu_cores": 2.0, "memory_mib": 500.0}
MACHINE = {"nominal": SIZE, "minimum": {"cpu_cores": 1.0, "memory_mib": 300.0}, "ceiling": SIZE, "template": "lab"}


def acquirer(**changes: Any) -> AcquirerSettings:
    """Harvest VMs of two cores that keep them; a period is longer than a test, but for its first look."""
    values: dict[str, Any] = {"most_machines": 4, "look_s": 0.05, "deadline_s": 3.0, "vm": MACHINE}
    return AcquirerSettings(**{**values, **changes})


def engine_with(count: int) -> FakeEngine:
    return FakeEngine(**{f"harvest-{number}": 2 for number in range(1, count + 1)})


def hosts(*engines: FakeEngine) -> list[FakeAgent]:
    """Two of them; their VMs are the engine's machines."""
    agents = [FakeAgent(f"host-{letter}", cpu_cores=6.0, memory_mib=2400.0) for letter in "ab"]
    for engine in engines:
        engine.lives = lambda name: runs_on(name, agents)
    return agents


def runs_on(name: str, agents: Iterable[FakeAgent]) -> bool:
    """Whether a machine is up: one that is a VM runs."""
    found = [agent.vms[name] for agent in agents if name in agent.vms]
    return any(one.state is VMState.RUNNING for one in found) if name.startswith("harvest-") else True


async def status(cluster: Cluster) -> Any:
    return await cluster.get("/v1/acquirer")


async def holds(cluster: Cluster, *names: str) -> Any:
    """Until exactly these are held, and nothing else is there or coming."""

    async def is_so() -> bool:
        found = await status(cluster)
        held = {row["name"]: row["standing"] for row in found["machines"]}
        return held == dict.fromkeys(names, "held") and not found["requests"]

    await until(is_so)
    return await status(cluster)


async def look_again(cluster: Cluster) -> None:
    """The period is over, and has been looked at."""
    assert cluster.manager is not None
    service = cluster.manager.acquirer
    async with service.looking:
        service.state = dataclasses.replace(service.state, next_at=0.0)

    async def looked() -> bool:
        return service.state.next_at > 0.0

    await until(looked)


@each_store
async def test_machines_are_asked_for_as_the_work_needs_and_given_back_when_it_is_done(tmp_path: Path) -> None:
    engine = engine_with(4)
    async with cluster_of(tmp_path, *hosts(engine), **settings(engine, acquirer=acquirer())) as cluster:
        found = await holds(cluster, "harvest-1")
        assert found["on"]
        assert "there are no cores: 1 more asked for" in found["machines"][0]["sentence"]
        row = await cluster.get("/v1/vms/harvest-1")
        assert (row["priority"], row["state"], row["ceiling"]["cpu_cores"]) == ("harvest", "running", 2.0)
        for number in range(2):
            await submit(cluster, f"t-{number}")
        # Four cores are wanted; at 80 % that takes five, which is three machines of two.
        await look_again(cluster)
        await holds(cluster, "harvest-1", "harvest-2", "harvest-3")
        for number in range(2):
            await becomes(cluster, f"t-{number}", "running")
        await look_again(cluster)
        assert (await holds(cluster, "harvest-1", "harvest-2", "harvest-3"))["wanted_cores"] == 4
        engine.end("t-0")
        await becomes(cluster, "t-0", "done")
        await look_again(cluster)

        async def two_held() -> bool:
            return [row["standing"] for row in (await status(cluster))["machines"]].count("held") == 2

        async def two_there() -> bool:
            return len((await status(cluster))["machines"]) == 2

        # Two of six cores are wanted: with one machine less it is half of four, with two less it would be too much.
        await until(two_held)
        # The machine that leaves may be the one that this task is on.
        engine.end("t-1")
        await until(two_there)
        assert await two_held()
        names = {row["name"] for row in (await status(cluster))["machines"]}
        assert names < {"harvest-1", "harvest-2", "harvest-3"}

        async def written_down() -> bool:
            kinds = {event["kind"] for event in (await cluster.get("/v1/events"))["events"]}
            return {"acquirer-looked", "acquirer-decommissioned", "acquirer-gave-back", "deleted"} <= kinds

        await until(written_down)


@each_store
async def test_tasks_on_other_machines_of_the_engine_ask_for_none(tmp_path: Path) -> None:
    engine = FakeEngine(far=16, **{f"harvest-{number}": 2 for number in range(1, 5)})
    async with cluster_of(tmp_path, *hosts(engine), **settings(engine, acquirer=acquirer())) as cluster:
        await holds(cluster, "harvest-1")
        await submit(cluster, "large", cores=16)
        assert (await becomes(cluster, "large", "running"))["machine"] == "far"
        await look_again(cluster)
        await look_again(cluster)
        assert (await holds(cluster, "harvest-1"))["wanted_cores"] == 0
        assert not await cluster.events("acquirer-decommissioned")


@each_store
async def test_a_machine_that_leaves_finishes_its_task_and_takes_no_other(tmp_path: Path) -> None:
    engine = engine_with(3)
    wanted = acquirer(least_machines=1, most_machines=1, replaced_share=1.0)
    async with cluster_of(tmp_path, *hosts(engine), **settings(engine, acquirer=wanted)) as cluster:
        await holds(cluster, "harvest-1")
        await submit(cluster, "long")
        assert (await becomes(cluster, "long", "running"))["machine"] == "harvest-1"
        await look_again(cluster)

        async def leaving() -> bool:
            rows = {row["name"]: row["standing"] for row in (await status(cluster))["machines"]}
            return rows == {"harvest-1": "leaving", "harvest-2": "held"}

        # The other one comes first.
        await until(leaving)
        kinds = [event["kind"] for event in (await cluster.get("/v1/events"))["events"]]
        assert kinds.index("acquirer-decommissioned") < kinds.index("placed")
        await submit(cluster, "next")
        assert (await becomes(cluster, "next", "running"))["machine"] == "harvest-2"
        row = (await status(cluster))["machines"][0]
        assert row["tasks"] == ["long"]
        assert "harvest-2 came in its place" in row["sentence"]
        assert (await cluster.get("/v1/tasks/long"))["state"] == "running"
        assert (await cluster.get("/v1/vms/harvest-1"))["state"] == "running"
        assert engine.machines["harvest-1"].drained == "ebbtide: it is to be given back"
        engine.end("long")
        await becomes(cluster, "long", "done")
        await holds(cluster, "harvest-2")

        async def deleted() -> bool:
            return (await cluster.call("GET", "/v1/vms/harvest-1"))[0] == 404

        await until(deleted)
        # Nobody has the name now. Where it comes up again, somebody else's machine has it.
        await until(condition(lambda: not engine.machines["harvest-1"].drained))
        engine.lives = lambda name: True
        await submit(cluster, "last", cores=2)
        await looked_since(cluster, engine)
        assert (await cluster.get("/v1/tasks/last"))["state"] == "waiting"
        engine.end("next")
        assert (await becomes(cluster, "last", "running"))["machine"] == "harvest-2"


@each_store
async def test_a_machine_that_its_engine_does_not_drain_is_kept_until_it_does(tmp_path: Path) -> None:
    engine = engine_with(2)
    wanted = acquirer(least_machines=1, most_machines=1, replaced_share=1.0)
    async with cluster_of(tmp_path, *hosts(engine), **settings(engine, acquirer=wanted)) as cluster:
        await holds(cluster, "harvest-1")
        engine.refusing = {"drain"}
        await look_again(cluster)
        await until(condition(lambda: engine.calls.count(("drain", "harvest-1")) > 2))
        assert cluster.manager is not None
        service = cluster.manager.acquirer
        async with service.looking:
            assert service._provider is not None
            await service._look(wanted, service._provider)
            assert service.state.machines["harvest-1"].standing == "leaving"
        engine.refusing = set()
        await holds(cluster, "harvest-2")


@each_store
async def test_a_machine_is_not_given_back_under_a_task_that_a_restored_store_does_not_have(tmp_path: Path) -> None:
    engine = engine_with(2)
    wanted = acquirer(least_machines=1, most_machines=1, replaced_share=1.0)
    async with cluster_of(tmp_path, *hosts(engine), **settings(engine, acquirer=wanted)) as cluster:
        await holds(cluster, "harvest-1")
        await submit(cluster, "since")
        assert (await becomes(cluster, "since", "running"))["machine"] == "harvest-1"
        assert cluster.manager is not None
        await cluster.manager.store._write(lambda connection: connection.execute(delete(schema.tasks)))
        await cluster.kill_manager()
        await cluster.start_manager()
        await cluster.ready()
        await holds(cluster, "harvest-1")
        await look_again(cluster)
        await until(condition(lambda: bool(engine.machines["harvest-1"].drained)))
        await looked_since(cluster, engine)
        service = cluster.manager.acquirer
        async with service.looking:
            assert service._provider is not None
            await service._look(wanted, service._provider)
            assert service.state.machines["harvest-1"].standing == "leaving"
        assert (await cluster.get("/v1/vms/harvest-1"))["state"] == "running"
        engine.end("since")
        await holds(cluster, "harvest-2")


@each_store
async def test_a_manager_that_is_killed_finds_its_machines_again_and_asks_for_no_others(tmp_path: Path) -> None:
    engine = engine_with(4)
    wanted = acquirer(least_machines=2, most_machines=2)
    async with cluster_of(tmp_path, *hosts(engine), **settings(engine, acquirer=wanted)) as cluster:
        first = await holds(cluster, "harvest-1", "harvest-2")
        await cluster.kill_manager()
        await cluster.start_manager()
        await cluster.ready()
        found = await holds(cluster, "harvest-1", "harvest-2")
        # The period goes on where it was.
        assert found["next_at"] == pytest.approx(first["next_at"], abs=1.0)
        assert "was there when this manager began to look" in found["machines"][0]["sentence"]
        assert len((await cluster.get("/v1/vms"))["vms"]) == 2


@each_store
async def test_what_an_earlier_term_could_not_get_is_asked_for_at_once_by_the_next(tmp_path: Path) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    agent.trouble.refuses = 503
    engine = engine_with(2)
    engine.lives = lambda name: runs_on(name, [agent])
    async with cluster_of(tmp_path, agent, **settings(engine, acquirer=acquirer())) as cluster:

        async def refused() -> bool:
            return "a request was refused: " in (await status(cluster))["sentence"]

        await until(refused)
        await cluster.kill_manager()
        agent.trouble.refuses = None
        await cluster.start_manager()
        await cluster.ready()

        async def holds_one() -> bool:
            """By the name that was refused, or by the next one where that is still being removed."""
            found = await status(cluster)
            return [row["standing"] for row in found["machines"]] == ["held"] and not found["requests"]

        await until(holds_one)


@each_store
async def test_what_others_take_away_is_made_up_for_and_what_finds_no_place_is_said(tmp_path: Path) -> None:
    engine = engine_with(4)
    wanted = acquirer(least_machines=2, most_machines=2)
    agent = FakeAgent("host-a", cpu_cores=4.0, memory_mib=1300.0)
    engine.lives = lambda name: runs_on(name, [agent])
    async with cluster_of(tmp_path, agent, **settings(engine, acquirer=wanted)) as cluster:
        await holds(cluster, "harvest-1", "harvest-2")
        # Both are in the way of it.
        high = await cluster.create(vm("high", "fixed", 4.0, 1000.0))
        assert high.state == "done", high.sentence

        async def refused() -> bool:
            found = await status(cluster)
            return not found["machines"] and "a request was refused: " in found["sentence"]

        await until(refused)
        await cluster.delete("high")

        async def both_are_back() -> bool:
            # The host may tell late that it has room again, so that a request is refused once more.
            await look_again(cluster)
            return len((await status(cluster))["machines"]) == 2

        await until(both_are_back)
        await holds(cluster, "harvest-1", "harvest-2")


@each_store
async def test_without_an_answer_of_the_engine_nothing_is_decided(tmp_path: Path) -> None:
    engine = engine_with(4)
    engine.unreachable = {"look"}
    async with cluster_of(tmp_path, *hosts(engine), **settings(engine, acquirer=acquirer())) as cluster:

        async def tried() -> bool:
            return engine.calls.count(("look",)) > 3

        await until(tried)
        assert (await status(cluster))["sentence"] == "it has not looked yet"
        assert (await cluster.get("/v1/vms"))["vms"] == []
        engine.unreachable = set()
        await holds(cluster, "harvest-1")


@each_store
async def test_it_is_off_by_default_and_says_so(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, **settings(engine_with(1))) as cluster:
        found = await status(cluster)
        assert (found["on"], found["machines"]) == (False, [])
        assert "no table [acquirer]" in found["sentence"]


@each_store
async def test_vms_of_others_are_left_alone(tmp_path: Path) -> None:
    engine = engine_with(4)
    async with cluster_of(tmp_path, *hosts(engine), **settings(engine, acquirer=acquirer())) as cluster:
        for name in ("harvest-x", "harvest-01", "other"):
            await cluster.create(vm(name, cpu_cores=1.0, memory_mib=400.0))
        found = await holds(cluster, "harvest-1")
        assert found["cores"] == 2
        assert len((await cluster.get("/v1/vms"))["vms"]) == 4


@each_store
async def test_a_harvest_vm_that_a_client_has_opened_is_left_alone_whatever_it_is_called(tmp_path: Path) -> None:
    engine = engine_with(4)
    async with cluster_of(tmp_path, *hosts(engine), **settings(engine, acquirer=acquirer())) as cluster:
        await holds(cluster, "harvest-1")
        await cluster.create({**MACHINE, "name": "harvest-2", "priority": "harvest"})
        # As long as it was being placed it had no core, and may have been drained for that.
        await looked_since(cluster, engine)
        await until(condition(lambda: not engine.machines["harvest-2"].drained))
        begun = len(engine.calls)
        for _ in range(2):
            await look_again(cluster)
            await holds(cluster, "harvest-1")
            assert (await cluster.get("/v1/vms/harvest-2"))["state"] == "running"
            said = {row["vm"]: row["sentence"] for row in await cluster.events("acquirer-not-ours")}
            assert (
                "this manager has a VM harvest-2, which is called as the acquirer calls its mach" in said["harvest-2"]
            )
            await cluster.kill_manager()
            await cluster.start_manager()
            await cluster.ready()
        # It is a machine like any other VM of this manager.
        for name in ("one", "other"):
            await submit(cluster, name, cores=2)
        found = {(await becomes(cluster, name, "running"))["machine"] for name in ("one", "other")}
        assert found == {"harvest-1", "harvest-2"}
        assert ("drain", "harvest-2") not in engine.calls[begun:]


@each_store
async def test_two_managers_with_one_engine_and_one_prefix_leave_each_others_machines_alone(tmp_path: Path) -> None:
    engine, north, south = engine_with(6), hosts(), hosts()
    engine.lives = lambda name: runs_on(name, [*north, *south])
    for name in ("north", "south"):
        (tmp_path / name).mkdir()
    wanted = acquirer(least_machines=1, most_machines=1, replaced_share=1.0)
    async with cluster_of(tmp_path / "north", *north, **settings(engine, acquirer=wanted)) as one:
        await holds(one, "harvest-1")
        async with cluster_of(tmp_path / "south", *south, **settings(engine, acquirer=wanted, label="south")) as other:
            # The lowest name that is free in its own store is the other one's.
            await holds(other, "harvest-2")
            for cluster in (one, other):
                await submit(cluster, "long", cores=2)
            assert (await becomes(one, "long", "running"))["machine"] == "harvest-1"
            assert (await becomes(other, "long", "running"))["machine"] == "harvest-2"
            begun = len(engine.calls)
            # What one of them drains the other one does not give free.
            await look_again(other)
            await until(condition(lambda: bool(engine.machines["harvest-2"].drained)))
            await looked_since(one, engine)
            assert engine.machines["harvest-2"].drained == "ebbtide south: it is to be given back"
            # Nor does it take tasks of the first.
            await submit(one, "next", cores=2)
            await looked_since(one, engine)
            assert (await one.get("/v1/tasks/next"))["state"] == "waiting"
            for cluster, name in ((one, "harvest-2"), (other, "harvest-1")):

                async def told(cluster: Cluster = cluster, name: str = name) -> bool:
                    return name in {row["vm"] for row in await cluster.events("acquirer-not-ours")}

                await until(told)
                assert (await cluster.call("GET", f"/v1/vms/{name}"))[0] == 404
            assert (await one.get("/v1/vms/harvest-1"))["state"] == "running"
            assert (await other.get("/v1/vms/harvest-2"))["state"] == "running"
            wrong: set[tuple[str, ...]] = {("drain", "harvest-1"), ("undrain", "harvest-2")}
            wrong |= {("set_usable_cores", name, "0") for name in ("harvest-1", "harvest-2")}
            assert not wrong & set(engine.calls[begun:])


@each_store
async def test_a_machine_that_was_leaving_leaves_after_a_kill_too_and_the_next_of_its_name_does_not(
    tmp_path: Path,
) -> None:
    engine = engine_with(3)
    wanted = acquirer(least_machines=1, most_machines=1, replaced_share=1.0)
    async with cluster_of(tmp_path, *hosts(engine), **settings(engine, acquirer=wanted)) as cluster:
        await holds(cluster, "harvest-1")
        await submit(cluster, "long")
        await becomes(cluster, "long", "running")
        await look_again(cluster)

        async def leaving() -> bool:
            rows = {row["name"]: row["standing"] for row in (await status(cluster))["machines"]}
            return rows == {"harvest-1": "leaving", "harvest-2": "held"} and bool(engine.machines["harvest-1"].drained)

        await until(leaving)
        before = len(engine.calls)
        await cluster.kill_manager()
        await cluster.start_manager()
        await cluster.ready()
        await submit(cluster, "next")
        assert (await becomes(cluster, "next", "running"))["machine"] == "harvest-2"
        # It was drained all the time.
        assert not {("undrain", "harvest-1"), ("drain", "harvest-2")} & set(engine.calls[before:])
        row = (await status(cluster))["machines"][0]
        assert (row["name"], row["standing"], row["tasks"]) == ("harvest-1", "leaving", ["long"])
        assert "harvest-2 came in its place" in row["sentence"]
        for name in ("long", "next"):
            engine.end(name)
        await holds(cluster, "harvest-2")
        await look_again(cluster)
        await holds(cluster, "harvest-1")
        await cluster.kill_manager()
        await cluster.start_manager()
        await cluster.ready()
        found = await holds(cluster, "harvest-1")
        assert "was there when this manager began to look" in found["machines"][0]["sentence"]


@each_store
async def test_a_machine_that_an_operator_is_claiming_is_not_deleted(tmp_path: Path) -> None:
    agent, _ = hosts()
    async with cluster_of(tmp_path, agent) as cluster:
        assert cluster.manager is not None
        manager = cluster.manager
        machines = HarvestMachines(acquirer(), manager.operations, manager.store, manager.epoch)
        await machines.request(1)

        async def is_there() -> bool:
            return bool((await cluster.get("/v1/vms/harvest-1"))["state"] == "running")

        await until(is_there)
        agent.trouble.pend = ("resize",)
        agent.polled.clear()
        claim = {"request_id": "claim", "priority": "deflatable", "on_preemption": "stop"}
        assert (await cluster.call("PATCH", "/v1/vms/harvest-1", json=claim))[0] == 202
        await agent.polled.wait()
        with pytest.raises(RequestError, match="harvest-1 is being changed: wait for operation claim"):
            await machines.deallocate("harvest-1")
        agent.end_pending()
        assert (await cluster.ended("claim")).state is OperationState.DONE
        await machines.deallocate("harvest-1")
        assert (await cluster.get("/v1/vms/harvest-1"))["priority"] == "deflatable"
        assert await is_there()
        assert ("delete", "harvest-1") not in agent.done
