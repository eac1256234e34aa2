"""`ebb vm explain`, the modes' commands and dry runs, against a real manager with a real host agent behind it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import sys
from typing import Any

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from ebbtide.cli import main
from ebbtide.cli.commands.explain import print_explanation
from ebbtide.cli.main import app
from ebbtide.deflation.cascade.mechanisms import LAYER_OF, Finding, Mechanism
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.modes import HostMode
from ebbtide.errors import EbbError
from ebbtide.messages.common import Vector
from ebbtide.messages.explanations import Explanation, FindingRow, PastResize, VMExplanation
from ebbtide.messages.operations import VMOutcome
from ebbtide.messages.vms import NotYetDeflatable, OnPreemption, Preempted, VMStatus
from hostagent.control import reconciler
from hostagent.mechanisms import fixes
from hostagent.mechanisms.layers import HostFacts, examine
from hostagent.operations import mode_commands
from hostagent.vm import guest_link
from tests.manager.with_agent import Lab
from tests.waiting import until

#: A domain that has nothing, on a host that has nothing and forbids nothing: every mechanism but bandwidth is blocked.
BARE = "<domain type='qemu' id='1'><name>ebb-host-a.low-1</name><memory unit='MiB'>1000</memory><vcpu>1</vcpu></domain>"
NOTHING = HostFacts(0, 0, cgroups="none", acpi_unplug="", qemu_version=7_002_000, cold_first=True)


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler, "SURVEY_S", 0.2)
    monkeypatch.setattr(guest_link, "RETRY_S", 0.2)
    monkeypatch.setattr(mode_commands, "KEEP_S", 0.2)


async def ebb(lab: Lab, *words: str) -> tuple[int, str, str]:
    """The command within this process, which saves the start of an interpreter: (exit code, stdout, stderr)."""
    argv = [*words, "--manager", lab.url, "--token-file", str(lab.token_file)]
    result = await asyncio.to_thread(CliRunner(env={"COLUMNS": "100"}).invoke, app, argv)
    match result.exception:
        case EbbError() as error:
            return main.exit_code_of(error), result.stdout, f"{result.stderr}error: {error}\n"
        case None | SystemExit():
            return result.exit_code, result.stdout, result.stderr
        case error:
            raise error


async def program(lab: Lab, *words: str) -> tuple[int, str, str]:
    """The same in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ebbtide.cli.main", *words, "--manager", lab.url, "--token-file", str(lab.token_file),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, "COLUMNS": "100"},
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def as_rows(findings: tuple[Finding, ...]) -> list[list[Any]]:
    return [[found.mechanism.value, found.available, found.reason, found.fix] for found in findings]


def row_of(mechanism: Mechanism, reason: str) -> str:
    return rf"\n{LAYER_OF[mechanism].value} +{mechanism.value} +BLOCKED +{re.escape(reason)} *\n"


# --- explain ---------------------------------------------------------------------------------------------------------


async def test_the_sentence_stands_first_then_sizes_layers_ledger_decisions_and_events(lab: Lab) -> None:
    domain = await lab.create("low-1")
    domain.applications = {"memcached": 200.0}
    code, out, err = await ebb(lab, "vm", "target", "low-1", "--cpu-cores", "1.5", "--memory-mib", "800")
    assert code == 0, err
    code, out, err = await ebb(lab, "vm", "explain", "low-1")
    assert (code, err) == (0, "")
    assert out.startswith(
        "low-1 has 1.5 cores, 800 MiB, which is 1.5 cores, 200 MiB less than its nominal size (3 cores, 1000 MiB), "
        "since target "
    )
    assert re.search(r"\nsizes:\nwhat +size *\nnominal +3 cores, 1000 MiB *\nminimum +0.5 cores, 300 MiB *\n", out)
    assert re.search(r"\ncommitted +1.5 cores, 800 MiB *\nwhat it holds now +1.5 cores, 800 MiB *\n", out)
    assert re.search(r"\ncould still be taken +1 cores, 500 MiB *\n", out)
    available = "memcached (200 MiB resident); what it gives is known when it is asked"
    assert re.search(rf"\napplication +application +available +{re.escape(available)} *\n", out)
    assert re.search(r"\nlast resize \(.*\):\nlayer +resource +asked +promised +verified +seconds +reason *\n", out)
    assert re.search(r"\nguest +memory_mib +200 +200 +200 ", out)
    assert re.search(
        r"\ndecisions:\nat +kind +what and why *\n[-\d]+ [:\d]+ +admit +low-1 runs with 3 cores, 1000 MiB", out
    )
    assert re.search(r"\nevents:\nat +kind +what happened *\n[-\d]+ [:\d]+ +placed +placed low-1 ", out)


async def test_each_blocked_layer_is_named_with_its_reason_and_its_fix_word_by_word(lab: Lab) -> None:
    domain = await lab.create("low-1")
    findings = examine(BARE, NOTHING)
    domain.findings = as_rows(findings)
    code, out, err = await ebb(lab, "vm", "explain", "low-1")
    assert (code, err) == (0, "")
    blocked = [found for found in findings if not found.available]
    assert {found.mechanism for found in blocked} >= set(Mechanism) - {Mechanism.DISK, Mechanism.NETWORK}
    assert "\nTo put it right; XML counts from the VM's next start:\n" in out
    for before, found in itertools.pairwise([None, *blocked]):
        assert found is not None
        # A sentence that stands in the row above is not repeated.
        said = '"' if before is not None and before.reason == found.reason else found.reason
        assert re.search(row_of(found.mechanism, said), out), found.mechanism
        for text in filter(None, found.fix.split("\n\n")):
            assert f"]\n{text}\n" in out
            assert out.count(text) == 1
    facts = fixes.DomainFacts("ebb-host-a.low-1", 1, 1000)
    assert f"cpu-offline, virtio-mem, dimm, memory-limit]\n{fixes.channel(facts)}\n" in out


@pytest.mark.parametrize("mechanism", Mechanism)
async def test_each_layer_alone_blocked_prints_its_fix_and_no_other(
    lab: Lab, mechanism: Mechanism, capsys: pytest.CaptureFixture[str]
) -> None:
    domain = await lab.create("low-1")
    domain.applications = {"memcached": 200.0}
    fix = (
        f"Give it {mechanism.value}:\n  XML:\n    <{mechanism.value}/>\n  shell:\n    virsh edit '[{mechanism.value}]'"
    )
    domain.findings = [[other.value, True, "it works", ""] for other in Mechanism]
    domain.findings[list(Mechanism).index(mechanism)] = [mechanism.value, False, "the [domain] has none", fix]
    answer = await lab.cluster.get("/v1/vms/low-1/explain")
    capsys.readouterr()
    print_explanation("low-1", VMExplanation.model_validate(answer))
    out = capsys.readouterr().out
    assert re.search(row_of(mechanism, "the [domain] has none"), out)
    assert out.count("BLOCKED") == 1
    told = f"\nTo put it right; XML counts from the VM's next start:\n\n[{mechanism.value}]\n{fix}\n\ndecisions:\n"
    assert told in out


async def test_of_a_guest_that_boots_it_is_told_when_its_memory_can_be_taken(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    await lab.create("low-1")
    found = VMExplanation.model_validate(await lab.cluster.get("/v1/vms/low-1/explain"))
    assert found.explanation is not None
    soon = NotYetDeflatable(memory_mib=700.0, in_s=12.0, why="booting")
    vm = found.explanation.vm.model_copy(update={"not_yet": soon})
    told = found.model_copy(update={"explanation": found.explanation.model_copy(update={"vm": vm})})
    capsys.readouterr()
    print_explanation("low-1", told)
    assert "\nit is booting: 700 MiB can be taken later, probably in 12 s\n" in capsys.readouterr().out


async def test_where_nothing_is_blocked_nothing_is_to_be_put_right(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    domain = await lab.create("low-1")
    domain.applications = {"memcached": 200.0}
    domain.findings = [[mechanism.value, True, "it works", "could be better"] for mechanism in Mechanism]
    answer = await lab.cluster.get("/v1/vms/low-1/explain")
    capsys.readouterr()
    print_explanation("low-1", VMExplanation.model_validate(answer))
    out = capsys.readouterr().out
    assert "BLOCKED" not in out
    assert "To put it right" not in out


async def test_as_json_it_is_the_body_of_the_api(lab: Lab) -> None:
    await lab.create("low-1")
    code, out, _ = await ebb(lab, "vm", "explain", "low-1", "-o", "json")
    assert code == 0
    found = VMExplanation.model_validate(json.loads(out))
    assert found.explanation is not None
    assert found.explanation.sentence.startswith("low-1 has its nominal size")


async def test_an_unknown_vm_is_one_sentence(lab: Lab) -> None:
    code, out, err = await program(lab, "vm", "explain", "nobody")
    assert (code, out, err) == (3, "", "error: there is no VM named nobody\n")


async def test_of_a_host_that_does_not_answer_what_the_manager_knows_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = VMExplanation(
        host="host-a", state="running", sentence="placed low-1 on host-a in free room", explanation=None,
        unreachable="host-a cannot be reached (ClientConnectorError)",
    )  # fmt: skip
    print_explanation("low-1", found)
    assert capsys.readouterr().out == (
        "low-1 is running: placed low-1 on host-a in free room\n"
        "its host's own word cannot be had: host-a cannot be reached (ClientConnectorError)\n"
        "\nwhere there is no room for it: it has 30 s to end its work, is stopped, keeps its disk, "
        "and is started again when there is room\n"
    )


WAITS = Preempted(
    reason="minimum",
    at=0.0,
    position=1,
    waits_for=Vector(cpu_cores=1.0),
    sentence="1st in line on a, waits for 1 cores",
)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"on_preemption": OnPreemption.DELETE}, "it is deleted with its disk"),
        ({"preempted": WAITS}, "(reason minimum) and keeps its disk; 1st in line on a, waits for 1 cores"),
    ],
    ids=["stateless", "waiting"],
)
async def test_what_preemption_means_for_a_vm_is_told(
    capsys: pytest.CaptureFixture[str], fields: dict[str, Any], said: str
) -> None:
    print_explanation("low-1", VMExplanation(host="a", state="running", sentence="", explanation=None, **fields))
    assert said in capsys.readouterr().out


# --- dry run ---------------------------------------------------------------------------------------------------------


async def test_a_dry_target_is_told_and_nothing_changes(lab: Lab) -> None:
    await lab.create("low-1")
    code, out, err = await ebb(lab, "vm", "target", "low-1", "--cpu-cores", "1.5", "--dry-run")
    assert (code, err) == (0, "")
    assert out.startswith(
        "dry run, nothing is changed: low-1 would take 1.5 cores of 1.5 cores (guest 1 cores; hypervisor 0.5 cores)\n"
    )
    assert re.search(r"\nlow-1 +guest +cpu_cores +1.5 +1 ", out)
    assert lab.agent.host.vms["low-1"].intent.committed.cpu_cores == 3.0
    code, out, _ = await ebb(lab, "vm", "target", "low-1", "--cpu-cores", "1.5", "--dry-run", "-o", "json")
    assert json.loads(out)["vms"][0]["expected"]["cpu_cores"] == 1.5


# --- modes -----------------------------------------------------------------------------------------------------------


async def test_pause_drain_off_and_resume_end_with_their_sentence(lab: Lab) -> None:
    await lab.create("low-1")
    code, _, err = await ebb(lab, "vm", "target", "low-1", "--cpu-cores", "1.5")
    assert code == 0, err
    for word, sentence in [
        ("pause", "host-a is paused: no VM is created and no size is changed until it is resumed (new disks)\n"),
        ("resume", "host-a is active: it takes commands, repairs drift and finishes what was begun (new disks)\n"),
        ("undeflate", "host-a is off: what was taken is given back as far as there is room, then its VMs are left "
                "alone (new disks); all 1 VMs have their nominal sizes\n"),
        ("drain", "host-a is draining: it takes no new VM, and its VMs grow as room appears (new disks)\n"),
    ]:  # fmt: skip
        code, out, err = await ebb(lab, "host", word, "host-a", "--reason", "new disks")
        assert code == 0, err
        assert out.startswith(sentence), word
        assert "host-a is to be " in err

    async def listed() -> bool:
        _, out, _ = await ebb(lab, "host", "list")
        return re.search(r"\nhost-a +ready +draining \(new disks\) ", out) is not None

    # With the host's next report.
    await until(listed)
    code, out, err = await ebb(lab, "vm", "explain", "low-1")
    assert "\nits host host-a is draining (new disks)\n" in out


async def test_off_that_cannot_undo_all_ends_with_1_and_says_what_is_left(lab: Lab) -> None:
    await lab.create("low-1")
    code, _, err = await ebb(lab, "vm", "target", "low-1", "--memory-mib", "600")
    assert code == 0, err
    lab.agent.host.memory_available_mib = lambda: 0.0
    code, out, err = await program(lab, "host", "undeflate", "host-a", "-o", "json")
    assert code == 1
    operation = json.loads(out)
    assert operation["state"] == "partial"
    assert "low-1 lacks 400 MiB, since the host has 0 MiB of memory free" in operation["sentence"]
    assert "the operation ended partial" in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["host", "pause", "nowhere"], "error: there is no host nowhere\n"),
        (["host", "pause", "No/Host"], "error: 'No/Host' is no name of a host: lower-case letters, digits and "
         "hyphens, 1 to 40\n"),
        (["host", "undeflate", "host-a", "--reason", "x" * 201],
         "error: reason: string should have at most 200 characters\n"),
    ],
)  # fmt: skip
async def test_a_wrong_host_or_reason_is_one_sentence(lab: Lab, words: list[str], sentence: str) -> None:
    code, out, err = await ebb(lab, *words)
    assert (code, out) == (3 if "nowhere" in words else 1, "")
    assert err.endswith(sentence)
    assert lab.agent.host.modes.mode == "active"


def unchecked(model: type[BaseModel]) -> Any:
    """Makes a body of what is given, without a look at it."""
    return model.model_construct


def test_no_word_of_a_host_reaches_the_terminal_as_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    said = "\x1b]0;owned\x07\x1b[2J\u202e"
    why = f"host-a answered 503: {said}"
    told = VMExplanation(host="host-a", state="running", sentence=said, explanation=None, unreachable=why)
    print_explanation("low-1", told)
    size = Vector(cpu_cores=1.0, memory_mib=500.0)
    status = unchecked(VMStatus)(
        name="low-1", host=said, nominal=size, minimum=size, ceiling=None, current=size, throttled_share=None,
        pressure=said, at_next_start=None,
    )  # fmt: skip
    finding = FindingRow(mechanism=Mechanism.BALLOON, layer=Layer.GUEST, available=False, reason=said, fix=said)
    outcome = unchecked(VMOutcome)(ledger=(), sentence=said)
    past = unchecked(PastResize)(at=0.0, request_id=said, outcome=outcome)
    explained = unchecked(Explanation)(
        vm=status, sentence=said, bound=None, deflatable=Vector(), mode=HostMode.PAUSED, mode_reason=said,
        findings=(finding,), resizes=(past,), decisions=(),
    )  # fmt: skip
    print_explanation("low-1", unchecked(VMExplanation)(explanation=explained, events=()))
    out = capsys.readouterr().out
    assert "owned" in out
    assert all(c.isprintable() or c == "\n" for c in out)
