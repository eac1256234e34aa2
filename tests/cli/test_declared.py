"""Declared VMs: files of them, the differences to what is there, and `ebb apply` against a real manager and agent."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from ebbtide.cli import main
from ebbtide.cli.commands import options, wait
from ebbtide.cli.commands.apply import apply
from ebbtide.cli.commands.options import Asking, OperationFailed
from ebbtide.cli.commands.targets import Way, size_to_reach
from ebbtide.cli.declared import change_to, specs_of
from ebbtide.cli.main import app
from ebbtide.cli.schemas import schema_of
from ebbtide.client import ClientError, ManagerBusy, ManagerRefused, ManagerUnreachable
from ebbtide.client.connection import refusal_of
from ebbtide.deflation.allocations import Priority
from ebbtide.errors import EbbError
from ebbtide.messages.common import PartialVector, Vector
from ebbtide.messages.operations import Operation
from ebbtide.messages.vms import ClusterVM, OnPreemption, VMSpec
from tests.manager.plan_events import operation
from tests.manager.with_agent import Lab
from tests.waiting import until

SIZE = {"cpu_cores": 1.0, "memory_mib": 512.0}
BODY = "name: web\nnominal: {cpu_cores: 1, memory_mib: 512}"
WEB: dict[str, Any] = {"name": "web", "nominal": SIZE}


def put(directory: Path, *documents: Any) -> Path:
    file = directory / "vms.yaml"
    file.write_text(yaml.safe_dump_all(documents))
    return file


def there(spec: VMSpec, **changed: Any) -> ClusterVM:
    """The VM that a manager makes of it."""
    minimum = spec.allocation(spec.nominal.vector()).minimum
    made = ClusterVM(
        name=spec.name, host="host-a", state="running", priority=spec.priority, nominal=spec.nominal,
        minimum=Vector.of(minimum), ceiling=spec.ceiling, current=spec.nominal, generation=1, sentence="it runs",
        on_preemption=spec.on_preemption, preemption_notice_s=spec.preemption_notice_s,
    )  # fmt: skip
    return made.model_copy(update=changed)


def test_a_document_a_list_and_json_are_read_alike(tmp_path: Path) -> None:
    other = {**WEB, "name": "db"}
    read = [specs_of(put(tmp_path, WEB, other)), specs_of(put(tmp_path, [WEB, other]))]
    (tmp_path / "vms.json").write_text(json.dumps([WEB, other]))
    read.append(specs_of(tmp_path / "vms.json"))
    assert [[spec.name for spec in specs] for specs in read] == [["web", "db"]] * 3
    assert read[0] == read[1] == read[2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "declares no VM"),
        ("a: [", "is no YAML"),
        ("- 7", "VM 1 must be fields"),
        ("name: web", "VM 1: nominal"),
        ("name: web\nnominal: {cpu_cores: 1, memory_mib: 512}\nminimum: {memory_mib: 600}", "VM 1: minimum.memory_mib"),
        ("name: web\nnominal: {cpu_cores: 1, memory_mib: 512}\n---\nname: db\ncolour: red", "VM 2: "),
        ("\n---\n".join(["{name: web, nominal: {cpu_cores: 1, memory_mib: 512}}"] * 2), "web is declared twice"),
        ("name: web\nlabels: {since: 2026-02-30}", "is no YAML"),
        ("!!python/object/apply:os.getcwd []", "is no YAML"),
        (f"{BODY}\n{BODY}", "found 'name' twice"),
        ("name: web\nnominal: {cpu_cores: 1, memory_mib: 512, cpu_cores: 2}", "found 'cpu_cores' twice"),
        ('{"name": "web", "name": "db", "nominal": {"cpu_cores": 1, "memory_mib": 512}}', "found 'name' twice"),
        ("[" * 5000, "is no YAML: it is nested too deeply"),
        (f"{BODY}\nutility: {{at_least: 0.8}}", "VM 1: utility must have the curve of a component"),
        (f"{BODY}\npriority: fixed\nstart: deflated", "VM 1: start is deflated, but a fixed VM"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_its_vm_and_field(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "vms.yaml"
    file.write_text(text)
    with pytest.raises(EbbError) as caught:
        specs_of(file)
    assert str(file) in str(caught.value)
    assert said in str(caught.value)


def test_keys_may_be_merged_and_overridden(tmp_path: Path) -> None:
    file = tmp_path / "vms.yaml"
    size = "{<<: &least {cpu_cores: 1, memory_mib: 512}, memory_mib: 600}"
    file.write_text(
        f"- {{name: a, nominal: &more {size}}}\n"
        "- &b {name: b, nominal: {<<: *more, memory_mib: 700}, minimum: *least}\n"
        "- {<<: *b, name: c}\n"
    )
    assert [(spec.name, spec.nominal.memory_mib) for spec in specs_of(file)] == [("a", 600), ("b", 700), ("c", 700)]


def test_standard_input_that_is_closed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(EbbError, match="standard input is closed"):
        specs_of(Path("-"))


@pytest.mark.parametrize("spec", [
    VMSpec.model_validate(WEB),
    VMSpec.model_validate({**WEB, "minimum": {"cpu_cores": 0.5, "memory_mib": 300}}),
    VMSpec.model_validate({**WEB, "minimum_share": 0.5}),
    VMSpec.model_validate({**WEB, "priority": "fixed"}),
    VMSpec.model_validate({**WEB, "priority": "harvest", "ceiling": {"cpu_cores": 2, "memory_mib": 1024}}),
])  # fmt: skip
def test_a_vm_that_was_made_of_its_declaration_does_not_differ(spec: VMSpec) -> None:
    assert change_to(spec, there(spec)).action == "none"


def test_what_differs_is_said_and_asked_for_and_nothing_else() -> None:
    spec = VMSpec.model_validate({**WEB, "minimum": {"cpu_cores": 0.5, "memory_mib": 300}})
    change = change_to(spec, there(spec, nominal=Vector(cpu_cores=2.0, memory_mib=512.0)))
    assert (change.action, list(change.fields or ())) == ("resize", ["nominal", "minimum"])
    assert change.sentences == ("nominal: 2 cores, 512 MiB -> 1 cores, 512 MiB",)
    change = change_to(spec, there(spec, on_preemption=OnPreemption.DELETE))
    assert change.fields == {"on_preemption": OnPreemption.STOP}
    was = there(spec, priority=Priority.HARVEST, ceiling=Vector(cpu_cores=2.0, memory_mib=1024.0))
    change = change_to(spec, was)
    assert change.fields == {"priority": Priority.DEFLATABLE}
    assert change.sentences[0] == "ceiling: 2 cores, 1024 MiB -> -"


def test_what_comes_with_the_next_start_is_not_asked_for_again() -> None:
    spec = VMSpec.model_validate({**WEB, "nominal": {"cpu_cores": 4, "memory_mib": 512}})
    was = there(VMSpec.model_validate(WEB), at_next_start=spec)
    assert change_to(spec, was).action == "none"
    assert change_to(VMSpec.model_validate(WEB), was).action == "resize"


def test_one_that_no_host_took_is_created() -> None:
    spec = VMSpec.model_validate(WEB)
    for declared in (spec, VMSpec.model_validate({**WEB, "nominal": {"cpu_cores": 1, "memory_mib": 256}})):
        assert change_to(declared, there(spec, state="failed", host=None)).action == "create"
    assert change_to(spec, there(spec, state="failed")).action == "none"


async def ebb(lab: Lab, *words: str) -> Any:
    argv = [*words, "--manager", lab.url, "--token-file", str(lab.token_file)]
    return await asyncio.to_thread(CliRunner().invoke, app, argv)


async def test_apply_creates_changes_and_then_finds_nothing_to_do(lab: Lab, tmp_path: Path) -> None:
    changed = {**WEB, "minimum": {"cpu_cores": 0.5, "memory_mib": 300}}
    for declared, action in ((WEB, "create"), (changed, "resize"), (changed, "none")):
        file = put(tmp_path, declared)
        foretold = await ebb(lab, "apply", "-f", str(file), "--dry-run", "-o", "json")
        assert json.loads(foretold.stdout)["vms"][0]["operation"] is None
        done = await ebb(lab, "apply", "-f", str(file), "-o", "json")
        assert done.exit_code == 0, (done.output, done.exception)
        for document in (json.loads(foretold.stdout), json.loads(done.stdout)):
            jsonschema.validate(document, schema_of("apply"))
            assert document["vms"][0]["action"] == action
    found = lab.agent.host.vms["web"].intent.spec
    assert (found.nominal, found.minimum) == (Vector(**SIZE), Vector(cpu_cores=0.5, memory_mib=300.0))


async def test_a_minimum_that_was_a_share_is_the_declared_one_after_the_nominal_size_has_changed(
    lab: Lab, tmp_path: Path
) -> None:
    minimum = {"cpu_cores": 0.5, "memory_mib": 256.0}
    larger = {"name": "web", "nominal": {"cpu_cores": 2.0, "memory_mib": 1024.0}, "minimum": minimum}
    for declared in ({**WEB, "minimum_share": 0.5}, larger):
        done = await ebb(lab, "apply", "-f", str(put(tmp_path, declared)))
        assert done.exit_code == 0, (done.output, done.exception)
    found = ClusterVM.model_validate(await lab.cluster.get("/v1/vms/web"))
    spec = found.at_next_start or found
    assert (spec.nominal.cpu_cores, spec.minimum) == (2.0, Vector(**minimum))


async def test_a_vm_that_was_changed_after_it_was_looked_at_is_left_as_it_is(lab: Lab, tmp_path: Path) -> None:
    await ebb(lab, "apply", "-f", str(put(tmp_path, WEB)))
    wanted = {**WEB, "labels": {"env": "prod"}, "minimum": {"cpu_cores": 0.5, "memory_mib": 300}}
    file = put(tmp_path, {**WEB, "name": "db"}, wanted)
    assert lab.cluster.manager is not None
    manager = lab.cluster.manager
    assert await manager.hosts.locks.hold("another plan", "host-a")
    applied = asyncio.create_task(ebb(lab, "apply", "-f", str(file)), name="apply")
    await until(lambda: manager.operations.under_way()["create"])
    labelled = await ebb(lab, "vm", "label", "web", "env=test")
    assert labelled.exit_code == 0, labelled.output
    manager.hosts.locks.release("another plan")
    done = await applied
    assert str(done.exception).startswith("1 of 2 VMs are not as declared: web: it has changed since "), done.output
    found = await lab.cluster.get("/v1/vms/web")
    assert (found["labels"], found["minimum"]["cpu_cores"]) == ({"env": "test"}, 0.1)
    # Looked at again, it becomes what is declared, labels and all.
    assert (await ebb(lab, "apply", "-f", str(file))).exit_code == 0
    found = await lab.cluster.get("/v1/vms/web")
    assert (found["labels"], found["minimum"]["cpu_cores"]) == ({"env": "prod"}, 0.5)


@pytest.mark.parametrize(
    ("by_another", "sold"),
    [({}, ["2"]), ({"on_preemption": OnPreemption.DELETE}, []), ({"labels": {"env": "test"}}, [])],
)
def test_labels_whose_answer_was_lost_are_known_as_set_and_what_another_has_changed_is_left_as_it_is(
    by_another: dict[str, Any], sold: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Client:
        def __init__(self) -> None:
            self.found = there(VMSpec.model_validate(WEB), version="1")
            self.sold: list[str | None] = []

        async def vms(self) -> list[ClusterVM]:
            return [self.found]

        async def vm(self, name: str) -> ClusterVM:
            return self.found

        async def label_vm(self, name: str, labels: dict[str, str], *, version: str | None) -> ClusterVM:
            if version != self.found.version:
                raise ManagerRefused(412, "web has version 2 by now")
            self.found = self.found.model_copy(update={"version": "2", "labels": labels, **by_another})
            raise ManagerUnreachable("no manager answers", was_sent=True, may_be_done=True)

        async def resize(self, name: str, *, version: str | None, **fields: Any) -> Operation:
            self.sold.append(version)
            return operation("resize")

        async def wait(self, begun: Operation, **_: Any) -> Operation:
            return begun

    client = Client()
    monkeypatch.setattr(Asking, "ask", lambda to, question: asyncio.run(question(client)))
    monkeypatch.setattr(options, "AWAY_LOOK_S", 0.0)
    file = put(tmp_path, {**WEB, "labels": {"env": "prod"}, "minimum": {"cpu_cores": 0.5, "memory_mib": 300}})
    if sold:
        apply(file, to=Asking())
    else:
        with pytest.raises(OperationFailed, match="web: it has changed since the differences were shown"):
            apply(file, to=Asking())
    assert client.sold == sold


async def test_one_that_fails_keeps_none_of_the_others_from_being_done(lab: Lab, tmp_path: Path) -> None:
    huge = {"name": "huge", "nominal": {"cpu_cores": 200, "memory_mib": 512}}
    result = await ebb(lab, "apply", "-f", str(put(tmp_path, huge, WEB)))
    assert main.exit_code_of(result.exception) == 1
    assert str(result.exception).startswith("1 of 2 VMs are not as declared: huge: ")
    assert "web" in lab.agent.host.vms
    again = await ebb(lab, "apply", "-f", str(put(tmp_path, huge, WEB)), "-o", "json")
    jsonschema.validate(document := json.loads(again.stdout), schema_of("apply"))
    errors = {row["name"]: row["error"] for row in document["vms"]}
    assert errors["web"] is None
    assert f"huge: {errors['huge']}" in str(again.exception)


async def test_a_dry_run_of_what_would_be_refused_ends_as_the_command_would(lab: Lab) -> None:
    huge = ("vm", "create", "huge", "--cpu-cores", "200", "--memory-mib", "512", "--dry-run")
    told, document = await ebb(lab, *huge), await ebb(lab, *huge, "-o", "json")
    for foretold in (told, document):
        assert main.exit_code_of(foretold.exception) == 1
        assert str(foretold.exception).startswith("dry run, nothing is changed: refused huge"), foretold.exception
    assert "refused" not in told.stdout, "it is said once"
    assert json.loads(document.stdout)["would"] == "failed"


async def test_create_takes_its_vm_of_a_file_and_no_second_word_about_it(lab: Lab, tmp_path: Path) -> None:
    file = str(put(tmp_path, WEB))
    assert (await ebb(lab, "vm", "create", "-f", file, "--cpu-cores", "2")).exit_code == 2
    for words in (["db", "-f", file], ["-f", str(put(tmp_path / ".", WEB, {**WEB, "name": "db"}))]):
        result = await ebb(lab, "vm", "create", *words)
        assert main.exit_code_of(result.exception) == 2, result.output
    assert not lab.agent.host.vms
    done = await ebb(lab, "vm", "create", "web", "-f", str(put(tmp_path, WEB)))
    assert done.exit_code == 0, done.output
    assert "web" in lab.agent.host.vms


async def test_shrink_and_grow_go_one_way_only_and_grow_ends_at_nominal(lab: Lab) -> None:
    await ebb(lab, "vm", "create", "web", "--cpu-cores", "1", "--memory-mib", "512")
    up = await ebb(lab, "vm", "shrink", "web", "--memory-mib", "600")
    assert "target.memory_mib: web has 512, so 600 is for `ebb vm grow web`" in str(up.exception)
    for words, cores in ((["shrink", "web", "--cpu-cores", "0.5"], 0.5), (["grow", "web"], 1.0)):
        done = await ebb(lab, "vm", *words)
        assert done.exit_code == 0, (done.output, done.exception)
        assert lab.agent.host.vms["web"].intent.committed.cpu_cores == cores
    down = await ebb(lab, "vm", "grow", "web", "--cpu-cores", "0.5")
    assert "so 0.5 is for `ebb vm shrink web`" in str(down.exception)


async def test_of_a_vm_that_is_off_the_manager_says_why_it_is_brought_to_no_size(lab: Lab) -> None:
    await ebb(lab, "vm", "create", "web", "--cpu-cores", "1", "--memory-mib", "512")
    off = await ebb(lab, "vm", "stop", "web")
    assert off.exit_code == 0, (off.output, off.exception)
    refused = await ebb(lab, "vm", "shrink", "web", "--memory-mib", "400")
    assert "web is stopped, not running" in str(refused.exception)


@pytest.mark.parametrize(("word", "kept"), [("target", True), ("shrink", False)])
async def test_only_a_size_that_is_to_go_one_way_depends_on_the_one_that_was_looked_at(
    lab: Lab, word: str, kept: bool
) -> None:
    await ebb(lab, "vm", "create", "web", "--cpu-cores", "1", "--memory-mib", "512")
    assert lab.cluster.manager is not None
    record, manager = lab.agent.host.vms["web"].record, lab.cluster.manager
    assert await manager.hosts.locks.hold("another plan", "host-a")
    asked = asyncio.create_task(ebb(lab, "vm", word, "web", "--cpu-cores", "0.5"), name="target")
    await until(lambda: bool(manager.operations.plans_at("host-a")))
    # As a reclaim that came between leaves it.
    await record.store(generation=record.intent.generation + 1)
    manager.hosts.locks.release("another plan")
    done = await asked
    assert (done.exit_code == 0) is kept, (done.output, done.exception)
    assert record.intent.committed.cpu_cores == (0.5 if kept else 1.0)


@pytest.mark.parametrize("way", Way)
def test_a_target_names_nothing_that_its_user_has_not_named(way: Way) -> None:
    assert size_to_reach(there(VMSpec.model_validate(WEB)), {"cpu_cores": 1.0}, way) == PartialVector(cpu_cores=1.0)


async def test_a_creation_that_was_refused_is_asked_for_again(lab: Lab, tmp_path: Path) -> None:
    large = {"name": "late", "nominal": {"cpu_cores": 1, "memory_mib": 900_000}}
    for _ in range(2):
        refused = await ebb(lab, "apply", "-f", str(put(tmp_path, large)))
        assert main.exit_code_of(refused.exception) == 1, refused.output
    done = await ebb(lab, "apply", "-f", str(put(tmp_path, {**WEB, "name": "late"})))
    assert done.exit_code == 0, (done.output, done.exception)
    assert "late" in lab.agent.host.vms


async def test_wait_ends_when_it_is_so_and_says_when_it_is_not(lab: Lab) -> None:
    await ebb(lab, "vm", "create", "web", "--cpu-cores", "1", "--memory-mib", "512")
    for wanted in ("running", "nominal"):
        done = await ebb(lab, "wait", "vm", "web", "--for", wanted, "-o", "json")
        assert done.exit_code == 0, (done.output, done.exception)
        jsonschema.validate(json.loads(done.stdout), schema_of("wait vm"))
    assert (await ebb(lab, "wait", "vm", "web", "--for", "running", "--timeout-s", "0")).exit_code == 0
    late = await ebb(lab, "wait", "vm", "web", "--for", "deflated", "--timeout-s", "0")
    assert str(late.exception).startswith("web is not deflated after 0 s: ")
    assert (await ebb(lab, "wait", "host", "host-a", "--for", "ready")).stdout == "host-a is ready\n"
    await ebb(lab, "vm", "delete", "web", "--yes")
    gone = await ebb(lab, "wait", "vm", "web", "--for", "gone", "-o", "json")
    assert json.loads(gone.stdout) == {"name": "web", "state": "gone"}


@pytest.mark.parametrize("wrong", ["/v1", "/nothing"])
async def test_an_address_without_such_a_path_does_not_say_that_a_vm_is_gone(lab: Lab, wrong: str) -> None:
    await ebb(lab, "vm", "create", "web", "--cpu-cores", "1", "--memory-mib", "512")
    for words in (("wait", "vm", "web", "--for", "gone"), ("vm", "show", "web")):
        argv = [*words, "--manager", lab.url + wrong, "--token-file", str(lab.token_file)]
        result = await asyncio.to_thread(CliRunner().invoke, app, argv)
        assert isinstance(result.exception, ManagerRefused)
        assert main.exit_code_of(result.exception) == 1


@pytest.mark.parametrize("content", [None, {"detail": "Not Found"}, "no"])
def test_a_404_that_is_no_managers_names_nothing_that_is_missing(content: Any) -> None:
    assert main.exit_code_of(refusal_of(404, content)) == 1
    assert main.exit_code_of(refusal_of(404, {"error": "web: there is no such VM"})) == 3


class Told(Asking):
    """Conversations with nobody."""

    def ask(self, question: Any) -> Any:
        return asyncio.run(question(None))


@pytest.mark.parametrize("away", [ManagerUnreachable("no manager answers"), ManagerBusy(429, "no manager answers")])
def test_wait_goes_on_over_a_manager_that_is_away_for_a_while(
    away: ClientError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wait, "LOOK_S", 0.0)
    spec = VMSpec.model_validate(WEB)

    def answers(*found: Any) -> Any:
        left = iter(found)

        async def question(client: Any) -> Any:
            answer = next(left)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return lambda: wait._wait(
            Told(), "web", wait.OfVM.RUNNING, 60.0, question, lambda vm: wait.is_vm(vm, wait.OfVM.RUNNING)
        )

    answers(there(spec, state="placing"), away, away, there(spec, state="placing"), there(spec))()
    said = capsys.readouterr()
    assert said.out == "web is running\n"
    assert said.err.count("no manager answers") == 1
    assert said.err.count("waiting until web is running: it is placing") == 2
    with pytest.raises(type(away)):
        answers(away)()


@pytest.mark.parametrize("wanted", [wanted for wanted in wait.OfVM if wanted is not wait.OfVM.GONE])
def test_a_vm_that_has_failed_is_waited_for_no_more(monkeypatch: pytest.MonkeyPatch, wanted: wait.OfVM) -> None:
    class Client:
        async def vm(self, name: str) -> ClusterVM:
            return there(VMSpec.model_validate(WEB), state="failed", sentence="no host had room")

    monkeypatch.setattr(Told, "ask", lambda self, question: asyncio.run(question(Client())))
    with pytest.raises(OperationFailed, match="web is failed: no host had room"):
        wait.vm("web", wanted, 0.0, to=Told())


@pytest.mark.parametrize("digits", [{}, {"minimum_share": {"cpu_cores": 1 / 3, "memory_mib": 0.6}}], ids=["", "share"])
def test_a_size_of_many_digits_is_reached_and_is_as_declared(digits: dict[str, Any]) -> None:
    spec = VMSpec.model_validate({**WEB, "nominal": {"cpu_cores": 1 / 3, "memory_mib": 1000 / 3}, **digits})
    assert spec.nominal == Vector(cpu_cores=0.3333, memory_mib=333.333333)
    found = there(spec)
    assert change_to(spec, found).action == "none"
    rounded = found.model_copy(update={"current": Vector(cpu_cores=0.3333, memory_mib=333.3333325)})
    assert wait.is_vm(rounded, wait.OfVM.NOMINAL)
    assert not wait.is_vm(rounded, wait.OfVM.DEFLATED)


@pytest.mark.parametrize(
    ("state", "said"),
    [("deleting", "it is being deleted: apply again once it is gone"), ("failed", "it has failed: it runs")],
)
def test_a_vm_that_cannot_become_what_is_declared_now_is_a_failure(
    state: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = VMSpec.model_validate(WEB)

    class Client:
        async def vms(self) -> list[ClusterVM]:
            return [there(spec, state=state)]

    monkeypatch.setattr(Asking, "ask", lambda to, question: asyncio.run(question(Client())))
    with pytest.raises(OperationFailed, match=f"VMs are not as declared: web: {said}"):
        apply(put(tmp_path, WEB), to=Asking())
    with pytest.raises(OperationFailed, match=f"VMs would not be as declared: web: {said}"):
        apply(put(tmp_path, WEB), dry_run=True, to=Asking())
    assert "not as declared" in capsys.readouterr().out


def test_a_vm_that_is_being_placed_is_said_to_be() -> None:
    spec = VMSpec.model_validate(WEB)
    assert change_to(spec, there(spec, state="placing")).under_way == "it is being placed"
