"""When a VM is looked at closely: decided by two surveys and its age alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hostagent.control import reconciler
from hostagent.control.reconciler import check_is_due
from hostagent.libvirt.hypervisor import DomainSummary

SEEN = DomainSummary(uuid="1", state="running", vcpus=2, vcpu_seconds=(1.0, 1.0), balloon_mib=512.0)


def test_one_that_rests_and_looks_as_before_is_left_alone_until_it_is_long_ago() -> None:
    every_s = reconciler.CHECK_S
    busy = replace(SEEN, vcpu_seconds=(9.0, 9.0), usable_mib=100.0)
    assert not check_is_due(SEEN, busy, 0.9 * every_s, rests=True, deflated=True)
    assert check_is_due(SEEN, busy, every_s, rests=True, deflated=True)
    assert not check_is_due(SEEN, busy, every_s, rests=True, deflated=False), "there is little that could be lifted"
    assert check_is_due(SEEN, busy, 2 * every_s, rests=True, deflated=False)


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        (None, SEEN),
        (SEEN, None),
        (SEEN, replace(SEEN, uuid="2")),
        (SEEN, replace(SEEN, state="paused")),
        (SEEN, replace(SEEN, vcpus=1)),
        (SEEN, replace(SEEN, balloon_mib=256.0)),
    ],
    ids=["new", "gone", "another", "paused", "cpus", "balloon"],
)
def test_one_that_has_changed_is_looked_at(earlier: DomainSummary | None, now: DomainSummary | None) -> None:
    assert check_is_due(earlier, now, 0.0, rests=True, deflated=False)


def test_one_with_which_something_is_to_be_done_is_looked_at() -> None:
    assert check_is_due(SEEN, SEEN, 0.0, rests=False, deflated=False)
