"""`ebb conformance` against the example agent, against our own, and against agents that break one rule each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from ebbtide.cli import conformance
from ebbtide.cli.commands import doctor
from ebbtide.cli.commands.options import Printing
from ebbtide.errors import EbbError
from ebbtide.rest.credentials import command_token, report_token
from tests.manager.cluster import cluster_of, vm
from tests.manager.fake_agent import HOSTS_KEY
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/host_agent.py"
TOKEN = command_token(HOSTS_KEY, "host-x")


@contextlib.asynccontextmanager
async def agent_of(script: Path, **environment: str) -> AsyncIterator[str]:
    """A process of an agent; its URL."""
    variables = {**os.environ, "EBB_TOKEN": TOKEN, **environment}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", str(script), "host-x", "0", env=variables, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.kill()
        await process.wait()


async def failures(url: str) -> dict[str, str]:
    checks = await conformance.examine(url, TOKEN)
    return {check.name: check.why for check in checks if not check.ok}


async def test_the_example_passes_all_checks() -> None:
    async with agent_of(EXAMPLE) as url:
        checks = await conformance.examine(url, TOKEN)
    assert [(check.name, check.why) for check in checks if not check.ok] == []
    assert len(checks) == len(conformance.CHECKS)


async def test_a_vm_that_was_there_stays_and_one_of_an_interrupted_test_goes() -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with agent_of(EXAMPLE) as url, aiohttp.ClientSession(headers=headers) as session:

        async def names() -> list[str]:
            async with session.get(f"{url}/v1/host") as answer:
                return [vm["name"] for vm in (await answer.json())["vms"]]

        size = {"cpu_cores": 0.5, "memory_mib": 256.0}
        spec = {"name": conformance.VM, "nominal": size, "minimum": size, "template": "lab"}
        body = {"request_id": "mine", "epoch": 1, "vm": spec}
        async with session.post(f"{url}/v1/vms", json=body) as answer:
            assert answer.status == 202
        assert "delete it first" in (await failures(url))["its report is complete and agrees with itself"]
        assert await names() == [conformance.VM]
        async with session.delete(f"{url}/v1/vms/{conformance.VM}?request_id=gone&epoch=1&reason=delete") as answer:
            assert answer.status == 202
        assert await names() == []
        seen: list[str] = []

        def interrupt(name: str) -> None:
            seen.append(name)
            if name == "repeated requests are harmless":
                raise asyncio.CancelledError  # as Ctrl-C does

        with pytest.raises(asyncio.CancelledError):
            await conformance.examine(url, TOKEN, progress=interrupt)
        assert seen[-2:] == ["a VM is created at its nominal size", "repeated requests are harmless"]
        assert await names() == []


#: A line of the example, what it becomes, and the check that finds it.
BROKEN = {
    "the token is not looked at": (
        '        if self.headers.get("Authorization") != f"Bearer {os.environ[\'EBB_TOKEN\']}":',
        "        if False:",
        "it answers nothing without a token",
    ),
    "an earlier manager is followed": (
        "        if epoch < self.epoch:",
        "        if False:",
        "it refuses managers that are over",
    ),
    "a repetition begins anew": (
        "        if request_id in self.done:",
        "        if False:",
        "repeated requests are harmless",
    ),
    "what is held is not said": ('size != vm["nominal"]', "False", "targets are reached, counted and held"),
    "what was left out is 0": (
        'float(vm["current"][part] if wanted.get(part) is None else wanted[part])',
        "float(wanted.get(part, 0.0))",
        "a part of a target leaves the rest",
    ),
    "a shortfall is not told": (
        'return self.resize(sizes) | {"state": state, "shortfall": short}',
        "return self.resize(sizes)",
        "needs are reclaimed, and shortfalls told",
    ),
    "minimums are not kept": (
        'vm["current"][part] - vm["minimum"][part] for vm in rows}\n            share',
        'vm["current"][part] for vm in rows}\n            share',
        "needs are reclaimed, and shortfalls told",
    ),
    "what is off is charged": (
        '"current": dict.fromkeys(PARTS, 0.0)}',
        '"current": vm["current"]}',
        "a VM that is off holds nothing",
    ),
    "free counts what VMs hold": (
        'left[part] -= vm["current"][part]',
        "left[part] -= 0",
        "a VM is created at its nominal size",
    ),
    "a stop of what is off forgets its size": (
        '        if vm["state"] != "stopped":',
        "        if True:",
        "a VM that is off holds nothing",
    ),
    "a start asks for no room": (
        '            size = {part: min(max(size[part], vm["minimum"][part]), most[part]) for part in PARTS}\n'
        '            self.require_room(name, size, "start_size")\n',
        "",
        "a start needs room",
    ),
    "a start leaves what is held": (
        '"start_size": None, "held": False}',
        '"start_size": None}',
        "a VM that is off holds nothing",
    ),
    "a reinflation leaves what is held": (
        '            vm["held"] = False',
        "            pass",
        "VMs grow back",
    ),
    "a deleted VM stays": ("        del self.vms[name]", "        pass", "a deleted VM is gone"),
}


@pytest.mark.parametrize("rule", BROKEN)
async def test_an_agent_that_breaks_a_rule_fails_the_check_of_it(rule: str, tmp_path: Path) -> None:
    line, instead, check = BROKEN[rule]
    text = EXAMPLE.read_text()
    assert text.count(line) == 1
    script = tmp_path / "agent.py"
    script.write_text(text.replace(line, instead))
    async with agent_of(script) as url:
        assert check in await failures(url)


async def test_the_example_refuses_what_is_no_number() -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with agent_of(EXAMPLE) as url, aiohttp.ClientSession(headers=headers) as session:
        for cores in (float("nan"), float("inf"), 10**400):
            body = {"request_id": "odd", "epoch": 1, "need": {"cpu_cores": cores}}
            async with session.post(f"{url}/v1/reclaims", json=body) as answer:
                assert (answer.status, (await answer.json())["field"]) == (400, "need.cpu_cores")


async def test_the_example_starts_a_vm_with_no_less_than_its_minimum_and_no_more_than_it_was_sold() -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    spec = {"name": "web", "nominal": {"cpu_cores": 2.0, "memory_mib": 512.0}}
    spec |= {"minimum": {"cpu_cores": 0.5, "memory_mib": 256.0}, "priority": "deflatable"}
    commands: list[tuple[str, str, dict[str, object]]] = [
        ("POST", "/v1/vms", {"vm": spec}),
        ("POST", "/v1/vms/web/stop", {}),
        ("POST", "/v1/vms/web/start", {"start_size": {"cpu_cores": 9.0, "memory_mib": 1.0}}),
    ]
    async with agent_of(EXAMPLE) as url, aiohttp.ClientSession(headers=headers) as session:
        for number, (method, path, body) in enumerate(commands):
            command = {"request_id": f"r{number}", "epoch": 1, "order": number, **body}
            async with session.request(method, f"{url}{path}", json=command) as answer:
                assert answer.status == 202, await answer.text()
        async with session.get(f"{url}/v1/vms/web") as answer:
            assert (await answer.json())["current"] == {
                "cpu_cores": 2.0,
                "memory_mib": 256.0,
                "disk_mib_s": 0.0,
                "network_mib_s": 0.0,
            }


async def test_the_example_serves_a_placement_with_deflation(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, silent_after_s=60.0) as cluster:
        manager = cluster.url

        async def known() -> bool:
            return bool((await cluster.get("/v1/hosts"))["hosts"])

        async with agent_of(EXAMPLE, EBB_MANAGER=manager, EBB_REPORT_TOKEN=report_token(HOSTS_KEY, "host-x")):
            await until(known)
            low = await cluster.create(vm("low", cpu_cores=6.0))
            high = await cluster.create(vm("high", "fixed", cpu_cores=4.0))
            assert (low.state, high.state, high.host) == ("done", "done", "host-x"), high.sentence
            shown = {row["name"]: row["current"]["cpu_cores"] for row in (await cluster.get("/v1/vms"))["vms"]}
            assert shown == {"low": 4.0, "high": 4.0}
            assert (await cluster.delete("high")).state == "done"

            async def grown() -> bool:
                return bool((await cluster.get("/v1/vms/low"))["current"]["cpu_cores"] == 6.0)

            await until(grown)
            ceiling = {"cpu_cores": 2.0, "memory_mib": 1000.0}
            for body in (vm("batch", "harvest", 1.0, 500.0, ceiling=ceiling), vm("beside-it", "fixed", 1.0, 500.0)):
                placed = await cluster.create(body)
                assert placed.state == "done", placed.sentence


async def test_what_is_no_agent_fails_with_a_sentence() -> None:
    found = await failures("http://127.0.0.1:1")
    assert list(found) == ["it says that it runs"]
    assert "GET /healthz: no answer in JSON" in found["it says that it runs"]


def test_no_token_goes_over_plain_http_to_an_agent_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setattr(conformance, "examine", None)
    with pytest.raises(EbbError, match=r"http://192\.0\.2\.1:7101 would get the token over plain HTTP"):
        doctor.conformance("http://192.0.2.1:7101", tmp_path / "token", to=Printing())
