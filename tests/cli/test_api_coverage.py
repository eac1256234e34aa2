"""Every route of the manager has a client method and a command, and the command really asks that route."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import structlog
from typer.testing import CliRunner

from cluster_manager.api.app import make_app
from ebbtide.cli.main import app
from ebbtide.client import ManagerClient
from ebbtide.rest.descriptions import description_of
from tests import schema_run
from tests.manager import cluster as tests_cluster
from tests.manager.with_agent import Lab, lab_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

#: Goes out, and fails: there is one host only.
NOWHERE = ("POST", "/v1/vms/{name}/migrate")
STREAM = ("GET", "/v1/events/stream")
#: For a browser.
PAGE = ("GET", "/")
#: For Prometheus.
METRICS = {("GET", "/metrics"), ("GET", "/v1/hosts/{id}/metrics"), ("GET", "/v1/prometheus/targets")}
#: For `ebb-hostagent join`.
JOINING = {("GET", "/v1/ca"), ("POST", "/v1/enrolments")}
SIZES = ["--cpu-cores", "1", "--memory-mib", "512"]
#: The client's method and the command of each route, in an order that works: ``web`` is made first and deleted last.
COVERED: dict[tuple[str, str], tuple[str, list[str]]] = {
    ("POST", "/v1/vms"): ("create", ["create", "web", *SIZES]),
    ("GET", "/healthz"): ("health", ["health"]),
    ("GET", "/readyz"): ("readiness", ["health", "--ready"]),
    ("GET", "/v1/backup"): ("backup", ["backup", "FILE"]),
    ("GET", "/v1/openapi.json"): ("openapi", ["openapi"]),
    ("GET", "/v1/hosts"): ("hosts", ["hosts", "--state", "ready", "--mode", "active"]),
    ("GET", "/v1/hosts/{id}"): ("host", ["host", "host-a"]),
    ("PUT", "/v1/hosts/{id}/mode"): ("set_mode", ["resume", "host-a"]),
    ("GET", "/v1/hosts/{id}/operations/{request_id}"): (
        "operation",
        ["operation", "--host", "host-a", "REQUEST", "--wait-s", "1"],
    ),
    ("GET", "/v1/vms"): ("vms", ["vms", "--host", "host-a", "--state", "running", "--prefix", "w"]),
    ("GET", "/v1/vms/{name}"): ("vm", ["vm", "web"]),
    ("GET", "/v1/vms/{name}/explain"): ("explain", ["explain", "web"]),
    ("PUT", "/v1/vms/{name}/target"): ("set_target", ["target", "web", "--cpu-cores", "0.5"]),
    ("GET", "/v1/operations"): ("operations", ["operations", "--kind", "create", "--since", "2026-01-31T12:00"]),
    ("GET", "/v1/operations/{id}"): ("operation", ["operation", "CREATED"]),
    ("GET", "/v1/core-changes"): ("core_changes", ["core-changes", "--machine", "web"]),
    ("GET", "/v1/machines"): ("machines", ["machines"]),
    ("GET", "/v1/calibration"): ("calibration", ["calibration"]),
    ("GET", "/v1/machines/{name}"): ("machine", ["machine", "web"]),
    ("GET", "/v1/events"): ("events", ["events", "--limit", "5", "--kind", "placed"]),
    STREAM: ("follow_events", ["events", "--follow"]),
    ("GET", "/v1/hosts/{id}/templates"): ("templates", ["templates", "host-a"]),
    ("PATCH", "/v1/vms/{name}"): ("resize", ["resize", "web", "--minimum-cpu-cores", "0.3"]),
    ("POST", "/v1/vms/{name}/stop"): ("stop", ["stop", "web"]),
    ("POST", "/v1/vms/{name}/start"): ("start", ["start", "web"]),
    ("POST", "/v1/vms/{name}/migrate"): ("migrate", ["migrate", "web", "--lose-disk"]),
    ("GET", "/v1/rebalancing"): ("dry_run_rebalancing", ["rebalance", "--dry-run", "--lasted-s", "60"]),
    ("GET", "/v1/adoptions"): ("adoptable", ["adopt", "other", "--host", "host-a", "--yes"]),
    ("POST", "/v1/adoptions"): (
        "adopt",
        ["adopt", "old", "--host", "host-a", "--minimum-cpu-cores", "0.3", "--minimum-memory-mib", "256"],
    ),
    ("POST", "/v1/vms/{name}/release"): ("release", ["release", "old"]),
    ("POST", "/v1/tasks"): ("submit_task", ["tasks", "submit", "train", "--checkpoint-signal", "USR1", "sleep", "60"]),
    ("GET", "/v1/tasks"): ("tasks", ["tasks", "list", "--state", "waiting", "--prefix", "t", "--limit", "5"]),
    ("GET", "/v1/tasks/{name}"): ("task", ["tasks", "show", "train"]),
    ("GET", "/v1/tasks/{name}/explanation"): ("explain_task", ["tasks", "explain", "train"]),
    ("DELETE", "/v1/tasks/{name}"): ("cancel_task", ["tasks", "cancel", "train"]),
    ("GET", "/v1/engine"): ("engine", ["tasks", "engine"]),
    ("GET", "/v1/acquirer"): ("acquirer", ["tasks", "acquirer"]),
    ("DELETE", "/v1/vms/{name}"): ("delete", ["delete", "web"]),
    ("POST", "/v1/invitations"): ("invite_host", ["host", "invite", "host-new"]),
    ("POST", "/v1/hosts/{id}/revocation"): ("revoke_host", ["host", "revoke", "host-old"]),
    ("DELETE", "/v1/hosts/{id}"): ("forget_host", ["forget", "host-old"]),
}


@dataclass
class Running:
    """A manager with a host, and the answers that it gave."""

    lab: Lab
    seen: schema_run.Seen

    def options(self) -> list[str]:
        return ["--manager", self.lab.url, "--token-file", str(self.lab.token_file)]

    async def ebb(self, *words: str, exit_code: int = 0) -> str:
        """What a command prints; it must succeed, if nothing else is said."""
        argv = [*words, *self.options()]
        result = await asyncio.to_thread(CliRunner().invoke, app, argv)
        assert result.exit_code == exit_code, (argv, result.output, result.exception)
        return str(result.stdout)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    seen: schema_run.Seen = Counter()
    # Logs of the manager must not stand between what a command prints in the same process.
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tests_cluster, "make_app", lambda manager: schema_run.watch(make_app(manager), seen))
        async with lab_of(tmp_path_factory.mktemp("coverage")) as lab:
            # Somebody else's domains.
            for name in ("old", "other"):
                await lab.world.create(name, "")
                lab.world.domains[name].state = "running"
                lab.world.domains[name].stats_period_s = 0
            await lab.add_old_host()
            yield Running(lab, seen)
    structlog.reset_defaults()


async def test_every_route_that_clients_may_ask_is_in_the_table(running: Running) -> None:
    assert running.lab.cluster.server is not None
    routes = {
        (route.method, route.resource.canonical)
        for route in running.lab.cluster.server.app.router.routes()
        if route.method != "HEAD" and route.resource is not None and description_of(route.handler).security != "agent"
    }
    assert routes - {PAGE} - METRICS - JOINING == set(COVERED)


async def test_every_command_asks_its_route_and_every_client_method_is_there(running: Running, tmp_path: Path) -> None:
    ids = {"CREATED": "", "REQUEST": "", "FILE": str(tmp_path / "backup")}
    for route, (method, words) in COVERED.items():
        assert callable(getattr(ManagerClient, method))
        if route == STREAM:
            continue
        before = +running.seen
        failing = int(route == NOWHERE)
        printed = await running.ebb(*(ids.get(word, word) for word in words), "--json", exit_code=failing)
        asked = {(verb, path) for (verb, path, status) in running.seen - before if status in (200, 202)}
        assert route in asked, (words, asked)
        answer = json.loads(printed)
        if words[0] == "create":
            ids["CREATED"] = answer["request_id"]
        elif words[0] == "resume":
            ids["REQUEST"] = answer["request_id"]


async def test_every_table_can_be_printed_too(running: Running) -> None:
    created = json.loads(await running.ebb("create", "table", *SIZES, "--json"))["request_id"]

    async def reported() -> bool:
        return "table" in await running.ebb("core-changes")

    await running.lab.cluster.until(reported)
    for words in (
        ["vms"], ["vm", "table"], ["hosts"], ["host", "host-a"], ["operations"], ["operation", created], ["health"],
        ["core-changes"], ["machines"], ["machine", "table"], ["events"], ["tasks", "submit", "table", "true"],
        ["tasks", "list"], ["tasks", "show", "table"], ["tasks", "explain", "table"], ["tasks", "cancel", "table"],
        ["tasks", "engine"], ["calibration"],
    ):  # fmt: skip
        printed = await running.ebb(*words)
        assert "table" in printed or words[0] in ("hosts", "host", "health", "calibration") or "engine" in words, (
            words,
            printed,
        )


async def test_dry_runs_are_printed_and_change_nothing(running: Running) -> None:
    await running.ebb("create", "there", *SIZES)
    creation = await running.ebb("create", "new", *SIZES, "--dry-run")
    assert "dry run, nothing is changed: placed new" in creation
    assert "fitness" in creation
    assert "dry run, nothing is changed: deleted there" in await running.ebb("delete", "there", "--dry-run")
    names = [vm["name"] for vm in json.loads(await running.ebb("vms", "--json"))["vms"]]
    assert "there" in names
    assert "new" not in names


async def test_a_change_of_an_old_version_is_refused_in_one_sentence(running: Running) -> None:
    argv = ["delete", "there", "--version", "0000", *running.options()]
    result = await asyncio.to_thread(CliRunner().invoke, app, argv)
    assert result.exit_code == 1
    assert "there has version" in str(result.exception)


async def test_events_are_followed_until_interrupted(running: Running) -> None:
    argv = [sys.executable, "-m", "ebbtide.cli.main", "events", "--follow", "--json", *running.options()]
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, cwd=Path.cwd())
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            first = json.loads(await process.stdout.readline())
            assert first["id"] >= 1
            await running.ebb("create", "followed", *SIZES)
            while json.loads(await process.stdout.readline())["vm"] != "followed":
                pass
            assert running.seen["GET", "/v1/events/stream", 200] >= 1
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
