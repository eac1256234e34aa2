"""Every route of the manager has a client method and a command, and the command really asks that route."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from ebbtide.cli import main
from ebbtide.cli.commands import completion
from ebbtide.cli.commands.options import Output
from ebbtide.cli.main import app
from ebbtide.cli.schemas import DOCUMENTS, schema_of
from ebbtide.client import ManagerClient
from ebbtide.errors import EbbError
from ebbtide.rest.descriptions import description_of
from tests.cli.running import SIZES, Running
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

#: Goes out, and fails: there is one host only.
NOWHERE = ("POST", "/v1/vms/{name}/migrate")
#: Is refused: it has ended.
CANCEL = ("POST", "/v1/operations/{id}/cancel")
#: Is there when the task has begun.
OUTPUT = ("GET", "/v1/tasks/{name}/output")
STREAM = ("GET", "/v1/events/stream")
#: For a browser.
PAGE = {("GET", "/"), ("GET", "/page/{file}")}
#: For Prometheus.
METRICS = {("GET", "/metrics"), ("GET", "/v1/hosts/{id}/metrics"), ("GET", "/v1/prometheus/targets")}
#: For hosts: `ebb-hostagent join`, and the CA that is to follow.
JOINING = {("GET", "/v1/ca"), ("GET", "/v1/ca/next"), ("POST", "/v1/enrolments")}
#: The client's method and the command of each route, in an order that works: ``web`` is made first and deleted last.
COVERED: dict[tuple[str, str], tuple[str, list[str]]] = {
    ("POST", "/v1/vms"): ("create", ["vm", "create", "web", *SIZES]),
    ("GET", "/healthz"): ("health", ["health"]),
    ("GET", "/readyz"): ("readiness", ["health", "--ready"]),
    ("GET", "/v1/whoami"): ("whoami", ["whoami"]),
    ("GET", "/v1/ca/rollover"): ("ca_rollover", ["ca", "show"]),
    ("GET", "/v1/backup"): ("backup", ["backup", "FILE"]),
    ("GET", "/v1/openapi.json"): ("openapi", ["openapi"]),
    ("GET", "/v1/hosts"): ("hosts", ["host", "list", "--state", "ready", "--mode", "active"]),
    ("GET", "/v1/hosts/{id}"): ("host", ["host", "show", "host-a"]),
    ("GET", "/v1/hosts/{id}/history"): ("host_history", ["host", "history", "host-a"]),
    ("GET", "/v1/hosts/{id}/steady"): ("steady", ["host", "config", "host-a"]),
    ("PUT", "/v1/hosts/{id}/steady"): ("set_steady", ["host", "config", "host-a", "--steady", "on", "--reserve", "2"]),
    ("PUT", "/v1/hosts/{id}/mode"): ("set_mode", ["host", "resume", "host-a"]),
    ("GET", "/v1/hosts/{id}/operations/{request_id}"): (
        "operation",
        ["plan", "show", "--host", "host-a", "REQUEST", "--wait-s", "1"],
    ),
    ("GET", "/v1/vms"): ("vms", ["vm", "list", "--host", "host-a", "--state", "running", "--prefix", "w"]),
    ("GET", "/v1/vms/{name}"): ("vm", ["vm", "show", "web"]),
    ("GET", "/v1/vms/{name}/history"): ("vm_history", ["vm", "history", "web", "--from", "2026-01-31T12:00"]),
    ("PATCH", "/v1/vms/{name}/labels"): ("label_vm", ["vm", "label", "web", "env=prod", "old-"]),
    ("PATCH", "/v1/hosts/{id}/labels"): ("label_host", ["host", "label", "host-a", "rack=r7"]),
    ("GET", "/v1/vms/{name}/explain"): ("explain", ["vm", "explain", "web"]),
    ("PUT", "/v1/vms/{name}/target"): ("set_target", ["vm", "target", "web", "--cpu-cores", "0.5"]),
    ("GET", "/v1/operations"): ("operations", ["plan", "list", "--kind", "create", "--since", "2026-01-31T12:00"]),
    ("GET", "/v1/operations/{id}"): ("operation", ["plan", "show", "CREATED"]),
    CANCEL: ("cancel", ["plan", "cancel", "CREATED"]),
    ("GET", "/v1/core-changes"): ("core_changes", ["machine", "changes", "--machine", "web"]),
    ("GET", "/v1/machines"): ("machines", ["machine", "list"]),
    ("GET", "/v1/calibration"): ("calibration", ["machine", "calibration"]),
    ("GET", "/v1/machines/{name}"): ("machine", ["machine", "show", "web"]),
    ("GET", "/v1/events"): ("events", ["event", "list", "--limit", "5", "--kind", "placed"]),
    STREAM: ("follow_events", ["event", "list", "--watch"]),
    ("GET", "/v1/hosts/{id}/templates"): ("templates", ["host", "templates", "host-a"]),
    ("PATCH", "/v1/vms/{name}"): ("resize", ["vm", "resize", "web", "--minimum-cpu-cores", "0.3"]),
    ("POST", "/v1/vms/{name}/stop"): ("stop", ["vm", "stop", "web"]),
    ("POST", "/v1/vms/{name}/start"): ("start", ["vm", "start", "web"]),
    ("POST", "/v1/vms/{name}/migrate"): ("migrate", ["vm", "migrate", "web", "--lose-disk"]),
    ("GET", "/v1/rebalancing"): ("dry_run_rebalancing", ["plan", "rebalance", "--dry-run", "--lasted-s", "60"]),
    ("GET", "/v1/adoptions"): ("adoptable", ["vm", "adopt", "other", "--host", "host-a", "--yes"]),
    ("POST", "/v1/adoptions"): (
        "adopt",
        ["vm", "adopt", "old", "--host", "host-a", "--minimum-cpu-cores", "0.3", "--minimum-memory-mib", "256"],
    ),
    ("POST", "/v1/vms/{name}/release"): ("release", ["vm", "release", "old", "--yes"]),
    ("POST", "/v1/tasks"): ("submit_task", ["task", "submit", "train", "--checkpoint-signal", "USR1", "sleep", "60"]),
    ("GET", "/v1/tasks"): ("tasks", ["task", "list", "--state", "waiting", "--prefix", "t", "--limit", "5"]),
    ("GET", "/v1/tasks/{name}"): ("task", ["task", "show", "train", "--wait-s", "0.1"]),
    OUTPUT: ("task_output", ["task", "output", "train"]),
    ("GET", "/v1/tasks/{name}/explanation"): ("explain_task", ["task", "explain", "train"]),
    ("DELETE", "/v1/tasks/{name}"): ("cancel_task", ["task", "cancel", "train"]),
    ("GET", "/v1/engine"): ("engine", ["task", "engine"]),
    ("GET", "/v1/acquirer"): ("acquirer", ["task", "acquirer"]),
    ("DELETE", "/v1/vms/{name}"): ("delete", ["vm", "delete", "web", "--yes"]),
    ("POST", "/v1/invitations"): ("invite_host", ["host", "invite", "host-new"]),
    ("DELETE", "/v1/invitations"): ("void_invitations", ["host", "uninvite"]),
    ("POST", "/v1/hosts/{id}/revocation"): ("revoke_host", ["host", "revoke", "host-old", "--yes"]),
    ("DELETE", "/v1/hosts/{id}"): ("forget_host", ["host", "forget", "host-old", "--yes"]),
}


async def test_every_route_that_clients_may_ask_is_in_the_table(running: Running) -> None:
    assert running.lab.cluster.server is not None
    routes = {
        (route.method, route.resource.canonical)
        for route in running.lab.cluster.server.app.router.routes()
        if route.method != "HEAD" and route.resource is not None and description_of(route.handler).security != "agent"
    }
    assert routes - PAGE - METRICS - JOINING == set(COVERED)


async def test_every_command_asks_its_route_and_every_client_method_is_there(running: Running, tmp_path: Path) -> None:
    ids = {"CREATED": "", "REQUEST": "", "FILE": str(tmp_path / "backup")}
    for route, (method, words) in COVERED.items():
        assert callable(getattr(ManagerClient, method))
        if route == STREAM:
            continue
        if route == CANCEL:
            argv = [*(ids.get(word, word) for word in words), *running.options()]
            refused = await asyncio.to_thread(CliRunner().invoke, app, argv)
            assert "has ended: placed web" in str(refused.exception)
            assert running.seen["POST", "/v1/operations/{id}/cancel", 409] == 1
            continue
        if route == OUTPUT:
            await running.ebb("wait", "task", "train", "--for", "running")
        before = +running.seen
        failing = int(route == NOWHERE)
        named = " ".join(words[:2]) if " ".join(words[:2]) in DOCUMENTS else words[0]
        printed = await running.ebb(*(ids.get(word, word) for word in words), "-o", "json", exit_code=failing)
        asked = {(verb, path) for (verb, path, status) in running.seen - before if status in (200, 202)}
        assert route in asked, (words, asked)
        answer = json.loads(printed)
        jsonschema.validate(answer, schema_of(named))
        if named == "vm create":
            ids["CREATED"] = answer["request_id"]
        elif named == "host resume":
            ids["REQUEST"] = answer["request_id"]


async def test_every_table_can_be_printed_too(running: Running) -> None:
    await running.ebb("vm", "create", "there", *SIZES)
    created = json.loads(await running.ebb("vm", "create", "table", *SIZES, "-o", "json"))["request_id"]

    async def reported() -> bool:
        return "table" in await running.ebb("machine", "changes")

    await until(reported)
    for words in (
        "vms", "vm show table", "vm explain table", "plan list", f"plan show {created}", "machine changes",
        "machine list", "machine show table", "event list", "task submit table true", "task list", "task show table",
        "task explain table", "task cancel table",
    ):  # fmt: skip
        assert "table" in await running.ebb(*words.split()), words
    for words, said in (
        ("host list", "host-a"), ("host show host-a", "host-a"), ("host templates host-a", "lab"),
        ("health", "the manager runs"), ("machine calibration", "Brier"), ("task engine", "machine"),
    ):  # fmt: skip
        assert said in await running.ebb(*words.split()), words


@pytest.mark.parametrize("words", ["vm delete web", "vm release web", "host forget host-a", "host revoke host-a"])
async def test_nothing_is_destroyed_where_nobody_can_be_asked(running: Running, words: str) -> None:
    before = +running.seen
    result = await asyncio.to_thread(CliRunner().invoke, app, [*words.split(), *running.options()])
    assert isinstance(result.exception, EbbError)
    assert main.exit_code_of(result.exception) == 2
    assert str(result.exception).endswith("give --yes")
    assert not any(
        verb == "DELETE" or "release" in path or "revocation" in path for verb, path, _ in running.seen - before
    )


LISTS = ["vm list", "host list", "task list", "machine list", "machine changes", "plan list", "event list"]


def shape(document: Any) -> Any:
    """A document without its figures, which change while one looks."""
    if isinstance(document, dict):
        return {key: shape(value) for key, value in document.items()}
    if isinstance(document, list):
        return [shape(value) for value in document]
    return "a number" if isinstance(document, float) else document


@pytest.mark.parametrize("words", [*LISTS, "host templates host-a", "vm show there", "host show host-a"])
async def test_lists_and_shows_have_each_form(running: Running, words: str) -> None:
    printed = {form: await running.ebb(*words.split(), "-o", form) for form in Output}
    document = json.loads(printed[Output.JSON])
    assert shape(yaml.safe_load(printed[Output.YAML])) == shape(document)
    table, wide = (printed[form].splitlines() for form in (Output.TABLE, Output.WIDE))
    assert len(table) == len(wide)
    assert len(wide[0].split("  ")) >= len(table[0].split("  "))
    rows = next((rows for rows in document.values() if isinstance(rows, list)), []) if "list" in words else [document]
    assert "list" not in words or len(printed[Output.NAME].splitlines()) == len(rows)


def completing(running: Running, line: str) -> dict[str, str]:
    """What a shell sets that asks for the words by which a line can go on."""
    variables = {"_EBB_COMPLETE": "complete_bash", "COMP_WORDS": f"ebb {line}", "COMP_CWORD": str(len(line.split()))}
    return {**variables, "EBB_MANAGER": running.lab.url, "EBB_TOKEN_FILE": str(running.lab.token_file)}


@pytest.mark.parametrize(
    ("line", "names"), [("explain ta", "table"), ("host drain host-", "host-a"), ("wait task ta", "table")]
)
async def test_a_shell_completes_the_names_of_things(
    running: Running, monkeypatch: pytest.MonkeyPatch, line: str, names: str
) -> None:
    # A busy machine is slow: it is not the time that is looked at.
    monkeypatch.setattr(completion, "LIMIT_S", 60)
    shell = CliRunner(env=completing(running, line))
    result = await asyncio.to_thread(functools.partial(shell.invoke, app, [], prog_name="ebb"))
    assert (result.exit_code, result.stdout.split()) == (0, names.split())


async def test_the_program_completes_a_line_for_a_shell(running: Running) -> None:
    code = "from ebbtide.cli.commands import completion; completion.LIMIT_S = 60; "
    code += "import sys; from ebbtide.cli.main import main; sys.argv[0] = 'ebb'; main()"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code),
        env={**os.environ, **completing(running, "vm show th")},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert out.decode().split() == ["there"]


async def test_a_vm_that_is_shown_says_where_its_size_comes_from_and_what_happened_last(running: Running) -> None:
    await running.ebb("vm", "create", "shown", *SIZES, "--minimum-cpu-cores", "0.3", "--label", "env=prod")
    await running.ebb("vm", "target", "shown", "--cpu-cores", "0.5")
    shown = await running.ebb("vm", "show", "shown")
    for line in (
        r"labels +env=prod", r"size +shown has 0.5 cores, .* less than its nominal size .* since target .*",
        r"can give +.* more", r"guest layer +cpu-offline, .*", r"hypervisor layer +quota, .*",
        r"application layer +nothing usable: see `ebb vm explain`", r"without room +it has 30 s to end its work.*",
        r"last event +20\d\d-.* resized: .*",
    ):  # fmt: skip
        assert re.search(f"^{line}$", shown, re.MULTILINE), (line, shown)
    assert "lacks 0.5 cores now; " in await running.ebb("vm", "list")
    await running.ebb("vm", "delete", "shown", "--yes")


async def test_a_ca_is_taken_before_the_noun_and_behind_the_verb(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    there = ["--manager", "https://127.0.0.1:1", "--token-file", str(tmp_path / "token")]
    for argv in (["--ca", "none.pem", "vm", "list", *there], ["vm", "list", *there, "--ca", "none.pem"]):
        result = await asyncio.to_thread(CliRunner().invoke, app, argv)
        assert "none.pem" in str(result.exception), result.output


async def test_lists_are_chosen_by_labels_that_wide_tables_show(running: Running) -> None:
    await running.ebb("vm", "create", "labelled", *SIZES, "--label", "env=prod", "--label", "tier=web")
    assert (await running.ebb("vm", "list", "-l", "env in (prod),tier", "-o", "name")).split() == ["labelled"]
    assert "labelled" not in await running.ebb("vm", "list", "--selector", "env!=prod", "-o", "name")
    assert "env=prod,tier=web" in await running.ebb("vm", "list", "-o", "wide")
    assert await running.ebb("vm", "label", "labelled", "tier-", "env=test") == "labelled: env=test\n"
    await running.ebb("host", "label", "host-a", "rack=r8")
    assert (await running.ebb("host", "list", "-l", "rack=r8", "-o", "name")).split() == ["host-a"]
    await running.ebb("vm", "delete", "labelled", "--yes")


async def test_declared_labels_are_made_so_and_what_says_nothing_of_them_leaves_them(
    running: Running, tmp_path: Path
) -> None:
    file = tmp_path / "vm.yaml"
    declared = "name: declared\nnominal: {cpu_cores: 1, memory_mib: 512}\n"
    file.write_text(declared + "labels: {env: prod, tier: web}\n")
    await running.ebb("apply", "-f", str(file))
    file.write_text(declared + "labels: {env: test}\n")
    (row,) = json.loads(await running.ebb("apply", "-f", str(file), "-o", "json"))["vms"]
    assert (row["action"], row["operation"]) == ("label", None)
    assert row["differences"] == ["labels.env: prod -> test", "labels.tier: web -> -"]
    file.write_text(declared)
    (row,) = json.loads(await running.ebb("apply", "-f", str(file), "-o", "json"))["vms"]
    assert row["action"] == "none"
    assert json.loads(await running.ebb("vm", "show", "declared", "-o", "json"))["labels"] == {"env": "test"}


async def test_dry_runs_are_printed_and_change_nothing(running: Running) -> None:
    creation = await running.ebb("vm", "create", "new", *SIZES, "--dry-run")
    assert "dry run, nothing is changed: placed new" in creation
    assert "fitness" in creation
    assert "dry run, nothing is changed: deleted there" in await running.ebb("vm", "delete", "there", "--dry-run")
    names = [vm["name"] for vm in json.loads(await running.ebb("vm", "list", "-o", "json"))["vms"]]
    assert "there" in names
    assert "new" not in names


async def test_a_change_of_an_old_version_is_refused_in_one_sentence(running: Running) -> None:
    argv = ["vm", "delete", "there", "--yes", "--version", "0000", *running.options()]
    result = await asyncio.to_thread(CliRunner().invoke, app, argv)
    assert result.exit_code == 1
    assert "there has version" in str(result.exception)


async def test_events_are_followed_until_interrupted(running: Running) -> None:
    argv = [sys.executable, "-m", "ebbtide.cli.main", "event", "list", "--watch", "-o", "json", *running.options()]
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, cwd=Path.cwd())
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            first = json.loads(await process.stdout.readline())
            assert first["id"] >= 1
            await running.ebb("vm", "create", "followed", *SIZES)
            while json.loads(await process.stdout.readline())["vm"] != "followed":
                pass
            assert running.seen["GET", "/v1/events/stream", 200] >= 1
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
