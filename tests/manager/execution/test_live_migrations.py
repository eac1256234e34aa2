"""Live migrations through the manager's API: the VM runs in one place all the time, whoever is killed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from ebbtide.messages.common import Vector
from ebbtide.messages.operations import Operation, OperationState
from hostagent.control import reconciler, reporter
from hostagent.operations import migration_commands
from hostagent.state.intents import Phase
from tests.hostagent.world import DomainOff
from tests.manager.cluster import cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.lifecycle import ask, consistent, seen, send
from tests.manager.two_agents import NAMES, TwoHosts, two_hosts
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store")

LIVE = {"live": True, "copy_storage": True}
#: What a move changes at the hypervisors, with room to spare.
MOST_CALLS = 12
CHANGES = ("receive", "send", "write_intent", "destroy", "whereabouts")


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks come ten times as often: sockets cannot be used in faked time."""
    monkeypatch.setattr(reconciler, "SURVEY_S", 0.1)
    monkeypatch.setattr(reporter, "EVERY_S", 0.2)
    monkeypatch.setattr(migration_commands, "ASK_AGAIN_S", 0.05)


async def test_what_cannot_move_live_is_refused_or_stays_and_says_why(tmp_path: Path) -> None:
    first = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    second = FakeAgent("host-b", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, first, second) as cluster:
        await cluster.create(vm("low-1"), policy="first-fit")
        status, problem = await send(cluster, "low-1", "migrate", live=True)
        assert (status, problem["field"]) == (409, "copy_storage")
        status, problem = await send(cluster, "low-1", "migrate", copy_storage=True, request_id="not-live")
        assert (status, problem["field"]) == (400, "live")
        stays = await ask(cluster, "low-1", "migrate", **LIVE, request_id="no-address")
        assert stays.sentence == "low-1 stays on host-a: host-a takes part in no live migration"
        first.peers, second.peers = {"host-b": second}, {"host-a": first}
        await cluster.ready()

        first.sticks = "it had not converged after 60 s"
        stays = await ask(cluster, "low-1", "migrate", **LIVE, request_id="sticks")
        assert stays.state is OperationState.FAILED
        assert "it had not converged after 60 s" in stays.sentence
        assert "low-1" not in second.vms, "what was kept for it there is given back"
        row = await seen(cluster, "low-1")
        assert (row["state"], row["host"]) == ("running", "host-a")

        first.sticks = ""
        moved = await ask(cluster, "low-1", "migrate", **LIVE, request_id="moves")
        assert (moved.state, moved.host, moved.kind) == (OperationState.DONE, "host-b", "live-migrate")
        assert [kind for kind, name in first.done if name == "low-1"] == ["create", "depart", "depart", "delete"]
        await consistent(cluster)
        assert len(await cluster.events("migrated")) == 1

        await ask(cluster, "low-1", "stop")
        status, problem = await send(cluster, "low-1", "migrate", **LIVE, request_id="off")
        assert (status, problem["field"]) == (409, "live")


async def test_a_vm_that_grows_on_its_draining_host_while_room_is_made_for_it_moves_with_all_that_it_has(
    tmp_path: Path,
) -> None:
    first = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    second = FakeAgent("host-b", cpu_cores=6.0, memory_mib=2400.0)
    first.peers, second.peers = {"host-b": second}, {"host-a": first}
    async with cluster_of(tmp_path, first, second) as cluster:
        await cluster.create(vm("low-1"), policy="first-fit")
        whole = first.vms["low-1"]
        first.vms["low-1"] = whole.model_copy(update={"current": Vector(cpu_cores=1.0, memory_mib=600.0)})
        drain = {"request_id": "drain", "mode": "draining"}
        assert (await cluster.call("PUT", "/v1/hosts/host-a/mode", json=drain))[0] == 202
        second.trouble.pend = ("arrive",)
        assert (await send(cluster, "low-1", "migrate", **LIVE, request_id="moves"))[0] == 202
        await until(lambda: "arrive" in second.arrived)
        # Another VM has left.
        first.vms["low-1"], second.trouble.pend = whole, ()
        second.end_pending()
        moved = await cluster.ended("moves")
        assert (moved.state, moved.host) == (OperationState.DONE, "host-b"), moved.sentence
        assert second.vms["low-1"].current == whole.current
        assert [kind for kind, _ in second.done] == ["arrive", "delete", "arrive"]
        await consistent(cluster)


async def test_while_it_moves_nothing_changes_its_size_and_called_off_it_stays(
    tmp_path: Path,
) -> None:
    async with two_hosts(tmp_path) as two:
        cluster = two.cluster
        created = await cluster.create(vm("low-1"))
        here, there = sorted(NAMES, key=lambda name: name != created.host)
        await surveyed(two, "low-1")
        body = {**LIVE, "deadline_s": 20.0, "request_id": "slow"}
        assert (await send(cluster, "low-1", "migrate", **body))[0] == 202
        await until(lambda: moving(two))

        async def shown() -> bool:
            return "half of it is there" in (await cluster.get("/v1/operations/slow"))["progress"]

        await until(shown)
        row = await cluster.get("/v1/vms/low-1")
        assert row["state"] == "migrating"
        agents = [two.hosts[name].agent for name in (here, there)]
        assert [str(agent.host.vms["low-1"].status().state) for agent in agents if agent] == ["migrating"] * 2
        smaller = {"generation": 100, "target": {"cpu_cores": 1.0, "memory_mib": 600.0}, "request_id": "t"}
        assert (await cluster.call("PUT", "/v1/vms/low-1/target", json=smaller))[0] == 409
        for agent in agents:
            assert agent is not None
            assert agent.host.report().deflatable.cpu_cores == 0, "a VM that moves gives nothing"
        await asyncio.wait_for(agents[0].host.hypervisor.moves.stop_move(f"ebb-{here}.low-1"), 5)  # type: ignore[union-attr]
        ended = await cluster.ended("slow")
        assert (ended.state, two.running("low-1")) == (OperationState.FAILED, [here]), ended.sentence
        assert f"ebb-{there}.low-1" not in two.world.domains
        assert (await cluster.get("/v1/vms/low-1"))["state"] == "running"


async def test_a_vm_that_comes_back_is_looked_after_whosever_what_it_had_left_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left at home is the other host's when the agent that starts there asks; it asks again before a minute."""
    rounds: list[str] = []
    whole = reconciler.Reconciler._round

    async def counted(self: reconciler.Reconciler) -> None:
        await whole(self)
        rounds.append(self._host.slice.host_id)

    async def has_looked() -> bool:
        return home in rounds

    monkeypatch.setattr(reconciler.Reconciler, "_round", counted)
    async with two_hosts(tmp_path) as two:
        cluster, world = two.cluster, two.world
        world.move_ends.set()
        home = (await cluster.create(vm("low-1"))).host
        assert home is not None
        await surveyed(two, "low-1")
        await send(cluster, "low-1", "migrate", **LIVE, request_id="leaves")
        there = (await settled(two, "leaves")).host
        await surveyed(two, "low-1")
        agent = two.hosts[str(there)].agent
        assert agent is not None
        size = agent.host.vms["low-1"].intent.committed
        assert world.domains[f"ebb-{there}.low-1"].starts_with == (size.cpu_cores, size.memory_mib)
        await two.kill(home)
        world.domains[f"ebb-{home}.low-1"] = replace(world.domains[f"ebb-{there}.low-1"], state="stopped")
        rounds.clear()
        await two.start(home)
        await until(has_looked)
        del world.domains[f"ebb-{home}.low-1"]
        await send(cluster, "low-1", "migrate", **LIVE, request_id="comes-back")
        assert (await settled(two, "comes-back")).host == home
        await surveyed(two, "low-1")


@pytest.mark.parametrize("carried_out", [False, True], ids=["call-lost", "call-carried-out"])
@pytest.mark.parametrize("who", ["source", "target", "manager"])
async def test_whoever_is_killed_at_whichever_step_one_copy_runs(tmp_path: Path, who: str, carried_out: bool) -> None:
    """The VM moves to and fro; each time the next call that changes something is its victim's last."""
    async with two_hosts(tmp_path) as two:
        cluster, world = two.cluster, two.world
        world.move_ends.set()
        host = (await cluster.create(vm("low-1"))).host
        assert host is not None
        moved = 0
        for step in range(1, MOST_CALLS):
            await surveyed(two, "low-1")
            victim = {"source": host, "target": next(name for name in NAMES if name != host)}.get(who, who)
            killed = kill_at(two, victim, step, carried_out)
            status, answer = await send(cluster, "low-1", "migrate", **LIVE, request_id=f"move-{step}")
            assert status == 202, answer
            ended = asyncio.create_task(cluster.ended(f"move-{step}"))
            hit = asyncio.create_task(killed.wait())
            await asyncio.wait({ended, hit}, return_when=asyncio.FIRST_COMPLETED)
            hit.cancel()
            if killed.is_set():
                ended.cancel()
                await asyncio.wait({ended})
                await two.kill(victim)
                world.before = None
                await two.start(victim)
            world.before = None
            operation = await settled(two, f"move-{step}")
            runs = two.running("low-1")
            assert len(runs) == 1, (runs, operation.sentence)
            row = await cluster.get("/v1/vms/low-1")
            assert (row["state"], row["host"]) == ("running", runs[0]), operation.progress
            assert list(world.domains) == [f"ebb-{runs[0]}.low-1"], operation.progress
            moved += runs[0] != host
            host = runs[0]
            if not killed.is_set():
                break
        assert step >= 4, "no victim was hit"
        assert moved >= 2


async def test_a_vm_that_ended_while_it_moved_keeps_its_only_disk_however_often_its_agent_is_killed(
    tmp_path: Path,
) -> None:
    async with two_hosts(tmp_path) as two:
        cluster, world = two.cluster, two.world
        here = (await cluster.create(vm("low-1"))).host
        assert here is not None
        await surveyed(two, "low-1")
        assert (await send(cluster, "low-1", "migrate", **LIVE, request_id="ends"))[0] == 202
        await until(lambda: moving(two))
        await two.kill("manager")
        await two.kill(here)
        name = f"ebb-{here}.low-1"
        world.domains[name].state = "stopped"
        world.moving[name].set()

        async def known_to_be_off() -> bool:
            agent = two.hosts[here].agent
            return agent is not None and agent.host.vm("low-1").intent.phase is Phase.STOPPED

        await two.start(here)
        await until(known_to_be_off)
        await two.kill(here)
        await two.start(here)
        await two.start("manager")
        ended = await cluster.ended("ends")
        assert (ended.state, two.running("low-1")) == (OperationState.FAILED, []), ended.sentence
        assert list(world.domains) == [name], ended.progress
        row = await cluster.get("/v1/vms/low-1")
        assert (row["state"], row["host"]) == ("stopped", here)


def kill_at(two: TwoHosts, victim: str, step: int, carried_out: bool) -> asyncio.Event:
    """Set when the call is there at which the victim is to die; it waits until then, if it is carried out at all."""
    reached, count = asyncio.Event(), 0

    async def before(method: str, domain: str) -> None:
        nonlocal count
        if method not in CHANGES:
            return
        count += 1
        if count == step:
            reached.set()
            if not carried_out:
                raise DomainOff

    two.world.before = before
    return reached


async def moving(two: TwoHosts) -> bool:
    return bool(two.world.moving)


async def surveyed(two: TwoHosts, name: str) -> None:
    """Until its host has reported the identity of its domain and has put right what a kill has left: else it cannot
    move.
    """

    async def is_known() -> bool:
        assert two.cluster.manager is not None
        hosts = two.cluster.manager.hosts
        for host in NAMES:
            row, agent = hosts.vm(host, name), two.hosts[host].agent
            if row is not None and row.uuid is not None and row.state == "running" and agent is not None:
                there = agent.host.vms.get(name)
                return there is not None and there.intent.phase is Phase.SETTLED and not there.record.uncertain
        return False

    await two.ready()
    await until(is_known)


async def settled(two: TwoHosts, request_id: str) -> Operation:
    """The operation's end, and that of all that followed from it."""
    await two.ready()
    operation = await two.cluster.ended(request_id)

    async def done() -> bool:
        assert two.cluster.manager is not None
        rows = await two.cluster.get("/v1/vms/low-1")
        return not await two.cluster.manager.store.unfinished_plans() and rows["state"] == "running"

    await until(done)
    return operation
