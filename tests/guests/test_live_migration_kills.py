"""Kills at each step of a live migration of a real guest: whoever is killed, one copy runs, and it answers.

Source agent, target agent and manager, each at each step; which step it is is read in the manager's own store and from
both libvirts. `make test-deep` only: it is 21 moves.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import os
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import libvirt
import pytest

from ebbtide.lab import processes
from ebbtide.lab.cluster import MANAGER
from ebbtide.lab.state import LabHost, Process
from ebbtide.messages.operations import OperationState
from hostagent.libvirt.hypervisor import domain_name
from tests.guests.moving import CACHE, LIMIT_S, SLOW_MIB_S, Moving
from tests.guests.test_live_migration import at_rest as at_rest
from tests.guests.test_live_migration import lab as lab
from tests.guests.test_live_migration import moving as moving
from tests.guests.test_modes import ended

pytestmark = [
    pytest.mark.guest,
    pytest.mark.deep,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="module"),
]

#: Each step lasts longer than this, seconds.
LOOK_S = 0.002
#: Some of its memory, bytes.
PART = 16 * 2**20


class Step(enum.IntEnum):
    """How far a move is."""

    #: Its new host is to keep room for it, and to define it.
    ROOM_ASKED_FOR = enum.auto()
    #: It has; the old host is to send it.
    ROOM_KEPT = enum.auto()
    #: Its libvirt has begun.
    DEPARTED = enum.auto()
    #: And a part of its memory is copied.
    COPYING = enum.auto()
    #: It runs on its new host, and none of the agents and managers knows yet.
    MOVED = enum.auto()
    #: What is left on its old host is to be removed.
    CLEARING = enum.auto()
    ENDED = enum.auto()


class Place:
    """The VM's domain at the libvirt of one host."""

    def __init__(self, host: LabHost) -> None:
        self._connection = libvirt.open(host.uri)
        self._name = domain_name(host.id, CACHE.name)
        self._disk = Path(host.disk_dir) / self._name

    def runs(self) -> bool:
        """Its vCPUs do; a copy that waits for the rest of its memory is paused."""
        with contextlib.suppress(libvirt.libvirtError):
            return bool(self._connection.lookupByName(self._name).state()[0] == libvirt.VIR_DOMAIN_RUNNING)
        return False

    def sent(self) -> int | None:
        """What has been copied of its memory, bytes; None: it is not being moved."""
        with contextlib.suppress(libvirt.libvirtError):
            stats = self._connection.lookupByName(self._name).jobStats()
            if stats.get("type", 0) != libvirt.VIR_DOMAIN_JOB_NONE:
                return int(stats.get("memory_processed", 0))
        return None

    def left(self) -> list[str]:
        """What there is of it: a definition, a disk."""
        found = [domain.name() for domain in self._connection.listAllDomains() if domain.name() == self._name]
        return found + [str(self._disk)] * self._disk.exists()

    def close(self) -> None:
        self._connection.close()


class Move:
    """What is seen of one move."""

    def __init__(self, moving: Moving, request_id: str) -> None:
        state = moving.state
        self._request_id = request_id
        self._file = moving.lab.directory / "manager" / "manager.sqlite"
        places = {host.id: Place(host) for host in state.hosts}
        self.here, self.there = places[moving.host], places[moving.other]
        self.source = state.daemon(moving.host).process

    def close(self) -> None:
        self.here.close()
        self.there.close()

    def step(self) -> int:
        """The latest step that there is a sign of; 0: not even the first."""
        plan, finished = self._record()
        if finished:
            return Step.ENDED
        do, stage = plan.get("instruction", {}).get("do"), plan.get("stage")
        if stage == "clear":
            return Step.CLEARING if do == "remove" else Step.MOVED
        if stage not in ("moving", "doubt"):
            return Step.ROOM_ASKED_FOR if do == "arrive" else 0
        if self.there.runs():
            return Step.MOVED
        sent = self.here.sent()
        if sent is None:
            return Step.ROOM_KEPT
        return Step.COPYING if sent >= PART else Step.DEPARTED

    def _record(self) -> tuple[dict[str, Any], bool]:
        """The manager's record of it, as a manager that starts would find it."""
        with contextlib.closing(sqlite3.connect(f"file:{self._file}?mode=ro", uri=True)) as store:
            found = store.execute("SELECT state, finished FROM plans WHERE request_id = ?", (self._request_id,))
            row = found.fetchone()
        return (json.loads(row[0]), bool(row[1])) if row else ({}, False)

    def run_twice(self) -> bool:
        """Whether both copies did at one moment: one before and after a look at the other."""
        return self.here.runs() and self.there.runs() and self.here.runs()

    def kill_at(self, step: Step, victim: Process) -> int:
        """End it once the move has come to a step. Returns the step that was seen then. Blocks."""
        assert self.source is not None
        with self._kept_from_knowing() if step is Step.MOVED else contextlib.nullcontext():
            seen = self._wait(step)
            os.kill(victim.pid, signal.SIGKILL)
        return seen

    @contextlib.contextmanager
    def _kept_from_knowing(self) -> Iterator[None]:
        """The old host's agent stands still from the moment at which its libvirt has begun, and so says no end."""
        assert self.source is not None
        self._wait(Step.DEPARTED)
        os.kill(self.source.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.source.pid, signal.SIGCONT)

    def _wait(self, step: Step) -> int:
        until = time.monotonic() + LIMIT_S
        while (seen := self.step()) < step:
            assert time.monotonic() < until, f"it has not come to {step.name}"
            time.sleep(LOOK_S)
        return seen


@contextlib.contextmanager
def seen_of(moving: Moving, request_id: str) -> Iterator[Move]:
    move = Move(moving, request_id)
    try:
        yield move
    finally:
        move.close()


@contextlib.asynccontextmanager
async def never_two(move: Move) -> AsyncIterator[None]:
    """Meanwhile it is looked again and again that not both copies run."""

    async def look() -> None:
        while not await asyncio.to_thread(move.run_twice):
            await asyncio.sleep(0.02)

    task = asyncio.create_task(look())
    try:
        yield
        assert not task.done(), "both copies ran"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def has_left(place: Place) -> None:
    """Nothing of the VM is there any more."""
    async with asyncio.timeout(LIMIT_S):
        while place.left():
            await asyncio.sleep(0.2)


@pytest.mark.parametrize("who", ["source", "target", MANAGER])
@pytest.mark.parametrize("step", list(Step), ids=lambda step: step.name.lower().replace("_", "-"))
async def test_whoever_is_killed_at_whichever_step_one_copy_runs_and_answers(
    moving: Moving, step: Step, who: str
) -> None:
    here, there = moving.host, moving.other
    name = {"source": here, "target": there}.get(who, who)
    victim = moving.state.daemon(name).process
    assert victim is not None
    request_id = f"killed-{step}-{who}-{time.monotonic_ns()}"
    with seen_of(moving, request_id) as move:
        async with never_two(move), moving.watched():
            killing = asyncio.create_task(asyncio.to_thread(move.kill_at, step, victim))
            slow = SLOW_MIB_S if step is Step.COPYING else 0.0
            operation = await moving.begin(bandwidth_mib_s=slow, deadline_s=LIMIT_S, request_id=request_id)
            seen = await killing
            async with asyncio.timeout(30):
                while processes.running(victim):
                    await asyncio.sleep(0.05)
            await asyncio.to_thread(moving.lab.start_daemon, name)
            await asyncio.to_thread(moving.lab.wait_ready)
            done = await ended(moving.client, operation)
            await moving.settled()
        # An agent that has just started has to look first: nothing began that anybody could be killed in.
        assert "has not looked at it yet" not in done.sentence
        moved = done.state is OperationState.DONE
        assert moving.host == (there if moved else here), done.sentence
        await has_left(move.here if moved else move.there)
        assert (move.here.runs(), move.there.runs()) == (not moved, moved)
    print(f"{who} killed at {Step(seen).name}: longest gap {moving.longest_gap():.2f} s; {done.sentence}")
    assert seen == step
