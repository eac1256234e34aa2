"""What the rebalancer is fed from the hosts' reports, and what its dry run says, by hand-worked figures."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cluster_manager.defaults import RebalancingRules
from cluster_manager.plans.claims import VMPhase
from cluster_manager.plans.live_migrations import LiveMigrationPlan, start_live_migration
from cluster_manager.plans.plans import Arrive, Finish, HostRead, ReadHost, Reclaim
from cluster_manager.plans.rebalancing import (
    MOST_MOVES,
    Recorded,
    Reported,
    apart,
    look,
    rebalancing,
)
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.modes import HostMode
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.placement.rebalancing import HostRows, Rebalancer
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.dry_runs import RebalancingReport
from ebbtide.messages.hosts import HostReport, HostTemplate
from ebbtide.messages.requests import MigrateRequest
from ebbtide.messages.vms import VMState, VMStatus
from tests.hostagent.fake_moves import ADDRESS
from tests.manager.plan_events import report_of, spec_of, status_of

HOUR_S = 3600.0
#: Not declared, so nobody lacks it.
DISK = ResourceVector(disk_mib_s=1e9, network_mib_s=1e9)
UUID = "00000000-0000-0000-0000-000000000001"
#: Half of the 3 cores that it was sold, and 650 of 1000 MiB.
SHRUNK = Vector(cpu_cores=1.5, memory_mib=650.0)


def low(name: str, current: Vector | None = SHRUNK, **more: Any) -> VMStatus:
    status = status_of(spec_of(name, "deflatable", 3.0, 1000.0), "any", current)
    return status.model_copy(update={"uuid": UUID, **more})


def host(name: str, *vms: VMStatus, **capacity: float) -> Reported:
    report = report_of(name, *vms, **capacity).model_copy(update={"migration": ADDRESS, "url": "http://127.0.0.1:1"})
    recorded = {vm.name: Recorded(VMPhase.RUNNING, spec_of(vm.name, "deflatable", 3.0, 1000.0)) for vm in vms}
    return Reported(report, False, ZERO, recorded)


def full(name: str, *vms: VMStatus) -> Reported:
    """A host that has just what its VMs hold."""
    held = sum((vm.allocation().charge for vm in vms), ZERO)
    return host(name, *vms, cpu_cores=held.cpu_cores, memory_mib=held.memory_mib)


def changed(one: Reported, **fields: Any) -> Reported:
    return replace(one, report=one.report.model_copy(update=fields))


def moves(found: RebalancingReport) -> list[tuple[str, str, str]]:
    return [(move.vm, move.source, move.target) for move in found.moves]


def test_one_of_two_that_share_a_host_goes_where_there_is_room() -> None:
    found = rebalancing([full("a", low("low-1"), low("low-2")), host("b")], 1, HOUR_S)
    (move,) = found.moves
    assert (move.vm, move.source, move.target, move.memory_mib) == ("low-1", "a", "b", 650.0)
    # Both get all that they lack: 1.5 cores and 350 MiB each, for another hour.
    assert move.given_back == Vector(cpu_cores=3.0, memory_mib=700.0)
    assert (move.core_hours, move.gib_hours) == (3.0, 0.68)
    assert move.worth == pytest.approx((3.0 + 700 / 1024 / 7.5) / (650 / 1024), abs=0.001)
    assert move.sentence == (
        "2 VMs of a lack 3 cores, 700 MiB together, and b has 6 cores, 2400 MiB beyond what its own lack"
    )
    assert (found.hosts, found.deflated_hosts, found.unready_hosts, found.more) == (2, 1, 1, False)
    assert found.sentence == (
        "dry run, nothing is moved: 1 move, 650 MiB copied, 3 core-hours and 0.68 GiB-hours given back; of 3 hosts 2 "
        "take part, 1 of them with deflated VMs, taken to have been so for 3600 s"
    )
    assert found.left_out == ()


def test_room_is_given_once() -> None:
    """b has room for one more VM at its nominal size: what the first move takes is not there for the second."""
    hosts = [full("a", low("low-1"), low("low-2")), host("b", cpu_cores=3.0, memory_mib=1100.0)]
    hosts.append(full("c", low("low-3"), low("low-4")))
    assert len(rebalancing(hosts, 0, HOUR_S).moves) == 1
    hosts[1] = host("b", cpu_cores=6.0, memory_mib=2200.0)
    found = rebalancing(hosts, 0, HOUR_S)
    assert sorted(moves(found)) == [("low-1", "a", "b"), ("low-3", "c", "b")]
    assert (found.memory_mib, found.core_hours) == (1300.0, 6.0)
    hosts[1] = replace(hosts[1], reserved=ResourceVector(3.0, 1100.0))
    assert len(rebalancing(hosts, 0, HOUR_S).moves) == 1, "a running plan has chosen the rest"


def test_no_more_moves_are_looked_for_than_stated() -> None:
    hosts = [full(f"a{n}", low(f"one-{n}"), low(f"two-{n}")) for n in range(MOST_MOVES + 1)]
    found = rebalancing([*hosts, host("b", cpu_cores=1e3, memory_mib=1e6)], 0, HOUR_S)
    assert (len(found.moves), found.more) == (MOST_MOVES, True)


def test_why_there_is_no_move_is_said() -> None:
    a = full("a", low("low-1"), low("low-2"))
    assert "a host counts when its VMs have been deflated for 1800 s" in rebalancing([a, host("b")], 0, 1799.0).sentence
    assert "no move that is worth its bytes" in rebalancing([a], 0, HOUR_S).sentence
    assert "nobody lacks what is worth a resize" in rebalancing([host("b")], 0, HOUR_S).sentence
    assert "of 0 hosts 0 take part" in rebalancing([], 0, HOUR_S).sentence


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({"state": VMState.REINFLATING}, "it does not run on a now (reinflating)"),
        ({"state": VMState.MIGRATING}, "it does not run on a now (migrating)"),
        ({"adopted": True}, "it is adopted: its domain stays where it is"),
        ({"uuid": None}, "a has not looked at it yet"),
        ({"pressure": "it swaps"}, "it is under pressure (it swaps)"),
        ({"current": Vector(cpu_cores=1.5, memory_mib=0.0)}, "a says that it has less memory than any VM"),
        ({"current": Vector(cpu_cores=99.0, memory_mib=650.0)}, "a says of it what cannot be"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_vm_that_cannot_move_stays_and_says_why(status: dict[str, Any], why: str) -> None:
    a = full("a", low("low-1"), low("low-2"))
    vms = (a.report.vms[0].model_copy(update=status), a.report.vms[1])
    found = rebalancing([changed(a, vms=vms), host("b")], 0, HOUR_S)
    assert moves(found) == [("low-2", "a", "b")]
    (left,) = found.left_out
    assert (left.host, left.vm) == ("a", "low-1")
    assert left.sentence.startswith(f"low-1 stays on a: {why}")


@pytest.mark.parametrize(
    ("recorded", "why"),
    [
        ({"changing": True}, "it is being changed"),
        ({"phase": VMPhase.STOPPING}, "it is stopping"),
        ({"spec": spec_of("low-1", "deflatable").model_copy(update={"xml": "<domain/>"})}, "it was made from XML"),
        ({"spec": spec_of("low-1", "deflatable").model_copy(update={"template": "web"})}, "b has no template web"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_the_record_says_of_a_vm_keeps_it_too(recorded: dict[str, Any], why: str) -> None:
    a = full("a", low("low-1"), low("low-2"))
    a = replace(a, vms={**a.vms, "low-1": replace(a.vms["low-1"], **recorded)})
    b = changed(host("b"), templates=(HostTemplate(name="lab"),))
    found = rebalancing([a, b], 0, HOUR_S)
    assert moves(found) == [("low-2", "a", "b")]
    assert found.left_out[0].sentence.startswith(f"low-1 stays on a: {why}")


def test_a_vm_that_a_target_holds_stays_and_lacks_nothing() -> None:
    assert rebalancing([full("a", low("low-1", held=True)), host("b")], 0, HOUR_S).deflated_hosts == 0


def test_a_vm_that_the_manager_does_not_have_there_counts_for_nothing() -> None:
    a = full("a", low("low-1"), low("low-2"))
    found = rebalancing([replace(a, vms={}), host("b")], 0, HOUR_S)
    assert (found.deflated_hosts, found.moves, found.left_out) == (0, (), ())


def test_a_vm_that_is_off_and_a_fixed_one_are_no_rows() -> None:
    off = low("low-1", Vector(), state=VMState.STOPPED, start_size=SHRUNK, overhead_mib=0.0)
    fixed = status_of(spec_of("high-1"), "a")
    assert rebalancing([host("a", off, fixed), host("b")], 0, HOUR_S).deflated_hosts == 0


def test_what_a_harvest_vm_holds_above_nominal_is_no_reason_to_move_it() -> None:
    more = {"priority": Priority.HARVEST, "ceiling": Vector(cpu_cores=6.0, memory_mib=2000.0)}
    grown = low("harvest-1", Vector(cpu_cores=4.0, memory_mib=900.0), **more)
    found = rebalancing([full("a", grown, low("low-1")), host("b")], 0, HOUR_S)
    assert moves(found) == [("low-1", "a", "b")]
    assert "it holds more than its nominal size" in found.left_out[0].sentence


HOSTS: list[tuple[Callable[[Reported], Reported], str]] = [
    (lambda b: changed(b, migration=None), "b takes part in no live migration"),
    (lambda b: changed(b, url="http://10.0.0.9:1"), "b is on another machine, and has no socket here"),
    (lambda b: changed(b, mode=HostMode.DRAINING, mode_reason="new disks"), "b is draining"),
    (lambda b: changed(b, unavailable="gone"), "the hypervisor of b does not answer (gone)"),
    (lambda b: changed(b, overcommitted=Vector(cpu_cores=1.0)), "b is overcommitted by 1 cores"),
    (lambda b: replace(b, busy=True), "a plan is at work on b"),
]


@pytest.mark.parametrize(("change", "why"), HOSTS, ids=[why for _, why in HOSTS])
def test_a_host_that_takes_no_part_says_why(change: Callable[[Reported], Reported], why: str) -> None:
    found = rebalancing([full("a", low("low-1"), low("low-2")), change(host("b"))], 0, HOUR_S)
    assert (found.moves, found.hosts) == ((), 1)
    (left,) = found.left_out
    assert (left.host, left.vm) == ("b", None)
    assert left.sentence.startswith(why)


def test_a_disk_that_is_on_its_host_alone_is_copied_too() -> None:
    for shared in (True, False):
        a = changed(full("a", low("low-1"), low("low-2")), templates=(HostTemplate(name="lab", shared_disk=shared),))
        assert rebalancing([a, host("b")], 0, HOUR_S).moves[0].copies_disk is not shared


def test_bandwidth_that_no_host_declares_is_in_nobodys_way() -> None:
    more = Vector(cpu_cores=1.5, memory_mib=650.0, disk_mib_s=50.0)
    vms = [low(name, more, nominal=Vector(cpu_cores=3.0, memory_mib=1000.0, disk_mib_s=50.0)) for name in ("l1", "l2")]
    assert moves(rebalancing([full("a", *vms), host("b")], 0, HOUR_S)) == [("l1", "a", "b")]


def test_the_first_move_is_the_policys_and_none_exceeds_the_room_that_is_left() -> None:
    chance, number = random.Random(5), 0
    for _ in range(60):
        hosts = []
        for name in "abcdef":
            cores = [round(chance.uniform(0.5, 3.0), 2) for _ in range(chance.randrange(4))]
            vms = [low(f"{name}-{k}", Vector(cpu_cores=has, memory_mib=1000.0)) for k, has in enumerate(cores)]
            hosts.append(full(name, *vms) if vms else host(name, cpu_cores=chance.uniform(2, 8), memory_mib=3300.0))
        found = rebalancing(hosts, 0, HOUR_S)
        reports = [one.report for one in hosts]
        rows = [
            HostRows.of(report.id, report.free.vector() + DISK, [vm.allocation() for vm in report.vms], 100.0)
            for report in reports
        ]
        policy = Rebalancer()
        for now in (0.0, HOUR_S):
            policy.observe(now, "abcdef")
        first = policy.due(HOUR_S, rows)
        assert [(first.vm, first.source, first.target)] == moves(found)[:1] if first else not found.moves
        assert len({move.vm for move in found.moves}) == len(found.moves), "no VM moves twice"
        free = {report.id: report.free.vector() for report in reports}
        for move in found.moves:
            charge = next(vm.allocation().charge for report in reports for vm in report.vms if vm.name == move.vm)
            assert charge.fits_in(free[move.target])
            # Nobody there or here has less than before.
            free[move.target] = free[move.target].less(charge)
            free[move.source] += charge
            number += 1
    assert number > 60


# --- by itself -------------------------------------------------------------------------------------------------------

RULES = RebalancingRules(copy_disks=True)


def test_a_look_keeps_for_how_long_each_host_has_held_deflated_vms() -> None:
    a, c = full("a", low("low-1"), low("low-2")), full("c", low("low-3"), low("low-4"))
    known, _ = look(Rebalancer(), 0.0, [a, host("b")], ["c"], RULES, 0.0)
    known, _ = look(known, 900.0, [replace(a, busy=True), host("b"), c], [], RULES, 900.0)
    before = dict(known.since)
    known, found = look(known, 1800.0, [a, host("b"), c], [], RULES, 1800.0)
    assert known.since == before == {"a": 0.0, "c": 900.0}, "a plan at work on a host ends no deflation"
    assert moves(found) == [("low-1", "a", "b")], "c does not count yet"
    assert known.moved_at == {}, "moves on trial are not remembered"
    assert found.moves[0].lasted_s == 1800.0
    known, _ = look(known, 2700.0, [host("a"), host("b")], ["c"], RULES, 2700.0)
    assert known.since == {"c": 900.0}, "of one that does not answer nothing new is known"


def test_hosts_on_which_preempted_vms_wait_take_no_part() -> None:
    found = rebalancing([full("a", low("low-1"), low("low-2")), replace(host("b"), waiting=2)], 0, HOUR_S)
    assert found.moves == ()
    assert found.left_out[0].sentence == "2 preempted VMs wait for room on b"


def test_moves_that_are_made_together_have_no_host_in_common_and_count_on_no_other() -> None:
    hosts = [full(f"a{n}", low(f"one-{n}"), low(f"two-{n}"), low(f"three-{n}")) for n in range(3)]
    found = rebalancing([*hosts, host("b", cpu_cores=9.0, memory_mib=9e3), host("c", cpu_cores=9.0)], 0, HOUR_S).moves
    assert len(found) > 2
    together = apart(found, (), 9)
    places = [place for move in together for place in (move.source, move.target)]
    assert len(places) == len(set(places))
    assert together[0] == found[0]
    assert apart(found, (), 1) == [found[0]]
    assert apart(found, (), 0) == apart(found, (), -1) == []
    assert all(found[0].target not in (m.source, m.target) for m in apart(found, (found[0].target,), 9))


def begun(why: str = "low-1 lacks 1.5 cores") -> LiveMigrationPlan:
    request = MigrateRequest(request_id="r", host="b", live=True, copy_storage=True)
    spec = spec_of("low-1", "deflatable", 3.0, 1000.0)
    return start_live_migration("p", request, spec, "a", policy=PlacementPolicy.BEST_FIT, why=why, shrinks=not why)


def stepped(state: Any, report: HostReport) -> Any:
    return state.next_step(HostRead(0.0, report, frozenset())).state


def test_nobody_shrinks_for_a_vm_that_the_manager_moves_by_itself() -> None:
    a = full("a", low("low-1"), low("low-2")).report
    shrinks = changed(full("b", low("low-8", None), low("low-9", None))).report
    asked = stepped(stepped(begun(""), a), shrinks)
    assert isinstance(asked.instruction, Reclaim), "for one that a client moves they do"
    read = stepped(begun(), a)
    assert read.instruction == ReadHost(host="b")
    assert isinstance(stepped(read, host("b").report).instruction, Arrive)
    stays = stepped(read, shrinks).instruction
    assert isinstance(stays, Finish)
    assert stays.sentence.startswith("low-1 stays on a: b: short of 1.5 cores")
    assert stays.sentence.endswith("and nobody shrinks to rebalance")


@pytest.mark.parametrize(
    ("vm", "report", "why"),
    [
        ({"pressure": "it swaps"}, {}, "it is under pressure (it swaps)"),
        ({}, {"mode": HostMode.PAUSED, "mode_reason": "new disks"}, "a is paused"),
        ({}, {"moves_by_command_only": "moves may harm it"}, "moves may harm it"),
    ],
    ids=["pressure", "paused", "harmed"],
)
def test_a_vm_that_is_not_to_be_moved_any_more_when_its_host_is_read_stays(
    vm: dict[str, Any], report: dict[str, Any], why: str
) -> None:
    stays = stepped(begun(), changed(full("a", low("low-1", **vm), low("low-2")), **report).report).instruction
    assert isinstance(stays, Finish)
    assert stays.sentence.startswith(f"low-1 stays on a: {why}")
