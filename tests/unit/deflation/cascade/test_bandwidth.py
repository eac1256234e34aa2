"""Disk and network in the cascade and on the way back: taken and given like the other two components."""

from __future__ import annotations

import pytest

from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.cascade import Cascade
from ebbtide.deflation.cascade.instructions import Throttle
from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.deflation.cascade.reinflation import Reinflation
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.resources import ResourceVector
from tests.unit.deflation.blocked import without
from tests.unit.deflation.script import Measured, Row, entry, measured, play

FULL = Bound(1, None, 512, 0, disk_mib_s=100, network_mib_s=50)
SHRUNK = Bound(1, None, 512, 0, disk_mib_s=40, network_mib_s=5)
SMALL, WHOLE = ResourceVector(1, 512, 40, 5), ResourceVector(1, 512, 100, 50)
OUTSIDE_ONLY = without(Layer.APPLICATION, Layer.GUEST)


def test_both_are_taken_in_one_step_even_from_a_guest_that_does_not_answer() -> None:
    outcome = play(
        Cascade(FULL, SMALL, 60.0, OUTSIDE_ONLY),
        [
            Row(Throttle, {"disk_mib_s": 40, "network_mib_s": 5}, Measured, measured(SHRUNK, None)),
        ],
    )
    assert outcome.reached
    for component, amount in (("disk_mib_s", 60), ("network_mib_s", 45)):
        row = entry(outcome, Layer.HYPERVISOR, component)
        assert (row.asked, row.promised, row.verified) == (amount, amount, amount)


def test_both_are_given_back_in_one_step() -> None:
    outcome = play(
        Reinflation(SHRUNK, WHOLE, 512, 1, 60.0, without(Layer.APPLICATION)),
        [Row(Throttle, {"disk_mib_s": 100, "network_mib_s": 50, "cpu_cores": None}, Measured, measured(FULL))],
    )
    assert outcome.reached
    assert entry(outcome, Layer.HYPERVISOR, "disk_mib_s").verified == 60
    assert entry(outcome, Layer.HYPERVISOR, "network_mib_s").verified == 45


@pytest.mark.parametrize("reached", [FULL, Bound(1, None, 512, 0, disk_mib_s=40, network_mib_s=50)])
def test_what_the_hypervisor_could_not_do_falls_short_with_its_reason(reached: Bound) -> None:
    outcome = play(
        Cascade(FULL, SMALL, 60.0, OUTSIDE_ONLY),
        [
            Row(Throttle, {}, Measured, measured(reached, reason="tc failed: no such qdisc")),
        ],
    )
    assert outcome.shortfall == reached.size.less(SMALL)
    assert entry(outcome, Layer.HYPERVISOR, "network_mib_s").verified == 0
    assert "tc failed: no such qdisc" in entry(outcome, Layer.HYPERVISOR, "network_mib_s").reason
    assert "tc failed: no such qdisc" in outcome.sentence


def test_what_could_not_be_given_back_falls_short_with_its_reason() -> None:
    outcome = play(
        Reinflation(SHRUNK, WHOLE, 512, 1, 60.0, without(Layer.APPLICATION)),
        [Row(Throttle, {}, Measured, measured(SHRUNK, reason="libvirt is busy"))],
    )
    assert outcome.shortfall == WHOLE.less(SMALL)
    assert entry(outcome, Layer.HYPERVISOR, "disk_mib_s").reason == "libvirt is busy"


def test_a_network_that_cannot_be_limited_does_not_keep_the_disk_from_it() -> None:
    blocked = without(
        Layer.APPLICATION,
        Layer.GUEST,
        Mechanism.NETWORK,
        why={Mechanism.NETWORK: "interface number 1 is of type user"},
    )
    disk_only = Bound(1, None, 512, 0, disk_mib_s=40, network_mib_s=50)
    outcome = play(
        Cascade(FULL, SMALL, 60.0, blocked),
        [
            Row(Throttle, {"disk_mib_s": 40, "network_mib_s": None}, Measured, measured(disk_only)),
        ],
    )
    assert outcome.shortfall == ResourceVector(network_mib_s=45)
    assert "is of type user" in entry(outcome, Layer.HYPERVISOR, "network_mib_s").reason
