"""An agent is cut off in the middle of a plan, by its link going down in a network namespace, and comes back.

The manager and two real host agents run in namespaces of their own. Whatever was under way, in the end everybody tells
the same story; at no moment is a VM on two hosts or room promised twice.
"""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from tests.chaos.checks import Violated
from tests.chaos.namespaces import PREFIX, Network, ip, network
from tests.chaos.partition import Partition, partition
from tests.hostagent.world import World

pytestmark = [pytest.mark.service, pytest.mark.timeout(180)]

#: Longer than the manager waits for an answer, shorter than it bears with an agent that is away.
SHORT_S = 2.0
PATIENT_S = 60.0


async def crowded(cluster: Partition) -> None:
    """host-a is full with two VMs that can shrink."""
    for name in ("low-1", "low-2"):
        assert (await cluster.ended(await cluster.create(name)))["state"] == "done"
    assert cluster.cores("host-a") == {"low-1": 3.0, "low-2": 3.0}


@pytest.mark.parametrize(
    "gate", ["command", "post-reclaims-arrived", "post-reclaims-answer", "read-operations-answer", "post-vms-answer"]
)
async def test_an_agent_that_is_back_before_the_manager_gives_up_ends_the_plan(tmp_path: Path, gate: str) -> None:
    """Cut before the command leaves, after it arrived, after it was taken on, during a long poll, at the start."""
    async with partition(tmp_path, PATIENT_S) as cluster:
        await crowded(cluster)
        gates = cluster.manager_gates if gate == "command" else cluster.gates["host-a"]
        gates.close(gate)
        request_id = await cluster.create("high-1", "fixed", memory_mib=1300.0)
        await gates.reached(gate)
        cluster.network.cut("host-a")
        gates.open(gate)
        await cluster.host_state("host-a", "silent")
        await asyncio.sleep(SHORT_S)
        assert (await cluster.call("GET", f"/v1/operations/{request_id}"))[1]["state"] == "running"
        cluster.network.mend("host-a")
        operation = await cluster.ended(request_id)
        assert operation["state"] == "done", operation
        await cluster.agreed()
        assert cluster.cores("host-a") == {"low-1": 1.5, "low-2": 1.5, "high-1": 3.0}
        assert cluster.names("host-b") == set()


async def test_a_start_that_nobody_knows_of_is_repeated_nowhere_and_removed_when_the_host_is_back(
    tmp_path: Path,
) -> None:
    async with partition(tmp_path, None) as cluster:
        gates = cluster.gates["host-a"]
        gates.close("post-vms-answer")
        request_id = await cluster.create("vm-1", "fixed")
        await gates.reached("post-vms-answer")
        cluster.network.cut("host-a")
        gates.open("post-vms-answer")
        operation = await cluster.ended(request_id)
        assert operation["state"] == "failed"
        assert "may have been started on host-a" in operation["sentence"]
        # Its name is not free, and others are placed elsewhere.
        body = {"request_id": "again", "vm": {"name": "vm-1", "nominal": {"cpu_cores": 1.0, "memory_mib": 400.0}}}
        assert (await cluster.call("POST", "/v1/vms", body))[0] == 409
        await cluster.host_state("host-a", "silent")
        assert (await cluster.ended(await cluster.create("vm-2", "fixed")))["host"] == "host-b"
        async with asyncio.timeout(20):
            while cluster.names("host-a") != {"vm-1"}:
                await asyncio.sleep(0.05)
        cluster.network.mend("host-a")
        async with asyncio.timeout(30):
            while cluster.names("host-a"):
                await asyncio.sleep(0.05)
        await cluster.agreed()
        assert (await cluster.ended(await cluster.create("vm-1", "fixed", "afresh")))["state"] == "done"
        await cluster.agreed()


async def test_a_host_that_is_lost_in_a_reclaim_is_left_for_another_and_reinflated_when_it_is_back(
    tmp_path: Path,
) -> None:
    async with partition(tmp_path, None) as cluster:
        await crowded(cluster)
        gates = cluster.gates["host-a"]
        gates.close("post-reclaims-answer")
        request_id = await cluster.create("high-1", "fixed", memory_mib=1300.0)
        await gates.reached("post-reclaims-answer")
        cluster.network.cut("host-a")
        gates.open("post-reclaims-answer")
        operation = await cluster.ended(request_id)
        assert (operation["state"], operation["host"]) == ("done", "host-b"), operation
        async with asyncio.timeout(30):
            while cluster.cores("host-a") != {"low-1": 1.5, "low-2": 1.5}:
                await asyncio.sleep(0.05)
        cluster.network.mend("host-a")
        async with asyncio.timeout(30):
            while cluster.cores("host-a") != {"low-1": 3.0, "low-2": 3.0}:
                await asyncio.sleep(0.05)
        await cluster.agreed()
        assert cluster.names("host-b") == {"high-1"}


async def test_a_deletion_on_a_lost_host_is_made_good_when_it_is_back(tmp_path: Path) -> None:
    async with partition(tmp_path, None) as cluster:
        await crowded(cluster)
        cluster.network.cut("host-a")
        status, answer = await cluster.call("DELETE", "/v1/vms/low-1?request_id=away")
        assert status == 202, answer
        operation = await cluster.ended("away")
        assert operation["state"] == "failed"
        assert "as soon as host-a answers" in operation["sentence"]
        assert cluster.names("host-a") == {"low-1", "low-2"}
        cluster.network.mend("host-a")
        async with asyncio.timeout(30):
            while cluster.names("host-a") != {"low-2"}:
                await asyncio.sleep(0.05)
        await cluster.agreed()


async def test_a_silent_host_is_not_assumed_empty_and_gets_nothing_new(tmp_path: Path) -> None:
    """Cut between two reports, with nothing under way."""
    async with partition(tmp_path, None) as cluster:
        await crowded(cluster)
        cluster.network.cut("host-a")
        await cluster.host_state("host-a", "silent")
        _, found = await cluster.call("GET", "/v1/vms")
        assert {(row["name"], row["host"]) for row in found["vms"]} == {("low-1", "host-a"), ("low-2", "host-a")}
        assert (await cluster.ended(await cluster.create("high-1", "fixed", memory_mib=1300.0)))["host"] == "host-b"
        cluster.network.mend("host-a")
        await cluster.agreed()
        assert cluster.cores("host-a") == {"low-1": 3.0, "low-2": 3.0}


def test_no_namespace_is_left_behind_when_something_fails() -> None:
    made: list[Network] = []

    def fail() -> None:
        with network(("x", "y")) as net:
            made.append(net)
            assert net.manager in ip("netns", "list")
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert PREFIX + made[0].tag not in ip("netns", "list")


def test_namespaces_of_a_test_that_was_killed_go_with_the_next() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    stale = Network(f"{gone.pid}-0000", ("x",))
    stale.make()
    with network(("y",)):
        assert PREFIX + stale.tag not in ip("netns", "list")


async def test_a_host_that_cannot_be_made_is_told_of_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is seen of the rules is looked at when there is a manager to look at."""

    async def refuse(self: World) -> None:
        raise RuntimeError("no room for a host")

    monkeypatch.setattr(World, "start", refuse)
    with pytest.raises(RuntimeError, match="no room for a host"):
        async with partition(tmp_path, PATIENT_S):
            pass


@pytest.mark.parametrize(
    ("ended", "told"),
    [(asyncio.CancelledError, asyncio.CancelledError), (TimeoutError, Violated), (None, Violated)],
    ids=["cancelled", "too late", "by itself"],
)
async def test_a_rule_that_was_seen_broken_is_told_of_however_the_test_fails(
    tmp_path: Path, ended: type[BaseException] | None, told: type[BaseException]
) -> None:
    async def run() -> None:
        async with partition(tmp_path, PATIENT_S) as cluster:
            cluster.violations.add("a rule is broken")
            if ended is not None:
                raise ended

    with pytest.raises(told):
        await run()


async def test_hosts_and_a_manager_that_tell_another_story_break_a_rule(tmp_path: Path) -> None:
    async with partition(tmp_path, PATIENT_S) as cluster:
        assert (await cluster.ended(await cluster.create("low-1")))["state"] == "done"
        cluster.names = lambda host: set()  # type: ignore[method-assign]
        with pytest.raises(Violated, match=r"only in the store: \{\('low-1', 'host-a'\)\}"):
            await cluster.agreed()
