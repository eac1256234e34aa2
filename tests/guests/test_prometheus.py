"""A real Prometheus that scrapes a lab of two hosts through a deflation: what it says is the ledger; alerts fire."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections import defaultdict
from collections.abc import AsyncIterator
from functools import partial

import aiohttp
import pytest
import pytest_asyncio

from ebbtide.client import ManagerClient
from ebbtide.deflation.allocations import Priority
from ebbtide.messages.common import Vector
from ebbtide.messages.explanations import Explanation
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMSpec, VMState
from ebbtide.rest.metrics.sheet import MIB
from tests.guests import prometheus
from tests.guests.conftest import RunningLab
from tests.guests.prometheus import Prometheus, until

pytestmark = [pytest.mark.guest, pytest.mark.timeout(1500), pytest.mark.asyncio(loop_scope="module")]

#: Only the larger host has room for it, and then too few cores for the other one, whose quota gives them whatever the
#: guest does.
LOW = VMSpec(
    name="metered",
    priority=Priority.DEFLATABLE,
    nominal=Vector(cpu_cores=3, memory_mib=768),
    minimum=Vector(cpu_cores=0.5, memory_mib=400),
)
HIGH = VMSpec(name="urgent", priority=Priority.FIXED, nominal=Vector(cpu_cores=4, memory_mib=2000))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(lab: RunningLab) -> AsyncIterator[ManagerClient]:
    async with lab.client() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scraping(lab: RunningLab, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Prometheus]:
    directory = tmp_path_factory.mktemp("prometheus")
    with prometheus.running(directory, lab.state.manager_url, lab.state.manager_token_file) as made:
        yield made


async def explanation_of(lab: RunningLab, name: str) -> Explanation:
    """From the host's own mouth, with the ledgers of its latest resizes."""
    host = lab.state.hosts[0]
    headers = {"Authorization": f"Bearer {host.token_file.read_text().strip()}"}
    async with (
        aiohttp.ClientSession(host.url, headers=headers) as session,
        session.get(f"/v1/vms/{name}/explain") as response,
    ):
        return Explanation.model_validate_json(await response.text())


async def run(client: ManagerClient, spec: VMSpec) -> None:
    operation = await client.wait(await client.create(spec), limit_s=400.0)
    assert operation.state is OperationState.DONE, operation.sentence


async def test_every_daemon_is_scraped(lab: RunningLab, scraping: Prometheus) -> None:
    everyone = {(lab.state.manager_url.removeprefix("http://"),), *((host.id,) for host in lab.state.hosts)}
    found = await until(lambda: scraping.values("up", "instance"), lambda now: len(now) == 3 and min(now.values()) == 1)
    assert set(found) == everyone
    assert await scraping.values("ebbtide_manager_leader") == {(): 1.0}


async def test_what_prometheus_says_of_a_deflation_is_the_ledger(
    lab: RunningLab, client: ManagerClient, scraping: Prometheus
) -> None:
    host = lab.state.hosts[0].id
    await run(client, LOW)
    try:

        async def settled() -> bool:
            vm = (await explanation_of(lab, LOW.name)).vm
            return vm.guest_connected and vm.state is VMState.RUNNING and vm.current.memory_mib >= 640

        await until(settled, bool, 700.0)
        await run(client, HIGH)
        try:
            known = await explanation_of(lab, LOW.name)
            assert known.vm.current.cpu_cores == 2.0
            # Memory by a command: whether the placement could take it too depends on how soon the guest answered.
            await until(settled, bool, 300.0)
            generation = (await client.vm(LOW.name)).generation + 1
            target = Vector(cpu_cores=1.5, memory_mib=640)
            await client.wait(await client.set_target(LOW.name, target, generation=generation), limit_s=300.0)
            known = await explanation_of(lab, LOW.name)
            rows = [(past.outcome, row) for past in known.resizes for row in past.outcome.ledger]
            for component, metric, unit in (("cpu_cores", "cpu_cores", 1.0), ("memory_mib", "memory_bytes", MIB)):
                for field in ("asked", "verified"):
                    wanted: dict[tuple[str, ...], float] = defaultdict(float)
                    for outcome, row in rows:
                        shrinks = outcome.target.vector()[component] < outcome.before.vector()[component]
                        if row.resource == component and shrinks:
                            wanted[row.layer.value,] += getattr(row, field) * unit
                    assert sum(wanted.values()) > 0 or (field, component) == ("verified", "memory_mib")
                    match = f'{{vm="{LOW.name}",host="{host}",direction="deflate"}}'
                    expression = f"sum by (layer) (ebbtide_vm_layer_{field}_{metric}_total{match})"
                    asked = partial(scraping.values, expression, "layer")
                    await until(asked, partial(alike, wanted=dict(wanted)), 30.0)
            # What the layers of the host's side gave is the fall of the bound, and the sizes are those of the host.
            wants = {"bound": known.vm.current, "nominal": known.vm.nominal, "minimum": known.vm.minimum}
            for what, size in wants.items():
                expression = f'ebbtide_vm_{what}_memory_bytes{{vm="{LOW.name}"}}'
                assert await scraping.values(expression, "host") == {(host,): size.memory_mib * MIB}
            for what, least in (("guest_cpus_online", 1.0), ("vm_resident_memory_bytes", 100 * MIB)):
                said = partial(scraping.values, f'ebbtide_{what}{{vm="{LOW.name}"}} > {least - 1}', "host")
                await until(said, lambda now: set(now) == {(host,)}, 60.0)
            bound = "ebbtide_cluster_bound_cpu_cores"
            wanted_cores = {("deflatable",): known.vm.current.cpu_cores, ("fixed",): 4.0, ("harvest",): 0.0}
            await until(lambda: scraping.values(bound, "priority"), lambda now: now == wanted_cores, 30.0)
            placed = 'ebbtide_manager_operation_duration_seconds_count{kind="create",state="done"}'
            assert (await scraping.values(placed))[()] >= 2.0
            assert await scraping.firing("EbbtideNoLeader") == []
        finally:
            await client.wait(await client.delete(HIGH.name), limit_s=300.0)
    finally:
        await client.wait(await client.delete(LOW.name), limit_s=300.0)


def alike(now: dict[tuple[str, ...], float], wanted: dict[tuple[str, ...], float]) -> bool:
    """The same, where a layer that had nothing to do need not be named."""

    def without_zeros(found: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
        return {layer: amount for layer, amount in found.items() if amount}

    return without_zeros(now) == pytest.approx(without_zeros(wanted), rel=1e-9, abs=1e-6)


def promtool(text: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)


async def test_promtool_has_nothing_against_any_metric(lab: RunningLab) -> None:
    token = lab.token
    async with aiohttp.ClientSession(lab.state.manager_url, headers={"Authorization": f"Bearer {token}"}) as session:
        for path in ("/metrics", *(f"/v1/hosts/{host.id}/metrics" for host in lab.state.hosts)):
            async with session.get(path) as response:
                text = await response.read()
            assert b"ebbtide_build_info" in text
            done = await asyncio.to_thread(promtool, text)
            assert (done.returncode, done.stdout + done.stderr) == (0, b"")


async def test_an_agent_that_is_killed_fires_the_alert_until_it_is_back(lab: RunningLab, scraping: Prometheus) -> None:
    name = lab.state.hosts[1].id
    process = lab.lab.state().daemon(name).process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    try:
        fired = await until(lambda: scraping.firing("EbbtideHostSilent"), bool)
        assert [(labels["host"], labels["severity"]) for labels in fired] == [(name, "critical")]
        assert await scraping.values(f'up{{instance="{name}"}}') == {(): 0.0}
        assert await scraping.firing("EbbtideNoLeader") == []
    finally:
        lab.lab.start_daemon(name)
    await until(lambda: scraping.firing("EbbtideHostSilent"), lambda now: not now)
    await until(lambda: scraping.values(f'up{{instance="{name}"}}'), lambda now: now == {(): 1.0})
