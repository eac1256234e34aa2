"""A guest whose root says whatever it likes on its channel, beside an honest one; the agent is the real one.

Hypervisor, guests and time are make-believe (`tests.hostagent.local_world`). All vCPUs of the rogue run, always.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.commands import CreateCommand, ReclaimCommand, TargetCommand
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec
from hostagent.errors import HostAgentError
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.libvirt.hypervisor import domain_name
from hostagent.operations.agent import Agent
from hostagent.vm.host import Host, Slice
from tests.hostagent import random_parts as parts
from tests.hostagent.faked_loop import FakedLoop
from tests.hostagent.local_guest import Conversation, Reply
from tests.hostagent.local_hypervisor import Faults, Fence, FencedJournal, LocalHypervisor
from tests.hostagent.local_world import ROUNDING, LocalWorld
from tests.hostagent.random_parts import CAPACITY, ERRORS, HOST, OVERHEAD_MIB, Count

ROGUE, HONEST = "rogue", "honest"
#: What one host's answer about its VMs may grow to, whatever a guest says.
REPORT_BYTES = 16_384
#: Faked seconds for one list of reactions.
TIME_S = 150.0

texts = st.text(st.characters(), max_size=40) | st.sampled_from(["\ud800", "\x1b[2J", "\u202e", "x" * 5000, "", "\x00"])
numbers = st.integers() | st.floats() | st.sampled_from([-1, 0, 1, 2**53, 2**64, 10**400, 1e308, float("nan")])
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
FIELDS = """
    boot_id uptime_s cpus online present unpluggable memory total_mib available_mib reserve_mib unpluggable_mib
    pressure memory_some_avg10 memory_full_avg10 major_faults swap_in_pages applications request_id state promised
    released reason retry_after_s expected_s memory_mib cpu_cores failed nonce protocol
"""
fields = st.sampled_from(FIELDS.split())
notices = st.builds(
    lambda method, params: {"jsonrpc": "2.0", "method": method, "params": params},
    st.sampled_from(["pressure", "request", "hello", "reboot"]) | texts,
    values
    | st.fixed_dictionaries({"memory_mib": numbers, "cpu_cores": numbers, "reason": texts})
    | st.fixed_dictionaries({"boot_id": texts, "memory": values, "major_faults": numbers}),
)
wishes = st.builds(
    lambda mib, reason: {"jsonrpc": "2.0", "method": "request", "params": {"memory_mib": mib, "reason": reason}},
    st.integers(1, 2000),
    texts,
)
reactions = (
    st.tuples(st.just("honest"), st.none())
    | st.tuples(st.just("changed"), st.dictionaries(fields, values, max_size=3))
    | st.tuples(st.just("cpus"), st.lists(st.integers(0, 2), min_size=1, max_size=5))
    | st.tuples(st.just("starving"), st.none())
    | st.tuples(st.just("result"), values)
    | st.tuples(st.just("error"), values | st.fixed_dictionaries({"code": st.just(-32000), "message": texts}))
    | st.tuples(st.just("error"), st.just({"code": -32000, "message": "no \ud800 \x1b[2J"}))
    | st.tuples(st.just("notices"), st.lists(wishes, min_size=1, max_size=3))
    | st.tuples(st.just("notices"), st.lists(notices, max_size=30))
    | st.tuples(st.just("line"), st.binary(max_size=200) | st.just(b"[" * 20_000) | st.just(b"x" * 70_000))
    | st.tuples(st.just("late"), st.floats(0.5, 12.0))
    | st.tuples(st.just("silence"), st.none())
    | st.tuples(st.just("hang up"), st.none())
)


class Rogue(Conversation):
    """Answers as it was told to, over and over; ``Rogue.sent`` counts its messages."""

    sent = 0
    script: Iterator[tuple[str, Any]] = iter(())

    def _take(self, message: Reply) -> None:
        if not self.open:
            return
        reaction: tuple[str, Any] = next(Rogue.script, ("silence", None))
        kind, what = reaction
        honest = getattr(self, "_" + message["method"].replace(".", "_"))(message.get("params", {}))
        self._guest.online = set(range(self._vcpus))
        match kind:
            case "honest":
                self._say({"id": message["id"], **honest})
            case "changed":
                self._say({"id": message["id"], "result": _changed(honest.get("result"), what)})
            case "late":
                asyncio.get_running_loop().call_later(what, self._say, {"id": message["id"], **honest})
            case "cpus":
                self._say({"id": message["id"], "result": _changed(honest.get("result"), {"online": what})})
            case "starving":
                starving = {"available_mib": 0.0, "unpluggable_mib": 0.0}
                self._say({"id": message["id"], "result": _changed(honest.get("result"), starving)})
            case "result" | "error":
                self._say({"id": message["id"], kind: what})
            case "notices":
                for notice in what:
                    self._say(notice)
            case "line":
                self._feed(what + b"\n")
            case "hang up":
                self.hang_up()

    def _say(self, message: Any) -> None:
        self._feed(json.dumps(message).encode() + b"\n")

    def _feed(self, line: bytes) -> None:
        if self.open:
            Rogue.sent += 1
            self._reader.feed_data(line)


def _changed(answer: Any, changes: dict[str, Any]) -> Any:
    """An answer in which some fields, wherever they stand, have other values."""
    if not isinstance(answer, dict):
        return answer
    return {name: changes[name] if name in changes else _changed(value, changes) for name, value in answer.items()}


class RogueWorld(LocalWorld):
    async def connect(self, path: str, limit: int = 2**16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await super().connect(path, limit)
        if Path(path).name == domain_name(HOST, ROGUE):
            writer.__class__ = Rogue  # type: ignore[assignment]
        return reader, writer


class Bench:
    """One host with both guests."""

    def __init__(self, directory: Path) -> None:
        self.loop = FakedLoop()
        asyncio.set_event_loop(self.loop)
        self.world = Count.world = RogueWorld(self.loop, Random(0))
        fence, faults = Fence(), Faults()
        part = Slice(HOST, "http://127.0.0.1:1", CAPACITY, "qemu", OVERHEAD_MIB)
        hypervisor = LocalHypervisor(self.world, HOST, fence, faults)
        journal = FencedJournal(directory, fence, faults)
        self.agent = Agent(Host(part, hypervisor, journal, lambda: 1e6), usable_boot_mib)
        self.numbers = itertools.count(1)
        #: The latest decision that was looked at.
        self.told = 0

    async def run(self, script: list[tuple[str, Any]]) -> None:
        agent, host = self.agent, self.agent.host
        Rogue.script = itertools.repeat(("honest", None))
        await agent.start()
        for name in (ROGUE, HONEST):
            spec = VMSpec(
                name=name,
                nominal=Vector(cpu_cores=3.0, memory_mib=1024.0),
                minimum=Vector(cpu_cores=0.5, memory_mib=320.0),
            )
            create = CreateCommand(request_id=self.number(), vm=spec)
            await self.done(partial(agent.creations.create, create))
        await self.done(partial(agent.sizes.target, ROGUE, self.target(1.0, 1024.0)))
        assert host.vms[ROGUE].status().current.cpu_cores == 1.0
        Rogue.script = iter(script)
        until = self.loop.time() + TIME_S
        for turn in itertools.count():
            await asyncio.sleep(1.7)
            self.look()
            if self.loop.time() >= until:
                break
            # Its operations go on all the time.
            if turn % 4 == 1:
                size = (1.0, 700.0) if turn % 8 == 1 else (1.0, 1000.0)
                await self.tried(partial(agent.sizes.target, ROGUE, self.target(*size)))
            if turn % 4 == 3:
                need = ReclaimCommand(
                    request_id=self.number(), need=Vector(memory_mib=50.0), deadline_s=5.0, exclude=(HONEST,)
                )
                await self.tried(partial(agent.sizes.reclaim, need))
        # Whatever was said: an honest agent in its place is heard.
        Rogue.script = itertools.repeat(("honest", None))
        async with asyncio.timeout(120):
            while not host.vms[ROGUE].link.connected:
                await asyncio.sleep(1.0)
        await agent.close()

    def look(self) -> None:
        host, world = self.agent.host, self.world
        honest, rogue = (world.domains[domain_name(HOST, name)] for name in (HONEST, ROGUE))
        world.judge_all()
        assert world.blames == []
        # The neighbour has all that it was sold.
        assert ResourceVector(3.0, 1022.0).fits_in(honest.may_hold())
        assert honest.state == rogue.state == "running"
        assert host.vms[HONEST].link.connected
        held, committed = rogue.may_hold(), host.vms[ROGUE].allocation().current
        # More than its target only by asking for what it was sold, which is then charged.
        assert held.cpu_cores <= committed.cpu_cores * 1.05, "more CPU than is committed"
        assert held.memory_mib <= 1024.0 + 2
        assert committed.fits_in(ResourceVector(3.0, 1024.0) + ROUNDING)
        assert len(host.vms[ROGUE].link._waiting) < 16
        # What is said of it can be sent, and stays short.
        assert len(host.report().model_dump_json().encode()) < REPORT_BYTES
        for decision in host.history.decisions(ROGUE, since=self.told):
            decision.model_dump_json().encode()
        self.told = host.history.newest

    def target(self, cpu_cores: float, memory_mib: float) -> TargetCommand:
        return TargetCommand(
            request_id=self.number(),
            generation=self.agent.host.vms[ROGUE].intent.generation + 1,
            target=Vector(cpu_cores=cpu_cores, memory_mib=memory_mib),
            deadline_s=10.0,
        )

    def number(self) -> str:
        return f"r{next(self.numbers)}"

    async def done(self, send: Callable[[], Awaitable[Any]]) -> None:
        operation = await send()
        record = self.agent.requests.operations._records[operation.request_id]
        await record.ended.wait()
        assert record.operation.state.value == "done", record.operation.sentence

    async def tried(self, send: Callable[[], Awaitable[Any]]) -> None:
        try:
            operation = await send()
        except HostAgentError:
            return
        async with asyncio.timeout(120):
            await self.agent.requests.operations._records[operation.request_id].ended.wait()
        self.agent.requests.operations._records[operation.request_id].operation.model_dump_json().encode()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("examples", "least"), [(20, 500), pytest.param(240, 10_000, marks=pytest.mark.deep)], ids=["run", "deep"]
)
def test_a_rogue_guest_gains_nothing_and_harms_nobody_whatever_it_says(examples: int, least: int) -> None:
    Rogue.sent = 0

    @settings(
        max_examples=examples,
        deadline=None,
        phases=parts.phases(),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(reactions, min_size=30, max_size=80))
    def fight(script: list[tuple[str, Any]]) -> None:
        ERRORS.clear()
        with tempfile.TemporaryDirectory(prefix="ebb-rogue-") as directory:
            bench = Bench(Path(directory))
            try:
                bench.loop.run_until_complete(bench.run(script))
            finally:
                bench.loop.run_until_complete(parts.ended(bench.world.tasks))
                for task in asyncio.all_tasks(bench.loop):
                    task.cancel()
                bench.loop.run_until_complete(asyncio.sleep(0.1))
                bench.loop.close()
            assert ERRORS == []
            assert bench.loop.complaints == []

    with parts.made_up():
        fight()
    print(f"{Rogue.sent} messages of the rogue")
    assert Rogue.sent >= least
