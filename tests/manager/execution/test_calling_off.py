"""An owner deletes a VM that is being placed: its plan ends, and nothing of it is left on any host."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from aiohttp import web

from cluster_manager.execution import instruction_executor
from ebbtide.messages.common import EarlierProblem
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import NotYetDeflatable
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.fake_lifecycle import json_answer
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store")

FULL = ("low-1", "low-2")


@asynccontextmanager
async def full(
    path: Path, kind: type[FakeAgent] = FakeAgent, **fields: Any
) -> AsyncIterator[tuple[Cluster, FakeAgent]]:
    """host-a, with two VMs of 3 cores that take all of its six."""
    agent = kind("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(path, agent) as cluster:
        for name in FULL:
            await cluster.create(vm(name, **fields))
        yield cluster, agent


async def arrives(cluster: Cluster, cores: float = 3.0, deadline_s: float = 30.0) -> None:
    body = {"request_id": "new", "vm": vm("new", "fixed", cores, 400.0), "deadline_s": deadline_s}
    assert (await cluster.call("POST", "/v1/vms", json=body))[0] == 202


async def calls_off(cluster: Cluster) -> None:
    status, answer = await cluster.call("DELETE", "/v1/vms/new?request_id=off")
    assert (status, answer["kind"]) == (202, "delete")


async def shown(cluster: Cluster, text: str) -> None:
    """Until the placement says so."""

    async def says() -> bool:
        return any(text in said for said in (await cluster.get("/v1/operations/new"))["progress"])

    await until(says)


async def nothing_is_left(cluster: Cluster, agent: FakeAgent, placed: str = "failed") -> str:
    """Returns how the deletion ended."""
    off, new = await cluster.ended("off"), await cluster.ended("new")
    assert (off.state, new.state) == (OperationState.DONE, placed), (off.sentence, new.sentence)
    assert (await cluster.call("GET", "/v1/vms/new"))[0] == 404
    assert agent.running == set(FULL)

    async def as_before() -> bool:
        return {agent.cores(name) for name in FULL} == {3.0}

    await until(as_before)
    again = await cluster.create(vm("new", cpu_cores=0.5, memory_mib=300.0), request_id="again")
    assert again.state is OperationState.DONE, "its name is free"
    return off.sentence


@pytest.mark.parametrize("killed", [False, True], ids=["", "the manager is killed"])
@pytest.mark.parametrize("at", ["reclaim", "stop", "create"])
async def test_whatever_its_placement_has_begun_comes_to_its_end_and_is_taken_back(
    tmp_path: Path, at: str, killed: bool
) -> None:
    async with full(tmp_path, preemption_notice_s=20.0) as (cluster, agent):
        agent.trouble.pend = (at,)
        await arrives(cluster, 5.5 if at == "stop" else 3.0)
        async with asyncio.timeout(20):
            await agent.polled.wait()
        if at == "stop":
            await shown(cluster, "preempting")
        await calls_off(cluster)
        assert (await cluster.get("/v1/vms/new"))["state"] == "deleting"
        if killed:
            await cluster.kill_manager()
            await cluster.start_manager()
            await cluster.ready()
        if at != "stop":
            agent.end_pending()
        # The notice is withdrawn by the manager, without which nothing would end here.
        said = await nothing_is_left(cluster, agent, "done" if at == "create" else "failed")
        assert ("deleted new on host-a" in said) == (at == "create")
        if at == "stop":
            (event,) = await cluster.events("preemption-withdrawn")
            assert "the placement of new is called off" in event["sentence"]
            assert not await cluster.events("preempted")
        assert [kind for kind, name in agent.done if (kind, name) == ("create", "new")] == ["create"] * (
            at == "create"
        ) + ["create"]


class NotYet(FakeAgent):
    """A host that has taken a preemption on, and cannot call it off the first two times that it is asked to."""

    answers: ClassVar[list[int]] = []

    async def _withdraw(self, request: web.Request) -> web.StreamResponse:
        if self.answers:
            return json_answer(EarlierProblem(error="not yet", field=None), self.answers.pop(0))
        return await super()._withdraw(request)


async def test_a_preemption_whose_withdrawal_comes_too_early_or_fails_is_called_off_a_moment_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instruction_executor, "WATCH_S", 0.1)
    monkeypatch.setattr(NotYet, "answers", [409, 500])
    async with full(tmp_path, NotYet, preemption_notice_s=20.0) as (cluster, agent):
        agent.trouble.pend = ("stop",)
        await arrives(cluster, 5.5)
        await shown(cluster, "preempting")
        await calls_off(cluster)
        await nothing_is_left(cluster, agent)
        assert NotYet.answers == []
        assert not await cluster.events("preempted")


async def test_one_that_waits_for_a_host_ends_at_once(tmp_path: Path) -> None:
    async with full(tmp_path) as (cluster, _):
        assert cluster.manager is not None
        locks = cluster.manager.hosts.locks
        assert await locks.hold("another plan", "host-a")
        await arrives(cluster)
        await calls_off(cluster)
        assert (await cluster.ended("new")).sentence == "the placement of new was called off"
        assert (await cluster.ended("off")).sentence == "called off the placement of new, which is on no host"
        locks.release("another plan")
        (event,) = await cluster.events("called-off")
        assert event["vm"] == "new"


async def test_one_that_waits_for_guests_ends_and_a_repeated_request_is_the_same(tmp_path: Path) -> None:
    async with full(tmp_path) as (cluster, agent):
        booting = NotYetDeflatable(memory_mib=700.0, in_s=20.0, why="booting")
        agent.vms = {name: one.model_copy(update={"not_yet": booting}) for name, one in agent.vms.items()}
        await agent.send_report()
        body = {"request_id": "new", "vm": vm("new", "fixed", 1.0, 800.0), "deadline_s": 60.0}
        assert (await cluster.call("POST", "/v1/vms", json=body))[0] == 202
        await shown(cluster, "waits up to")
        await calls_off(cluster)
        await calls_off(cluster)
        assert (await cluster.call("DELETE", "/v1/vms/new?request_id=another"))[0] in (404, 409)
        assert (await cluster.ended("off")).state is OperationState.DONE
        agent.vms = {name: one.model_copy(update={"not_yet": None}) for name, one in agent.vms.items()}
        await agent.send_report()
        await nothing_is_left(cluster, agent)


async def cancel(cluster: Cluster, operation: str = "new", request_id: str = "off") -> tuple[int, Any]:
    return await cluster.call("POST", f"/v1/operations/{operation}/cancel", json={"request_id": request_id})


@pytest.mark.parametrize("killed", [False, True], ids=["", "the manager is killed"])
@pytest.mark.parametrize("at", ["reclaim", "stop"])
async def test_a_cancelled_placement_gives_back_what_it_took_and_its_name(
    tmp_path: Path, at: str, killed: bool
) -> None:
    async with full(tmp_path, preemption_notice_s=20.0) as (cluster, agent):
        agent.trouble.pend = (at,)
        await arrives(cluster, 5.5 if at == "stop" else 3.0)
        async with asyncio.timeout(20):
            await agent.polled.wait()
        if at == "stop":
            await shown(cluster, "preempting")
        status, answer = await cancel(cluster)
        assert (status, answer["kind"], answer["vm"]) == (202, "cancel", "new")
        if killed:
            await cluster.kill_manager()
            await cluster.start_manager()
            await cluster.ready()
        if at != "stop":
            agent.end_pending()
        off, new = await cluster.ended("off"), await cluster.ended("new")
        assert (off.state, off.sentence) == (
            OperationState.DONE,
            "called off the placement of new, which is on no host",
        )
        assert (new.state, new.sentence) == (OperationState.FAILED, "the placement of new was called off")
        assert new.reason is not None
        assert new.reason.code == "called-off"
        # The same request again is the same, another one comes too late.
        assert (await cancel(cluster))[1]["state"] == "done"
        status, problem = await cancel(cluster, request_id="again-off")
        assert (status, problem["code"]) == (409, "wrong-state")
        assert "new has ended: the placement of new was called off" in problem["detail"]

        async def as_before() -> bool:
            return {agent.cores(name) for name in FULL} == {3.0}

        await until(as_before)
        assert agent.running == set(FULL)
        again = await cluster.create(vm("new", cpu_cores=0.5, memory_mib=300.0), request_id="again")
        assert again.state is OperationState.DONE, "its name is free"


async def test_a_placement_whose_vm_starts_is_not_called_off_and_says_why(tmp_path: Path) -> None:
    async with full(tmp_path) as (cluster, agent):
        agent.trouble.pend = ("create",)
        await arrives(cluster)
        async with asyncio.timeout(20):
            await agent.polled.wait()
        status, problem = await cancel(cluster)
        assert (status, problem["code"], problem["field"]) == (409, "wrong-state", "id")
        assert (
            problem["detail"] == "new cannot be called off: new is being started on host-a already: delete it instead"
        )
        agent.end_pending()
        assert (await cluster.ended("new")).state is OperationState.DONE


async def test_what_cannot_be_called_off_is_refused_with_its_reason(tmp_path: Path) -> None:
    async with full(tmp_path) as (cluster, agent):
        assert (await cancel(cluster, "nothing"))[0] == 404
        agent.trouble.pend = ("target",)
        target = {"request_id": "smaller", "generation": 5, "target": {"cpu_cores": 1.0, "memory_mib": 500.0}}
        assert (await cluster.call("PUT", "/v1/vms/low-1/target", json=target))[0] == 202
        status, problem = await cancel(cluster, "smaller")
        assert status == 409
        assert "it ends by its deadline; a target of its own takes its place" in problem["detail"]
        agent.end_pending()
        await cluster.ended("smaller")
