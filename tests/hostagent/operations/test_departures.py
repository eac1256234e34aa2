"""Departures at the agent: what is told of a long one, what a later agent says of one that has ended, and who stays."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ebbtide.messages.common import Vector
from ebbtide.messages.operations import Operation, OperationState
from hostagent.errors import HypervisorError
from hostagent.libvirt.hypervisor import Departure, Whereabouts
from hostagent.operations import migration_commands
from hostagent.operations.agent import Agent
from hostagent.operations.operations import TOLD, Operations, done
from hostagent.state.intents import Cause, Intent, Phase
from hostagent.vm.host import Host
from tests.hostagent.conftest import Command, low_vm, succeeding
from tests.hostagent.fake_moves import ADDRESS, NoMoves
from tests.hostagent.world import World
from tests.waiting import until


async def test_the_end_of_a_move_that_took_long_can_be_read() -> None:
    operations, moved = Operations("host-a"), asyncio.Event()

    async def run(operation: Operation) -> Operation:
        await moved.wait()
        return done(operation, "it moved")

    operations.begin("long", "depart", {}, run)
    for second in range(1001):
        operations.progress("long", f"{second} s")
    moved.set()
    ended = await operations.get("long", 5.0)
    assert ended is not None
    read = Operation.model_validate_json(ended.model_dump_json())
    assert (read.sentence, len(read.progress), read.progress[-1]) == ("it moved", TOLD, "1000 s")


async def test_a_vm_that_has_grown_since_room_was_made_for_it_stays(command: Command, host: Host) -> None:
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    address = ADDRESS.model_dump(mode="json")
    body = {"request_id": "d", "to": "host-b", "address": address, "size": {"cpu_cores": 2.0, "memory_mib": 1024.0}}
    operation = await command("POST", "/v1/vms/low-1/departure", body)
    assert operation.state is OperationState.FAILED
    assert "it has grown to 3 cores, 1024 MiB, and host-b has room for 2 cores, 1024 MiB" in operation.sentence
    assert host.vm("low-1").intent.phase is Phase.SETTLED


async def test_a_size_that_a_target_holds_stays_behind_when_its_vm_moves_and_in_force_when_it_does_not(
    command: Command, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Intent] = []

    async def send(moves: NoMoves, domain: str, move: Departure, told: Callable[[str], None]) -> str:
        sent.append(move.intent)
        raise HypervisorError("the other host is full")

    async def whereabouts(moves: NoMoves, domain: str) -> Whereabouts:
        return "here"

    monkeypatch.setattr(NoMoves, "send", send)
    monkeypatch.setattr(NoMoves, "whereabouts", whereabouts)
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    await until(lambda: host.vm("low-1").link.connected)
    body = {"request_id": "t", "generation": 2, "target": {"cpu_cores": 2.0, "memory_mib": 1024.0}, "deadline_s": 20.0}
    assert (await command("PUT", "/v1/vms/low-1/target", body)).state == "done"
    address = ADDRESS.model_dump(mode="json")
    operation = await command(
        "POST", "/v1/vms/low-1/departure", {"request_id": "d", "to": "host-b", "address": address}
    )
    assert operation.sentence == "low-1 stays on host-a: the other host is full"
    assert [(one.held, one.held_size) for one in sent] == [(None, None)], "an older agent would not read it"
    assert host.vm("low-1").status().held


async def test_an_agent_that_finds_a_vm_off_does_not_say_that_it_has_moved(
    command: Command, agent: Agent, world: World, tmp_path: Path
) -> None:
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    await agent.close()
    # As an agent leaves it that found the domain off when the move had ended.
    (domain,) = world.domains.values()
    cause = Cause(request_id="d", kind="depart", body={"to": "host-b"}, started_at=time.time(), before=Vector())
    off = Intent.model_validate_json(domain.intent).changed(phase=Phase.STOPPED, cause=cause)
    domain.state, domain.intent = "stopped", off.model_dump_json()
    async with succeeding(world, tmp_path) as successor:
        operation = await successor.requests.operations.get("d", 10)
        assert operation is not None
        assert operation.state is OperationState.FAILED
        assert operation.sentence == "low-1 is off on host-a, and host-b has to say whether it moved"


@pytest.mark.parametrize("moves", [True, False])
async def test_a_move_that_an_earlier_agent_left_waiting_behind_a_backup_is_waited_for(
    command: Command, agent: Agent, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    monkeypatch.setattr(migration_commands, "ASK_AGAIN_S", 0.01)
    if not moves:
        monkeypatch.setattr(migration_commands, "QUEUED_S", 0.05)
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    await agent.close()
    (domain,) = world.domains.values()
    body = {"to": "host-b", "deadline_s": 600.0}
    cause = Cause(request_id="d", kind="depart", body=body, started_at=time.time(), before=Vector())
    domain.intent = (
        Intent.model_validate_json(domain.intent).changed(phase=Phase.LEAVING, cause=cause).model_dump_json()
    )
    # The backup has ended, and the move has not begun yet, for a moment.
    answers = iter(("held", "here", "moving", "left") if moves else itertools.repeat("held"))

    async def whereabouts(_moves: NoMoves, _domain: str) -> str:
        return next(answers)

    monkeypatch.setattr(NoMoves, "whereabouts", whereabouts)
    async with succeeding(world, tmp_path) as successor:
        operation = await successor.requests.operations.get("d", 10)
        assert operation is not None
        where = "low-1 runs on host-b" if moves else "low-1 stays on host-a"
        assert operation.sentence == f"{where}: found after a restart of the agent"


@pytest.mark.parametrize("by_s", [3600.0, -3600.0])
async def test_a_clock_that_is_set_moves_no_deadline_of_a_move(
    command: Command, host: Host, monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    monkeypatch.setattr(migration_commands, "ASK_AGAIN_S", 0.01)
    stopped: list[str] = []
    looks, wall = 0, time.time

    async def send(moves: NoMoves, domain: str, move: Departure, told: Callable[[str], None]) -> str:
        monkeypatch.setattr(time, "time", lambda: wall() + by_s)
        raise HypervisorError("libvirt does not answer")

    async def whereabouts(moves: NoMoves, domain: str) -> Whereabouts:
        nonlocal looks
        looks += 1
        return "here" if stopped or (by_s > 0.0 and looks > 3) else "moving"

    async def stop_move(moves: NoMoves, domain: str) -> None:
        stopped.append(domain)

    for made in (send, whereabouts, stop_move):
        monkeypatch.setattr(NoMoves, made.__name__, made)
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    await until(lambda: host.vm("low-1").link.connected)
    deadline_s = 600.0 if by_s > 0.0 else 1.0
    body = {"request_id": "d", "to": "host-b", "address": ADDRESS.model_dump(mode="json"), "deadline_s": deadline_s}
    operation = await command("POST", "/v1/vms/low-1/departure", body)
    assert operation.sentence == "low-1 stays on host-a: libvirt does not answer"
    assert bool(stopped) is (by_s < 0.0)
