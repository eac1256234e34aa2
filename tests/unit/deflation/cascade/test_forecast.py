"""A dry run's figures: what the machines themselves would come to where every layer is willing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.cascade import Cascade
from ebbtide.deflation.cascade.forecast import NOT_ASKED, Present, forecast
from ebbtide.deflation.cascade.instructions import GuestReading
from ebbtide.deflation.cascade.mechanisms import LAYER_OF, Mechanism, Mechanisms
from ebbtide.deflation.cascade.reinflation import Reinflation
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.resources import ResourceVector
from tests.unit.deflation.model_vm import Behaviour, ModelVM, run
from tests.unit.deflation.strategies import runs

#: A dry run has no cold pages made free, and no row of them.
NONE = Mechanisms().without([Mechanism.MEMORY_LIMIT], "no swap").without([Mechanism.COLD], "off")


def present(vm: ModelVM, mechanisms: Mechanisms = NONE) -> Present:
    return Present(vm.bound, vm.reading(), vm.boot_mib, vm.cpus, mechanisms)


@runs()
@given(
    cpus=st.integers(1, 8),
    pinned=st.frozensets(st.integers(0, 7), max_size=4),
    used_mib=st.floats(50, 900),
    share=st.floats(0.05, 1.0),
    memory_share=st.floats(0.2, 1.0),
)
def test_it_foretells_what_a_willing_vm_without_an_application_gives(
    cpus: int, pinned: frozenset[int], used_mib: float, share: float, memory_share: float
) -> None:
    vm = ModelVM(cpus=cpus, pinned=pinned, used_mib=used_mib, application_mib=0.0, behaviour=Behaviour.NONE)
    target = ResourceVector(max(round(cpus * share, 2), 0.1), float(int(1024 * memory_share)))
    (foretold,) = forecast(present(vm), target, 1e6)
    outcome, _ = run(Cascade(vm.bound, target, 1e6, NONE), vm)
    assert foretold.after.size.fits_in(outcome.after.size + ResourceVector(0.001, 1e-6))
    assert outcome.after.size.fits_in(foretold.after.size + ResourceVector(0.001, 1e-6))
    for said, was in zip(foretold.ledger, outcome.ledger, strict=True):
        assert (said.layer, said.resource) == (was.layer, was.resource)
        assert said.verified == pytest.approx(was.verified, abs=0.01)


def test_it_foretells_a_reinflation() -> None:
    vm = ModelVM(behaviour=Behaviour.NONE)
    run(Cascade(vm.bound, ResourceVector(1.5, 700), 60.0, NONE), vm)
    target = ResourceVector(4, 1024)
    (foretold,) = forecast(present(vm), target, 60.0)
    outcome, _ = run(Reinflation(vm.bound, target, vm.boot_mib, vm.cpus, 60.0, cpus_plugged=vm.cpus_plugged), vm)
    assert foretold.after.size == outcome.after.size == target
    assert foretold.sentence.startswith("gave back")


def test_down_in_one_component_and_up_in_another_is_two_outcomes() -> None:
    vm = ModelVM(behaviour=Behaviour.NONE, application_mib=0.0)
    run(Cascade(vm.bound, ResourceVector(1.0, 1024), 60.0, NONE), vm)
    down, up = forecast(present(vm), ResourceVector(3.0, 800.0), 60.0)
    assert down.after.size == ResourceVector(1.0, 800.0)
    assert up.after.size == ResourceVector(3.0, 800.0)


def test_the_application_is_not_asked_and_the_ledger_says_so() -> None:
    vm = ModelVM()
    (foretold,) = forecast(present(vm), ResourceVector(4, 400), 60.0)
    (row,) = [entry for entry in foretold.ledger if entry.layer is Layer.APPLICATION]
    assert (row.verified, row.reason) == (0.0, NOT_ASKED)
    assert vm.instructions == 0


def test_without_a_reading_of_the_guest_no_memory_would_be_taken() -> None:
    vm = ModelVM()
    blind = Present(vm.bound, None, vm.boot_mib, vm.cpus, NONE)
    (foretold,) = forecast(blind, ResourceVector(2.0, 512), 60.0)
    assert foretold.after.size == ResourceVector(2.0, 1024)
    assert foretold.shortfall == ResourceVector(0, 512)
    assert "no fresh reading of the guest" in foretold.sentence


@pytest.mark.parametrize("mechanism", [m for m in Mechanism if LAYER_OF[m] is not Layer.APPLICATION])
def test_a_blocked_mechanism_gives_nothing(mechanism: Mechanism) -> None:
    """Each alone is blocked; what it would have given is given by another or is missing, and nothing breaks."""
    bound = Bound(4, None, 512, 512, disk_mib_s=100, network_mib_s=100)
    guest = GuestReading((0, 1, 2, 3), (3, 2, 1), 500.0)
    here = Present(bound, guest, 512, 4, NONE.without([mechanism], "blocked for a reason"))
    (foretold,) = forecast(here, ResourceVector(1.5, 600, 50, 50), 60.0)
    after = foretold.after
    match mechanism:
        case Mechanism.CPU_OFFLINE:
            assert (after.cpus_online, after.cpu_cores) == (4, 1.5)
        case Mechanism.QUOTA:
            assert (after.cpu_cores, after.quota_per_cpu) == (2.0, None)
        case Mechanism.VIRTIO_MEM:
            assert after.plugged_mib == 512
        case Mechanism.BALLOON:
            assert after.balloon_mib == 512
        case Mechanism.DISK:
            assert after.disk_mib_s == 100
        case Mechanism.NETWORK:
            assert after.network_mib_s == 100
        case _:
            assert after.size.fits_in(ResourceVector(1.5, 600, 50, 50) + ResourceVector(0, 1.0))


def test_a_deadline_of_zero_leaves_only_what_needs_no_waiting() -> None:
    vm = ModelVM(behaviour=Behaviour.NONE)
    (foretold,) = forecast(present(vm), ResourceVector(2.0, 700), 0.0)
    assert foretold.after.size == ResourceVector(2.0, 1024)


def test_a_whole_dimm_is_foretold_once() -> None:
    vm = ModelVM(behaviour=Behaviour.NONE, application_mib=0.0, device_mib=0.0, dimms_mib=(128.0, 128.0))
    chosen = Mechanisms().without([Mechanism.VIRTIO_MEM], "the VM has no virtio-mem device")
    target = ResourceVector(4, 512.0)
    (foretold,) = forecast(replace(present(vm), mechanisms=chosen), target, 60.0)
    outcome, _ = run(Cascade(vm.bound, target, 60.0, chosen.without([Mechanism.APPLICATION], "no")), vm)
    assert foretold.after.size == outcome.after.size
    assert foretold.after.dimms_mib == outcome.after.dimms_mib == ()


def test_a_dimm_beside_a_device_of_larger_blocks_is_foretold_and_taken() -> None:
    vm = ModelVM(behaviour=Behaviour.NONE, application_mib=0.0, used_mib=64.0, block_mib=512.0, dimms_mib=(128.0,))
    chosen = replace(NONE, block_mib=512.0).without([Mechanism.BALLOON], "the VM has no balloon")
    target = ResourceVector(4, vm.bound.memory_mib - 128.0)
    (foretold,) = forecast(present(vm, chosen), target, 60.0)
    assert foretold.after.dimms_mib == ()
    outcome, _ = run(Cascade(vm.bound, target, 60.0, chosen), vm)
    assert foretold.after.size == outcome.after.size == target
    assert outcome.after.dimms_mib == ()


def test_a_dimm_that_could_not_be_given_back_is_not_foretold() -> None:
    bound = Bound(4, None, 512, 612, dimms_mib=(256.0,), fixed_mib=256.0)
    chosen = NONE.without([Mechanism.BALLOON], "the VM has no balloon")
    guest = GuestReading((0, 1, 2, 3), (3, 2, 1), 4000.0)
    (foretold,) = forecast(Present(bound, guest, 512, 4, chosen), ResourceVector(4, 400), 60.0)
    assert (foretold.after.plugged_mib, foretold.after.dimms_mib) == (256.0, ())
    assert foretold.shortfall == ResourceVector(0, 512 + 256 - 400)


def test_a_limit_that_swap_backs_takes_what_the_guest_cannot_spare() -> None:
    bound = Bound(4, None, 512, 512)
    guest = GuestReading((0, 1, 2, 3), (3, 2, 1), 100.0)
    (foretold,) = forecast(Present(bound, guest, 512, 4, Mechanisms()), ResourceVector(4, 600), 60.0)
    assert foretold.after.memory_mib == 600
    assert foretold.after.limit_mib is not None
    (back,) = forecast(Present(foretold.after, guest, 512, 4, Mechanisms()), ResourceVector(4, 1024), 60.0)
    assert (back.after.limit_mib, back.after.memory_mib) == (None, 1024)


def test_what_can_be_used_to_give_may_be_more_than_what_can_be_used_to_take() -> None:
    silent = NONE.without([Mechanism.CPU_OFFLINE, Mechanism.VIRTIO_MEM, Mechanism.BALLOON], "the guest is silent")
    bound = Bound(4, 0.5, 300, 512)
    (back,) = forecast(Present(bound, None, 512, 4, silent, NONE), ResourceVector(4, 1024), 60.0)
    assert back.after.size == ResourceVector(4, 1024)
