"""`ebb vm adopt` without minimums: what it shows, whom it asks, and that nothing happens without a yes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncConnection
from typer.testing import CliRunner

from cluster_manager.store import schema
from ebbtide.cli.commands import options
from ebbtide.cli.commands.lifecycle import minimums_by_use, proposal
from ebbtide.cli.main import app
from ebbtide.errors import EbbError
from ebbtide.messages.adoptions import Adoptable
from ebbtide.messages.common import PartialVector, Vector
from tests.hostagent.world import Domain
from tests.manager.with_agent import Lab, lab_of

USED_MIB = 150.0


@pytest.fixture
async def lab(quiet_logs: None, tmp_path: Path) -> AsyncIterator[Lab]:
    """A cluster on whose host somebody else's domain `old` of 512 MiB runs."""
    async with lab_of(tmp_path) as made:
        await made.world.create("old", "")
        domain = made.world.domains["old"]
        domain.state, domain.stats_period_s, domain.used_mib, domain.cache_mib = "running", 0, USED_MIB, 0.0
        domain.idle = True
        yield made


async def adopt(lab: Lab, *words: str, says: str = "") -> Any:
    options = ["--manager", lab.url, "--token-file", str(lab.token_file)]
    return await asyncio.to_thread(
        CliRunner().invoke, app, ["vm", "adopt", "old", "--host", "host-a", *words, *options], input=says
    )


def kept(lab: Lab) -> Vector | None:
    """The minimum with which it is looked after; None: it is not."""
    found = lab.agent.host.vms.get("old")
    return None if found is None else found.intent.spec.minimum


def domain_of(lab: Lab) -> Domain:
    return lab.world.domains["old"]


async def test_a_script_takes_the_minimums_by_use_with_yes_and_resize_changes_them(lab: Lab) -> None:
    done = await adopt(lab, "--yes")
    assert done.exit_code == 0, done.output
    assert "old has 1 cores, 512 MiB and used 0 cores, 150 MiB in 0.2 s; it keeps 0.1 cores, 246 MiB" in done.stdout
    assert kept(lab) == Vector(cpu_cores=0.1, memory_mib=USED_MIB + 96)
    options = ["--manager", lab.url, "--token-file", str(lab.token_file)]
    words = ["vm", "resize", "old", "--minimum-memory-mib", "300", *options]
    resized = await asyncio.to_thread(CliRunner().invoke, app, words)
    assert resized.exit_code == 0, resized.output
    assert kept(lab) == Vector(cpu_cores=0.1, memory_mib=300.0)


async def test_a_person_is_asked_and_a_no_changes_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = await adopt(lab)
    assert isinstance(alone.exception, EbbError)
    assert "give --yes, or the minimums" in str(alone.exception)
    monkeypatch.setattr(options, "is_person_there", lambda: True)
    refused = await adopt(lab, says="n\n")
    assert str(refused.exception) == "nothing was changed"
    assert (kept(lab), domain_of(lab).intent) == (None, "")
    agreed = await adopt(lab, says="y\n")
    assert agreed.exit_code == 0, agreed.output
    assert kept(lab) == Vector(cpu_cores=0.1, memory_mib=USED_MIB + 96)


async def test_minimums_that_are_given_are_taken_as_they_are(lab: Lab) -> None:
    done = await adopt(lab, "--minimum-cpu-cores", "0.5", "--minimum-memory-mib", "300", "-o", "json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["state"] == "done"
    assert kept(lab) == Vector(cpu_cores=0.5, memory_mib=300.0)
    assert not any(call == "ask_statistics" for call, _ in lab.world.calls)


async def test_without_statistics_a_minimum_is_asked_for_and_none_is_made_up(lab: Lab) -> None:
    domain_of(lab).stats_period_s = None
    silent = await adopt(lab, "--yes")
    assert str(silent.exception) == (
        "it is not known what memory old uses: it has no balloon: say by --minimum-memory-mib what it keeps in any case"
    )
    assert kept(lab) is None
    done = await adopt(lab, "--yes", "--minimum-memory-mib", "300")
    assert done.exit_code == 0, done.output
    assert "memory not known" in done.stdout
    assert kept(lab) == Vector(cpu_cores=0.1, memory_mib=300.0)


def test_what_cannot_be_adopted_is_refused_by_its_reason() -> None:
    found = Adoptable(domain="old", why_not="it does not run", sentence="old cannot be adopted: it does not run")
    with pytest.raises(EbbError, match=r"^old cannot be adopted: it does not run$"):
        minimums_by_use(found, PartialVector())
    found = Adoptable(domain="old", minimum=PartialVector(memory_mib=300.0), sentence="nothing is known of its CPU")
    with pytest.raises(EbbError, match="say by --minimum-cpu-cores"):
        minimums_by_use(found, PartialVector())
    assert minimums_by_use(found, PartialVector(cpu_cores=0.5)) == Vector(cpu_cores=0.5, memory_mib=300.0)
    assert "cores not known" in proposal(found, Vector())


async def test_a_vm_that_only_its_host_knows_is_put_back_on_the_record_as_it_is(lab: Lab) -> None:
    await lab.create("low")
    assert lab.cluster.manager is not None

    async def forget(connection: AsyncConnection) -> None:
        await connection.execute(delete(schema.vms))

    await lab.cluster.manager.store._write(forget)
    words = ["vm", "adopt", "low", "--host", "host-a", "--yes", "--manager", lab.url]
    done = await asyncio.to_thread(CliRunner().invoke, app, [*words, "--token-file", str(lab.token_file)])
    assert done.exit_code == 0, done.output
    assert "host-a looks after low already, and it is not on the record: 3 cores, 1000 MiB; it keeps" in done.stdout
    assert "low on host-a is on the record again" in done.output
    row = await lab.cluster.get("/v1/vms/low")
    assert (row["state"], row["priority"], row["minimum"]["memory_mib"]) == ("running", "deflatable", 300.0)
