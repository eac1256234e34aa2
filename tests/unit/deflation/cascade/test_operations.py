"""Cascade and reinflation against a simulated VM: what holds in every run, however the VM behaves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ebbtide.deflation.cascade.cascade import Cascade
from ebbtide.deflation.cascade.instructions import (
    AskApplication,
    Instruction,
    Mode,
    Outcome,
    PollApplication,
    ReadGuest,
    Throttle,
    Unplug,
)
from ebbtide.deflation.cascade.lanes import LAYER_ENDS
from ebbtide.deflation.cascade.mechanisms import Mechanism, Mechanisms
from ebbtide.deflation.cascade.memory_lane import HEAR_S
from ebbtide.deflation.cascade.reinflation import Reinflation
from ebbtide.deflation.cascade.steps import STEP_SHARE
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.resources import COMPONENTS, ResourceVector
from tests.unit.deflation.blocked import without
from tests.unit.deflation.model_vm import Behaviour, Exchange, ModelVM, moves_memory, run
from tests.unit.deflation.strategies import runs

#: Instructions that end an operation get this much even after its deadline.
FLOOR_S = 1.0


@st.composite
def vms(draw: st.DrawFn) -> ModelVM:
    cpus = draw(st.integers(1, 8))
    cpu_sets = st.frozensets(st.integers(0, cpus - 1))
    block = draw(st.sampled_from([1.0, 2.0, 4.0, 128.0]))
    device = draw(st.integers(0, 20)) * block * draw(st.sampled_from([1, 10]))
    boot = float(draw(st.integers(384, 1024)))
    total = boot + device
    online = {0} | set(draw(cpu_sets))
    used = float(draw(st.integers(60, 200)))
    dimms = st.lists(st.sampled_from([128.0, 256.0]), max_size=3).map(tuple)
    return ModelVM(
        boot_mib=boot,
        device_mib=device,
        cpus=cpus,
        block_mib=block,
        used_mib=used,
        application_mib=draw(st.floats(0, max(total - used, 1.0))),
        application_minimum_mib=draw(st.floats(0, 200)),
        behaviour=draw(st.sampled_from(Behaviour)),
        pinned=draw(cpu_sets),
        stubborn=draw(st.one_of(st.just(frozenset()), cpu_sets)),
        unplug_at_most_mib=draw(st.sampled_from([1e9, 100.0, 10.0, 0.0])),
        unmovable_mib=draw(st.sampled_from([0.0, 0.0, device / 3])),
        balloon_at_most_mib=draw(st.sampled_from([1e9, 30.0, 1.0, 0.0])),
        vanishes_at=draw(st.one_of(st.just(1_000_000), st.integers(0, 12))),
        blind_at=draw(st.one_of(st.just(frozenset()), st.frozensets(st.integers(1, 12)))),
        boast_mib=draw(st.sampled_from([0.0, 0.0, 0.0, 50.0, 1e6])),
        dimms_mib=draw(st.one_of(st.just(()), dimms)),
        dimms_out_mib=draw(st.one_of(st.just(()), dimms)),
        dimms_stuck=draw(st.booleans()),
        swap_mib=draw(st.sampled_from([0.0, 300.0, 1e6])),
        limit_goes=draw(st.sampled_from([1.0, 1.0, 0.5, 0.0])),
        limit_mib=draw(st.one_of(st.none(), st.none(), st.integers(192, 3000).map(float))),
        lags=draw(st.booleans()),
        latency_s=draw(st.sampled_from([0.0, 0.05, 0.3, 5.0, 100.0])),
        online=online,
        quota_per_cpu=draw(st.one_of(st.none(), st.floats(0.1, 1.2))),
        plugged_mib=device - draw(st.integers(0, int(device / block))) * block,
    )


@st.composite
def targets(draw: st.DrawFn) -> ResourceVector:
    return ResourceVector(draw(st.integers(10, 900)) / 100, float(draw(st.integers(192, 3000))))


BLOCKED: tuple[tuple[Layer | Mechanism, ...], ...] = (
    (),
    (),
    (Layer.APPLICATION,),
    (Layer.GUEST,),
    (Layer.APPLICATION, Layer.GUEST),
    (Mechanism.BALLOON,),
    (Mechanism.QUOTA,),
    (Mechanism.MEMORY_LIMIT,),
    (Mechanism.BALLOON, Mechanism.MEMORY_LIMIT),
    (Mechanism.VIRTIO_MEM, Mechanism.BALLOON),
    (Mechanism.VIRTIO_MEM,),
    (Mechanism.DIMM,),
    (Mechanism.CPU_UNPLUG,),
    (Layer.GUEST, Mechanism.BALLOON, Mechanism.QUOTA),
)
mechanisms = st.sampled_from(BLOCKED).map(lambda blocked: without(*blocked))
deadlines = st.sampled_from([0.0, 0.5, 3.0, 60.0, 60.0, 600.0])


def with_block(chosen: Mechanisms, vm: ModelVM) -> Mechanisms:
    if not (vm.dimms_mib or vm.dimms_out_mib):
        chosen = chosen.without([Mechanism.DIMM], "the VM has no DIMM")
    if vm.device_mib > 0:
        return replace(chosen, block_mib=vm.block_mib)
    return chosen.without([Mechanism.VIRTIO_MEM], "the VM has no virtio-mem device")


UNREAD = ModelVM(384, 10, 1, block_mib=1, used_mib=60, application_mib=0, application_minimum_mib=0, lags=True)
UNREAD = replace(UNREAD, behaviour=Behaviour.NONE, blind_at=frozenset({3}), latency_s=0)


@runs(2500)
@given(vms(), targets(), deadlines, mechanisms, st.sampled_from(Mode), st.sampled_from([0.0, 1e6]))
@example(UNREAD, ResourceVector(0.1, 193), 60.0, without(), Mode.ASK, 0.0)
def test_whatever_the_vm_does_a_cascade_keeps_the_rules(
    vm: ModelVM, target: ResourceVector, deadline_s: float, chosen: Mechanisms, mode: Mode, began: float
) -> None:
    before, busy = vm.seen, vm.online & (vm.pinned | {0})
    cascade = Cascade(before, target, deadline_s, with_block(chosen, vm), mode)
    outcome, exchanges = run(cascade, vm, began)

    lowest = target.smaller(before.size)
    for exchange in exchanges:
        assert exchange.after.memory_mib >= min(lowest.memory_mib, exchange.before.memory_mib) - 1e-6
        _time_limit_respected(exchange, began, deadline_s)
    _memory_is_taken_by_fresh_readings_only(exchanges)
    if chosen.has(Mechanism.QUOTA):
        # As it really is: the last reading may have failed.
        assert lowest.cpu_cores <= vm.seen.cpu_cores + 1e-3, "no quota of an earlier deflation is left too low"
    assert outcome.seconds <= max(deadline_s, 0) + 4 * FLOOR_S + 1e-9
    assert outcome.after.held_mib >= vm.bound.held_mib - 1e-6, "what the host has not heard does not count"
    if vm.answers and not vm.blind_at:
        assert outcome.after.held_mib == pytest.approx(vm.bound.held_mib), "the host has heard at the end"
    assert busy <= vm.online, "neither CPU 0 nor one with pinned tasks goes off line"
    _ledger_adds_up(outcome)
    if chosen.why_not(Layer.APPLICATION):
        assert not any(isinstance(e.instruction, AskApplication | PollApplication) for e in exchanges)
    if chosen.why_not(Layer.GUEST):
        assert not any(isinstance(e.instruction, Unplug) for e in exchanges)
    if not chosen.has(Mechanism.BALLOON):
        assert not any(isinstance(e.instruction, Throttle) and e.instruction.balloon_mib for e in exchanges)
    if not chosen.has(Mechanism.QUOTA):
        assert not any(isinstance(e.instruction, Throttle) and e.instruction.cpu_cores for e in exchanges)
    limits = [e for e in exchanges if isinstance(e.instruction, Throttle) and e.instruction.limit_mib is not None]
    assert len(limits) <= (1 if chosen.has(Mechanism.MEMORY_LIMIT) else 0)
    taking = [e for e in exchanges if moves_memory(e.instruction)]
    assert all(e is taking[-1] for e in limits), "after a limit no memory is taken"


@runs(1000)
@given(vms(), targets(), deadlines, mechanisms)
def test_whatever_the_vm_does_a_reinflation_keeps_the_rules(
    vm: ModelVM, target: ResourceVector, deadline_s: float, chosen: Mechanisms
) -> None:
    before = vm.bound if vm.answers else vm.seen
    machine = Reinflation(before, target, vm.boot_mib, vm.cpus, deadline_s, with_block(chosen, vm))
    outcome, exchanges = run(machine, vm)
    upper = target.larger(before.size)
    for exchange in exchanges:
        vm.let_the_balloon_move()
        assert exchange.after.memory_mib >= exchange.before.memory_mib, "nothing is taken back"
        assert exchange.after.cpus_online >= exchange.before.cpus_online
        limit = max(deadline_s - exchange.now, FLOOR_S)
        assert exchange.instruction.limit_s <= limit + 1e-9
    while vm.balloon_mib < vm.balloon_target_mib and vm.balloon_at_most_mib > 0:
        vm.let_the_balloon_move()
    assert vm.bound.memory_mib <= upper.memory_mib + 1e-6, "also when the balloon follows late"
    if vm.vanishes_at > 100 and not vm.blind_at:
        assert all(e.after.cpu_cores >= before.cpu_cores - 1e-3 for e in exchanges), "a reinflation shrinks nothing"
        if chosen.has(Mechanism.QUOTA) and target.cpu_cores > before.cpu_cores + 1e-3:
            assert outcome.after.cpu_cores <= upper.cpu_cores + 1e-3
    assert outcome.seconds <= deadline_s + 4 * FLOOR_S + 1e-9


@runs(400)
@given(vms(), targets())
@example(ModelVM(cpus=3, quota_per_cpu=0.95, online={0, 1}), ResourceVector(1, 700))
def test_a_willing_guest_is_back_where_it_was_after_both_ways(vm: ModelVM, target: ResourceVector) -> None:
    willing = ModelVM(
        boot_mib=vm.boot_mib,
        device_mib=vm.device_mib,
        cpus=vm.cpus,
        block_mib=vm.block_mib,
        used_mib=100.0,
        application_mib=0.0,
        online=set(vm.online),
        quota_per_cpu=vm.quota_per_cpu,
        pinned=vm.pinned,
        dimms_mib=vm.dimms_mib,
    )
    start = willing.bound
    chosen = with_block(Mechanisms(), willing)
    run(Cascade(start, target, 600.0, chosen), willing)
    outcome, _ = run(
        Reinflation(willing.bound, start.size, willing.boot_mib, willing.cpus, 600.0, chosen, willing.cpus_plugged),
        willing,
        700.0,
    )
    for component in COMPONENTS:
        assert willing.bound.size[component] == pytest.approx(start.size[component], abs=1e-3)
    assert outcome.reached
    if outcome.ledger:
        assert willing.told == start.size


@runs(400)
@given(vms(), targets(), targets())
def test_a_second_deflation_starts_from_what_the_first_has_left(
    vm: ModelVM, first: ResourceVector, second: ResourceVector
) -> None:
    chosen = with_block(Mechanisms(), vm)
    start = vm.seen
    one, _ = run(Cascade(start, first, 60.0, chosen), vm)
    middle = vm.seen
    two, _ = run(Cascade(middle, second, 60.0, chosen), vm, 100.0)
    _ledger_adds_up(one)
    _ledger_adds_up(two)
    lowest = start.size.smaller(first).smaller(second)
    assert vm.seen.memory_mib >= lowest.memory_mib - 1e-6
    assert two.after.cpu_cores >= lowest.cpu_cores - 1e-3


def _time_limit_respected(exchange: Exchange, began: float, deadline_s: float) -> None:
    instruction = exchange.instruction
    ends = LAYER_ENDS[_layer(instruction)]
    left = began + deadline_s * ends - exchange.now
    floor = 0.0 if isinstance(instruction, AskApplication | PollApplication) else FLOOR_S
    if isinstance(instruction, Unplug) and instruction.plugged_mib == exchange.before.plugged_mib:
        floor = HEAR_S  # nothing more is taken
    assert instruction.limit_s <= max(left, floor) + 1e-6
    assert instruction.limit_s > 0
    if isinstance(instruction, AskApplication):
        assert instruction.deadline_s <= left + 1e-6


def _layer(instruction: Instruction) -> Layer:
    match instruction:
        case AskApplication() | PollApplication():
            return Layer.APPLICATION
        case Unplug():
            return Layer.GUEST
    return Layer.HYPERVISOR


def _memory_is_taken_by_fresh_readings_only(exchanges: list[Exchange]) -> None:
    """And never by more than half of what the guest has said it can spare."""
    for exchange in exchanges:
        latest, wanted = exchange.known, 0.0
        match exchange.instruction:
            case Unplug(plugged_mib=float(plugged)) if plugged < exchange.before.plugged_mib:
                assert latest is not None
                assert latest.bound is not None, "a step is reckoned from a bound that was read"
                # As it truly is: the host may not have heard yet of what the guest has given.
                wanted = exchange.before.plugged_mib - plugged
            case Throttle(balloon_mib=float(balloon)):
                assert latest is not None
                assert latest.bound is not None
                wanted = latest.bound.balloon_mib - balloon
            case Throttle(limit_mib=float()):
                assert latest is not None
                assert latest.bound is not None
                assert latest.guest is not None, "a limit needs a fresh reading, too"
        if wanted > 0:
            assert latest is not None
            assert latest.guest is not None, "unknown is not zero"
            assert wanted <= latest.guest.spare_mib * STEP_SHARE + 1e-3


def _ledger_adds_up(outcome: Outcome) -> None:
    for component in COMPONENTS:
        rows = {entry.layer: entry for entry in outcome.ledger if entry.resource == component}
        fall = max(outcome.before.size[component] - outcome.after.size[component], 0.0)
        if not rows:
            assert outcome.before.size[component] <= outcome.target[component] + 1e-6
            continue
        assert set(rows) - {Layer.COLD} == set(Layer) - {Layer.COLD}
        assert component == "memory_mib" or Layer.COLD not in rows
        given_ = rows[Layer.GUEST].verified + rows[Layer.HYPERVISOR].verified
        assert given_ == pytest.approx(fall, abs=2e-4)
        assert rows[Layer.APPLICATION].verified <= rows[Layer.GUEST].verified + 1e-4, "never counted twice"
        assert all(math.isfinite(entry.seconds) and entry.seconds >= 0 for entry in rows.values())
        assert all(entry.promised <= entry.asked + 0.01 for entry in rows.values())


def test_reads_come_before_everything_that_takes() -> None:
    vm = ModelVM(behaviour=Behaviour.NONE)
    _, exchanges = run(Cascade(vm.bound, ResourceVector(2, 600), 60.0), vm)
    names = [type(exchange.instruction) for exchange in exchanges]
    assert names[:3] == [AskApplication, ReadGuest, Unplug]
    assert names.count(ReadGuest) == 1
