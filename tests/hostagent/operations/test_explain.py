"""Why a VM has its size, what is blocked and what would help, and the history over REST."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.deflation.cascade.mechanisms import LAYER_OF, Mechanism
from ebbtide.deflation.ledger import Layer
from ebbtide.messages.common import Vector
from ebbtide.messages.explanations import DecisionPage, Explanation, PastResize
from ebbtide.messages.operations import VMOutcome
from ebbtide.messages.vms import VMSpec, VMState
from hostagent.operations.explain import NO_APPLICATION, REGISTER, why_this_size
from hostagent.state.intents import Cause, Intent, Phase
from hostagent.vm.guest_link import SILENT
from hostagent.vm.host import Host
from tests.hostagent.conftest import Client, Command, low_vm
from tests.hostagent.doing import host_idle, reclaim
from tests.hostagent.world import Domain, World
from tests.waiting import until

START_AGENT = """\
Start the guest agent inside ebb-host-a.low-1:
  shell:
    systemctl enable --now ebb-guestagent"""


@pytest.fixture
async def domain(command: Command, host: Host, world: World) -> Domain:
    """low-1 of 3 cores and 1024 MiB, its guest connected, with a memcached of 200 MiB."""
    operation = await command("POST", "/v1/vms", {"request_id": "c-low-1", "vm": low_vm("low-1")})
    assert operation.state == "done", operation.sentence
    await until(lambda: host.vms["low-1"].link.connected)
    await host_idle(host)
    (made,) = world.domains.values()
    made.applications = {"memcached": 200.0}
    return made


async def explain(client: Client, name: str = "low-1") -> Explanation:
    response = await client.get(f"/v1/vms/{name}/explain")
    text = await response.text()
    assert response.status == 200, text
    return Explanation.model_validate_json(text)


async def decisions(client: Client, **query: Any) -> DecisionPage:
    response = await client.get("/v1/decisions", params=query)
    text = await response.text()
    assert response.status == 200, text
    return DecisionPage.model_validate_json(text)


# --- why this size ---------------------------------------------------------------------------------------------------


async def test_a_whole_vm_says_so(client: Client, domain: Domain) -> None:
    found = await explain(client)
    assert found.sentence == "low-1 has its nominal size (3 cores, 1024 MiB): nothing is taken from it"
    assert found.bound == found.vm.nominal
    assert found.deflatable == Vector(cpu_cores=2.5, memory_mib=704.0)
    assert [decision.kind for decision in found.decisions] == ["admit"]
    assert found.resizes == ()


async def test_a_deflated_vm_names_the_command_and_what_each_layer_gave(
    client: Client, command: Command, domain: Domain, host: Host
) -> None:
    operation = await reclaim(command, cpu_cores=1.5, memory_mib=100.0)
    found = await explain(client)
    assert found.sentence.startswith(
        "low-1 has 1.5 cores, 924 MiB, which is 1.5 cores, 100 MiB less than its nominal size (3 cores, 1024 MiB), "
        "since reclaim reclaim (begun 2"
    )
    assert found.sentence.endswith(f": {operation.vms[0].sentence}")
    (past,) = found.resizes
    assert (past.request_id, past.outcome) == ("reclaim", operation.vms[0])
    (decision,) = [d for d in found.decisions if d.kind == "deflate"]
    assert decision.sentence == f"reclaim reclaim: {operation.vms[0].sentence}"
    assert decision.inputs["before_cpu_cores"] == 3.0
    assert decision.inputs["target_cpu_cores"] == 1.5
    assert decision.inputs["mode"] == "ask"
    assert decision.outcome == "done"


async def test_what_somebody_changed_is_a_decision_with_its_reason(
    client: Client, command: Command, domain: Domain, host: Host
) -> None:
    await reclaim(command, cpu_cores=1.5)
    await host_idle(host)
    domain.quota = None
    await until(lambda: domain.quota is not None)
    repairs = [d for d in (await explain(client)).decisions if d.kind == "repair"]
    assert repairs[-1].sentence == "each vCPU has no quota instead of 0.75"
    assert repairs[-1].inputs["committed_cpu_cores"] == 1.5


SPEC = VMSpec.model_validate(low_vm("low-1"))
CAUSE = Cause(request_id="r-1", kind="reclaim", body={}, started_at=0.0, before=SPEC.nominal)
LESS = Vector(cpu_cores=1.0, memory_mib=512.0)


def intent(phase: Phase, committed: Vector, cause: Cause | None = CAUSE) -> Intent:
    return Intent(owner="host-a", spec=SPEC, boot_mib=512, phase=phase, target=LESS, committed=committed, cause=cause)


BY = "reclaim r-1 (begun 1970-01-01 00:00:00 UTC)"
ALL, PART = "3 cores, 1024 MiB", "1 cores, 512 MiB"
LACKS = f"low-1 has {PART}, which is 2 cores, 512 MiB less than its nominal size ({ALL})"


@pytest.mark.parametrize(
    ("given", "state", "sentence"),
    [
        (intent(Phase.CREATING, LESS), VMState.STARTING, f"low-1 is being started with {PART} by {BY}"),
        (intent(Phase.STARTING, LESS), VMState.STARTING, f"low-1 is being started with {PART} by {BY}"),
        (intent(Phase.DELETING, LESS), VMState.STOPPED, f"low-1 is being removed by {BY}; {PART} comes free"),
        (intent(Phase.STOPPING, LESS), VMState.STOPPING, f"low-1 is being stopped by {BY}; {PART} comes free"),
        (intent(Phase.STOPPED, LESS), VMState.STOPPED, f"low-1 is off and holds no room; it comes up with {PART}"),
        (
            intent(Phase.SETTLED, LESS),
            VMState.STOPPED,
            f"low-1 is off; {PART} comes free as soon as that is written down",
        ),
        (intent(Phase.ADMITTING, LESS), VMState.PAUSED, f"low-1 is paused; it keeps {PART}"),
        (
            intent(Phase.DEFLATING, SPEC.nominal),
            VMState.DEFLATING,
            f"low-1 is being deflated to {PART} by {BY}; it is charged with {ALL}",
        ),
        (
            intent(Phase.REINFLATING, LESS),
            VMState.REINFLATING,
            f"low-1 is being reinflated to {PART} by {BY}; it is charged with {PART}",
        ),
        (intent(Phase.SETTLED, LESS), VMState.RUNNING, f"{LACKS}, since {BY}"),
        (
            intent(Phase.SETTLED, SPEC.nominal),
            VMState.RUNNING,
            f"low-1 has its nominal size ({ALL}): nothing is taken from it",
        ),
        (intent(Phase.SETTLED, LESS, None), VMState.RUNNING, f"{LACKS}, since an unknown cause"),
    ],
)
def test_each_state_has_its_sentence(given: Intent, state: VMState, sentence: str) -> None:
    assert why_this_size(given, state, None) == sentence


async def test_a_vm_that_is_off_holds_nothing_and_says_so(client: Client, command: Command, domain: Domain) -> None:
    await command("POST", "/v1/vms/low-1/stop", {"request_id": "stop", "limit_s": 2.0})
    found = await explain(client)
    assert found.sentence == f"low-1 is off and holds no room; it comes up with {ALL}"
    assert (found.vm.current, found.bound) == (Vector(), None)


def test_the_sentence_of_another_operation_is_no_explanation() -> None:
    outcome = VMOutcome(
        name="low-1", generation=1, before=LESS, after=LESS, target=LESS, shortfall=Vector(), ledger=(), seconds=0.0,
        sentence="took what it could",
    )  # fmt: skip
    given = intent(Phase.SETTLED, LESS)
    for request_id, told in (("r-1", True), ("r-0", False)):
        last = PastResize(at=0.0, request_id=request_id, outcome=outcome)
        assert ("took what it could" in why_this_size(given, VMState.RUNNING, last)) is told


# --- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", Mechanism)
async def test_a_blocked_mechanism_is_shown_with_its_reason_and_its_fix_word_by_word(
    client: Client, domain: Domain, mechanism: Mechanism
) -> None:
    fix = f"Put {mechanism.value} right:\n  XML:\n    <{mechanism.value}/>\n  shell:\n    virsh set '{mechanism.value}'"
    domain.findings = [[mechanism.value, False, f"no {mechanism.value} here", fix]]
    found = await explain(client)
    assert [row.mechanism for row in found.findings] == list(Mechanism)
    (row,) = [row for row in found.findings if row.mechanism is mechanism]
    assert (row.available, row.reason, row.fix) == (False, f"no {mechanism.value} here", fix)
    assert row.layer is LAYER_OF[mechanism]


async def test_a_guest_that_does_not_answer_blocks_what_needs_it_and_the_fix_starts_its_agent(
    client: Client, domain: Domain, host: Host, world: World
) -> None:
    world.guests_answer = False
    host.vms["low-1"].link.connected = False
    found = {row.mechanism: row for row in (await explain(client)).findings}
    for mechanism in (Mechanism.APPLICATION, Mechanism.CPU_OFFLINE, Mechanism.VIRTIO_MEM, Mechanism.BALLOON):
        assert (found[mechanism].reason, found[mechanism].fix) == (SILENT, START_AGENT), mechanism
    assert found[Mechanism.QUOTA].available


async def test_why_a_guest_does_not_answer_stands_in_its_explanation_and_in_its_ledger(
    client: Client, domain: Domain, host: Host, world: World
) -> None:
    world.guests_answer = False
    vm = host.vms["low-1"]
    vm.link.hang_up("it refused hello: this agent speaks protocol 2, not 1")
    silent = f"{SILENT}: {vm.link.why}"
    found = {row.mechanism: row for row in (await explain(client)).findings}
    assert found[Mechanism.VIRTIO_MEM].reason == silent
    assert silent in {finding.reason for finding in await vm.resizer.findings()}


async def test_the_application_is_known_by_name_and_its_absence_by_what_registers_one(
    client: Client, domain: Domain
) -> None:
    (row,) = [row for row in (await explain(client)).findings if row.layer is Layer.APPLICATION]
    assert (row.available, row.reason) == (
        True,
        "memcached (200 MiB resident); what it gives is known when it is asked",
    )
    domain.applications = {}
    (row,) = [row for row in (await explain(client)).findings if row.layer is Layer.APPLICATION]
    assert (row.available, row.reason, row.fix) == (False, NO_APPLICATION, REGISTER)
    assert row.fix == (
        "Register the application with the guest agent:\n"
        "  shell:\n"
        "    # in the guest, as root; the application's adapter listens on a socket of root's\n"
        """    echo '{"name": "NAME", "url": "unix:/run/ebbtide/hooks/NAME.sock"}' >/etc/ebbtide/adapters.d/NAME.json"""
    )


async def test_a_domain_that_cannot_be_examined_is_explained_all_the_same(
    client: Client, domain: Domain, world: World
) -> None:
    world.failures |= {"findings": "the monitor does not answer", "read": "nor here"}
    found = await explain(client)
    assert found.bound is None
    assert {row.reason for row in found.findings} == {"the domain could not be examined: the monitor does not answer"}


# --- the API ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "status", "field"),
    [
        ("/v1/vms/nobody/explain", 404, "name"),
        ("/v1/vms/low-1/explain?x=1", 400, "x"),
        ("/v1/decisions?vm=No%20Name", 400, "vm"),
        ("/v1/decisions?since=-1", 400, "since"),
        ("/v1/decisions?since=1.5", 400, "since"),
        ("/v1/decisions?limit=0", 400, "limit"),
        ("/v1/decisions?limit=many", 400, "limit"),
        ("/v1/decisions?order=up", 400, "order"),
        ("/v1/mode?x=1", 400, "x"),
    ],
)
async def test_what_cannot_be_asked_is_refused_by_its_field(client: Client, path: str, status: int, field: str) -> None:
    response = await client.get(path)
    assert (response.status, (await response.json())["field"]) == (status, field)


async def test_decisions_are_paged_by_number_and_vm(
    client: Client, command: Command, domain: Domain, host: Host
) -> None:
    await command("POST", "/v1/vms", {"request_id": "c-2", "vm": low_vm("low-2")})
    await reclaim(command, cpu_cores=1.0)
    first = await decisions(client, since=0, limit=2)
    assert [d.number for d in first.decisions] == [1, 2]
    rest = await decisions(client, since=2, limit=1000)
    assert [d.number for d in rest.decisions] == list(range(3, first.newest + 1)) or rest.newest > first.newest
    assert {d.vm for d in (await decisions(client, vm="low-2")).decisions} == {"low-2"}
    assert (await decisions(client, vm="nobody")).decisions == ()
    (split,) = [d for d in rest.decisions if d.vm is None and d.kind == "deflate"]
    assert split.sentence == (
        "reclaim reclaim: 1 cores is split in proportion: low-1 to 2.5 cores, 1024 MiB; low-2 to 2.5 cores, 1024 MiB"
    )
    assert split.inputs["need_cpu_cores"] == 1.0
    assert first.incarnation == host.incarnation
    assert not first.forgotten


async def test_a_refused_command_is_a_decision(client: Client, domain: Domain) -> None:
    body = {"request_id": "t", "generation": 1, "target": {"cpu_cores": 1.0, "memory_mib": 512.0}}
    assert (await client.put("/v1/vms/low-1/target", json=body)).status == 409
    last = (await explain(client)).decisions[-1]
    assert (last.kind, last.sentence) == ("refused", "generation 1 is not above 1, which low-1 has")
    assert last.inputs == {"method": "PUT", "path": "/v1/vms/low-1/target"}


async def test_a_removal_is_the_last_decision_about_a_vm(client: Client, command: Command, domain: Domain) -> None:
    await command("DELETE", "/v1/vms/low-1?request_id=d&reason=shortfall")
    last = (await decisions(client, vm="low-1")).decisions[-1]
    assert (last.kind, last.sentence) == (
        "remove",
        "preempted low-1, reason shortfall: 3 cores, 1024 MiB came free",
    )
