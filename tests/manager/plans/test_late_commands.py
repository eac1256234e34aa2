"""Commands and reports that the network holds back, doubles or loses: what the manager and its agents make of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from cluster_manager.inventory.hosts import Hosts
from cluster_manager.plans.growth import Due
from cluster_manager.plans.lifecycle import start_stop
from cluster_manager.plans.plans import SetVM, VMPhase, finish
from cluster_manager.store.store import Store
from ebbtide.deflation.modes import HostMode
from ebbtide.deflation.resources import ZERO
from ebbtide.messages.commands import CreateCommand
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import HostTemplate
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMSpec, VMState
from ebbtide.rest.credentials import command_token
from tests.manager import cluster as clusters
from tests.manager.cluster import QUICK, Cluster, cluster_of, vm
from tests.manager.fake_agent import HOSTS_KEY, FakeAgent
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store")


def pair() -> tuple[FakeAgent, FakeAgent]:
    return tuple(FakeAgent(f"host-{name}", cpu_cores=6.0, memory_mib=2400.0) for name in "ab")  # type: ignore[return-value]


async def send_late(cluster: Cluster, agent: FakeAgent, body: dict[str, object]) -> int:
    """A start that was on its way for long."""
    headers = {"Authorization": f"Bearer {command_token(HOSTS_KEY, agent.id)}"}
    url = f"{agent.report().url}/v1/vms"
    async with cluster.session.post(url, json=body, headers=headers) as response:
        return response.status


def start_of(name: str, **fields: int) -> dict[str, object]:
    spec = VMSpec.model_validate(vm(name))
    return CreateCommand(request_id=f"late-{name}", vm=spec, **fields).model_dump(mode="json")


async def test_a_start_that_a_removal_has_overtaken_is_refused(tmp_path: Path) -> None:
    first, second = pair()
    async with cluster_of(tmp_path, first, second) as cluster:
        await cluster.create(vm("low-1"), policy="first-fit")
        early = int(first.bodies[-1]["order"])
        await cluster.delete("low-1")
        assert await send_late(cluster, first, start_of("low-1", epoch=1, order=early)) == 409
        assert first.vms == {}


async def test_a_start_of_an_earlier_run_is_refused_once_the_next_has_asked_for_it(tmp_path: Path) -> None:
    """The next run finds no room there and goes elsewhere: no command of its own has raised the agent's epoch."""
    first, second = pair()
    async with cluster_of(tmp_path, first, second) as cluster:
        first.trouble.hangs_at, first.trouble.carries_out = len(first.arrived) + 1, False
        body = {"request_id": "r", "vm": vm("low-1"), "deadline_s": 5.0, "policy": "first-fit"}
        assert (await cluster.call("POST", "/v1/vms", json=body))[0] == 202
        async with asyncio.timeout(5):
            await first.hanging.wait()
        await cluster.kill_manager()
        first.capacity = first.capacity * 0.1
        await cluster.start_manager()
        await cluster.ready()
        assert (await cluster.ended("r")).host == "host-b"
        first.capacity = first.capacity * 10
        assert await send_late(cluster, first, start_of("low-1", epoch=1, order=1)) == 409
        assert first.vms == {}


async def test_a_start_that_never_left_the_manager_is_made_on_another_host(tmp_path: Path) -> None:
    first, second = pair()
    async with cluster_of(tmp_path, first, second) as cluster:
        assert cluster.manager is not None
        executor = cluster.manager.operations._executor
        assert executor is not None
        read = executor._agents.host

        async def read_and_lose(host: str, retry: bool = True) -> object:
            report = await read(host, retry)
            if host == "host-a" and retry:
                await first.die()
            return report

        executor._agents.host = read_and_lose  # type: ignore[method-assign, assignment]
        operation = await cluster.create(vm("low-1"), policy="first-fit")
        assert (operation.state, operation.host) == (OperationState.DONE, "host-b"), operation


async def test_a_refusal_after_a_lost_answer_is_no_certainty(tmp_path: Path) -> None:
    """The first sending may still be on its way: the VM is started nowhere else until the host has been asked."""
    first, second = pair()
    async with cluster_of(tmp_path, first, second, agents=replace(QUICK, answer_s=0.4)) as cluster:
        first.trouble.hangs_at, first.trouble.carries_out = len(first.arrived) + 1, False
        body = {"request_id": "r", "vm": vm("low-1"), "deadline_s": 5.0, "policy": "first-fit"}
        assert (await cluster.call("POST", "/v1/vms", json=body))[0] == 202
        async with asyncio.timeout(5):
            await first.hanging.wait()
        first.trouble.refuses = 409
        operation = await cluster.ended("r")
        assert operation.state is OperationState.FAILED
        assert "may have been started on host-a" in operation.sentence
        assert second.vms == {}


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_host_that_refuses_to_tell_of_a_start_that_it_has_taken_on_may_have_started_it(
    tmp_path: Path, restarted: bool
) -> None:
    """As it is with a manager that was started again with another key of its hosts."""
    first, second = pair()
    async with cluster_of(tmp_path, first, second) as cluster:
        first.trouble.pend = ("create",)
        body = {"request_id": "r", "vm": vm("low-1"), "deadline_s": 5.0, "policy": "first-fit"}
        assert (await cluster.call("POST", "/v1/vms", json=body))[0] == 202
        async with asyncio.timeout(5):
            await first.polled.wait()
        if restarted:
            await cluster.kill_manager()
        first.trouble.tells_nothing = 401
        if restarted:
            await cluster.start_manager()
            await cluster.ready()
        operation = await cluster.ended("r")
        assert operation.state is OperationState.FAILED
        assert "may have been started on host-a" in operation.sentence
        assert second.vms == {}


async def test_a_preempted_vm_that_its_host_refuses_to_tell_of_may_have_gone(tmp_path: Path) -> None:
    first, _ = pair()
    async with cluster_of(tmp_path, first) as cluster:
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name))
        first.trouble.pend = ("stop",)
        body = {"request_id": "high", "vm": vm("high-1", "fixed", 5.3, 800.0), "deadline_s": 5.0}
        assert (await cluster.call("POST", "/v1/vms", json=body))[0] == 202
        async with asyncio.timeout(5):
            await until(lambda: _asked_to_stop(first))
        first.trouble.tells_nothing = 401
        assert (await cluster.ended("high")).state is OperationState.FAILED
        rows = (await cluster.get("/v1/vms"))["vms"]
        assert [row["sentence"] for row in rows if "may have been" in row["sentence"]], rows


async def _asked_to_stop(agent: FakeAgent) -> bool:
    return "stop" in agent.arrived


async def test_many_owed_removals_are_made_good_one_after_the_other_without_a_pause(tmp_path: Path) -> None:
    first, second = pair()
    async with cluster_of(tmp_path, first, second) as cluster:
        names = ("low-1", "low-2", "low-3")
        for name in names:
            await cluster.create(vm(name, cpu_cores=1.0, memory_mib=400.0), policy="first-fit")
        await first.die()
        for name in names:
            assert (await cluster.delete(name)).state is OperationState.FAILED
        await first.revive()
        async with asyncio.timeout(10):
            await until(lambda: _empty(first))


async def _empty(agent: FakeAgent) -> bool:
    return not agent.vms


@pytest.mark.parametrize("debt", ["delete", "reinflate"])
async def test_what_is_owed_to_a_host_waits_until_its_hypervisor_answers(tmp_path: Path, debt: str) -> None:
    agent, _ = pair()
    async with cluster_of(tmp_path, agent) as cluster:
        assert cluster.manager is not None
        await cluster.create(vm("low-1"))
        agent.unavailable = "Connection refused"
        await agent.send_report()
        await agent.die()
        if debt == "delete":
            assert (await cluster.delete("low-1")).state is OperationState.FAILED
        else:
            known = cluster.manager.hosts.get("host-a")
            assert known is not None
            known.owes_reinflation = True
        failures = await cluster.events("failed")
        await agent.revive()
        for _ in range(2):
            await agent.send_report()
        assert cluster.manager.operations.under_way() == {}
        assert debt not in agent.arrived
        assert await cluster.events("failed") == failures
        agent.unavailable = ""
        await until(lambda: _has_arrived(agent, debt))


async def test_nothing_is_told_to_grow_on_a_host_whose_hypervisor_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, _ = pair()
    async with cluster_of(tmp_path, agent) as cluster:
        assert cluster.manager is not None
        operations = cluster.manager.operations
        await cluster.create(vm("low-1"))
        agent.unavailable = "Connection refused"
        await agent.send_report()
        due = Due(("low-1",), ZERO, (ZERO,))
        monkeypatch.setattr(operations._growth, "due", lambda *_, **__: due)
        operations._share_at.clear()
        await agent.send_report()
        assert operations.under_way() == {}
        agent.unavailable = ""
        await until(lambda: _has_arrived(agent, "reinflate"))


async def _has_arrived(agent: FakeAgent, kind: str) -> bool:
    return kind in agent.arrived


async def test_a_debt_that_a_ready_host_refuses_is_tried_ever_more_rarely(tmp_path: Path) -> None:
    agent, _ = pair()
    async with cluster_of(tmp_path, agent) as cluster:
        assert cluster.manager is not None
        operations = cluster.manager.operations
        await cluster.create(vm("low-1"))
        await agent.die()
        assert (await cluster.delete("low-1")).state is OperationState.FAILED
        await agent.revive()
        agent.trouble.refuses = 409

        async def refused() -> bool:
            return operations._retry.get("host-a", (0.0, 0.0))[0] > 0.0 and not operations.under_way()

        pauses = []
        for _ in range(7):
            await until(refused)
            again_at, pause_s = operations._retry["host-a"]
            assert again_at > asyncio.get_running_loop().time()
            pauses.append(pause_s)
            # The pause is over.
            operations._retry["host-a"] = (0.0, pause_s)
        assert pauses == [30.0, 60.0, 120.0, 240.0, 480.0, 900.0, 900.0]
        agent.trouble.refuses = None
        await until(lambda: _is_gone(cluster, "low-1"))

        async def begins_anew() -> bool:
            return operations._retry == {}

        await until(begins_anew)


async def test_a_preempted_vm_whose_deletion_waits_keeps_its_name_until_that_has_ended(tmp_path: Path) -> None:
    """Otherwise the deletion would find, and forget, the VM that has the name by then."""
    first, _ = pair()
    async with cluster_of(tmp_path, first, agents=replace(QUICK, answer_s=0.4)) as cluster:
        for name in ("low-1", "low-2"):
            await cluster.create(vm(name, on_preemption="delete"))
        first.trouble.never_ends = True
        body = {"request_id": "high", "vm": vm("high-1", "fixed", 5.3, 800.0), "deadline_s": 10.0}
        assert (await cluster.call("POST", "/v1/vms", json=body))[0] == 202
        async with asyncio.timeout(5):
            await first.polled.wait()
        for name in ("low-1", "low-2"):
            assert (await cluster.call("DELETE", f"/v1/vms/{name}?request_id=delete-{name}"))[0] == 202
        # Reclaim, the victim's removal, and then the start, which hangs.
        first.trouble.hangs_at, first.trouble.carries_out = len(first.arrived) + 2, False
        first.end_pending()
        async with asyncio.timeout(5):
            await first.hanging.wait()
        (victim,) = {"low-1", "low-2"} - set(first.vms)
        again = {"request_id": "again", "vm": vm(victim)}
        status, problem = await cluster.call("POST", "/v1/vms", json=again)
        assert status == 409, problem
        assert "deleting" in problem["detail"]
        for request_id in ("high", "delete-low-1", "delete-low-2"):
            assert (await cluster.ended(request_id)).state is OperationState.DONE
        assert (await cluster.create(vm(victim, cpu_cores=0.5, memory_mib=300.0), "anew")).state is OperationState.DONE


@pytest.mark.parametrize("verb", ["migrate", "start"])
async def test_a_vm_that_goes_while_a_plan_looks_for_room_elsewhere_keeps_its_name_until_that_has_ended(
    tmp_path: Path, verb: str
) -> None:
    """Otherwise the plan would power off the VM that has the name by then, and start the old one on no record."""
    first, second = pair()
    first.templates = (HostTemplate(name="lab"), HostTemplate(name="here"))
    second.templates = (HostTemplate(name="lab"),)
    async with cluster_of(tmp_path, first, second) as cluster:
        await cluster.create(vm("low-1", on_preemption="delete"), policy="first-fit")
        body = {"request_id": "move", "lose_disk": True, "deadline_s": 20.0}
        if verb == "start":
            # Its room is still charged, and its host takes no VM as long as it drains.
            first.vms["low-1"] = first.vms["low-1"].model_copy(update={"state": VMState.STOPPED})
            first.mode = HostMode.DRAINING
            body |= {"anywhere": True}
        else:
            body |= {"host": second.id}
        await cluster.ready()
        second.trouble.read_after = asyncio.Event()
        reads = second.reads
        assert (await cluster.call("POST", f"/v1/vms/low-1/{verb}", json=body))[0] == 202
        async with asyncio.timeout(5):
            await until(lambda: _read_again(second, reads))
        # Somebody has started it past the manager meanwhile.
        first.vms["low-1"] = first.vms["low-1"].model_copy(update={"state": VMState.RUNNING})
        first.mode = HostMode.ACTIVE
        await cluster.ready()
        high = await cluster.create(vm("high-1", "fixed", 5.8, 800.0, template="here"))
        assert (high.state, high.host, sorted(first.vms)) == (OperationState.DONE, "host-a", ["high-1"]), high.sentence
        status, problem = await cluster.call("POST", "/v1/vms", json={"request_id": "again", "vm": vm("low-1")})
        assert (status, problem.get("field")) == (409, "vm.name"), problem
        second.trouble.read_after.set()
        ended = await cluster.ended("move")
        assert (ended.state, second.vms) == (OperationState.FAILED, {}), ended
        assert cluster.manager is not None
        # The queue would come to it later.
        await cluster.manager.operations._bring_back("low-1", "host-a")
        await until(lambda: _is_gone(cluster, "low-1"))
        anew = await cluster.create(vm("low-1"), "anew")
        assert (anew.state, anew.host) == (OperationState.DONE, "host-b"), anew


async def _read_again(agent: FakeAgent, reads: int) -> bool:
    return agent.reads > reads


async def test_a_report_that_a_later_one_has_overtaken_is_neither_believed_nor_a_sign_of_life(tmp_path: Path) -> None:
    now = 0.0
    store = Store(clusters.database_in(tmp_path), lambda: 0.0)
    await store.open()
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    agent._port = 1
    hosts = Hosts(store, 10.0, lambda: 0.0, lambda: now)
    older = agent.report()
    agent.capacity = agent.capacity * 2
    newer = agent.report()
    await asyncio.gather(hosts.take(newer), hosts.take(older))
    now = 11.0
    await hosts.take(older)
    status = hosts.status("host-a")
    assert status is not None
    assert (status.state, status.capacity.cpu_cores) == ("silent", 12.0)
    agent.incarnation = "two"
    await hosts.take(agent.report())
    assert hosts.is_ready("host-a")
    await store.close()


@pytest.mark.parametrize("owed", [False, True])
async def test_what_a_plan_says_of_a_vm_that_is_another_ones_by_now_changes_no_debt(tmp_path: Path, owed: bool) -> None:
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent) as cluster:
        assert cluster.manager is not None
        operations, store = cluster.manager.operations, cluster.manager.store
        stale = await store.add_plan(start_stop("stop-low-1", "stale", "low-1", "host-a", 1.0), "")
        await cluster.create(vm("low-1"))
        step = finish(stale.state, OperationState.FAILED, "too late")
        step = step.also(SetVM("low-1", VMPhase.FAILED, "host-a", "too late", owed=owed))
        if not owed:
            await agent.die()
            assert (await cluster.delete("low-1")).state is OperationState.FAILED
        await operations._save(stale, step, 1.0)
        if owed:
            await cluster.ready()
            assert operations._owed == await store.owed_removals() == {}
            assert "low-1" in agent.vms
            return
        assert operations._owed == await store.owed_removals() == {"low-1": "host-a"}
        await agent.revive()
        await until(lambda: _is_gone(cluster, "low-1"))
        assert agent.vms == {}


async def _is_gone(cluster: Cluster, name: str) -> bool:
    return (await cluster.call("GET", f"/v1/vms/{name}"))[0] == 404


async def test_a_target_that_waits_for_its_host_leaves_alone_what_it_does_not_name(tmp_path: Path) -> None:
    first, _ = pair()
    async with cluster_of(tmp_path, first) as cluster:
        assert cluster.manager is not None
        await cluster.create(vm("low-1"))
        low = first.vms["low-1"]
        first.vms["low-1"] = low.model_copy(update={"current": Vector(cpu_cores=3.0, memory_mib=600.0)})
        await cluster.ready()
        locks = cluster.manager.hosts.locks
        await locks.hold("another plan", first.id)
        body = {"request_id": "t", "target": {"cpu_cores": 1.0}}
        assert (await cluster.call("PUT", "/v1/vms/low-1/target", json=body))[0] == 202
        # The plan before has it grow, and no report has told of that when the host is free.
        first.vms["low-1"] = low
        locks.release("another plan")
        assert (await cluster.ended("t")).state is OperationState.DONE
        assert (first.cores("low-1"), first.memory("low-1")) == (1.0, 1000.0)
        sent = next(body for body in first.bodies if body["kind"] == "target")["target"]
        assert None not in sent.values(), "agents of 0.1 know of nothing that is left out"
