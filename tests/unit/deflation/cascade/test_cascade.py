"""The cascade, table by table. Boot memory is 512 MiB, and 512 MiB are plugged."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.cascade import Cascade
from ebbtide.deflation.cascade.instructions import AskApplication, Mode, PollApplication, ReadGuest, Throttle, Unplug
from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.resources import ResourceVector
from tests.unit.deflation.blocked import without
from tests.unit.deflation.script import (
    ApplicationAnswered,
    ApplicationReported,
    Measured,
    Row,
    answered,
    entry,
    measured,
    play,
    reported,
)

FULL = Bound(4, None, 512, 512)
ALL_CPUS: dict[str, Any] = {"online": (0, 1, 2, 3), "unpluggable": (3, 2, 1)}
NO_APPLICATION = without(
    Layer.APPLICATION, Mechanism.MEMORY_LIMIT, why={Layer.APPLICATION: "the guest agent is not connected"}
)
HYPERVISOR_ONLY = without(Layer.APPLICATION, Layer.GUEST, Mechanism.MEMORY_LIMIT)
NO_LIMIT = without(Mechanism.MEMORY_LIMIT)


def test_all_three_layers_give_their_part() -> None:
    """Request, promise, release, unplug, quota and balloon: the sum is the fall of the bound."""
    taken, off, unplugged = Bound(4, None, 512, 362), Bound(3, None, 512, 362), Bound(3, None, 512, 312)
    outcome = play(
        Cascade(FULL, ResourceVector(2.5, 724), 60.0),
        [
            Row(
                AskApplication,
                {"limit_s": 30, "deadline_s": 30, "bound_mib": 1024, "mode": Mode.ASK},
                ApplicationAnswered,
                answered(150),
                takes_s=1,
            ),
            Row(
                ReadGuest, {"limit_s": 47, "cpus": True}, Measured, measured(FULL, **ALL_CPUS, spare_mib=400), takes_s=1
            ),
            Row(
                PollApplication,
                {"delay_s": 0.2, "until_mib": 64, "limit_s": 29},
                ApplicationReported,
                reported(60, done=False),
            ),
            Row(
                Unplug,
                {"plugged_mib": 362, "limit_s": 46},
                Measured,
                measured(taken, **ALL_CPUS, spare_mib=7),
                takes_s=1,
            ),
            Row(Unplug, {"online": (0, 1, 2)}, Measured, measured(off, (0, 1, 2), (2, 1))),
            Row(PollApplication, {"until_mib": 60 + 64, "limit_s": 28}, ApplicationReported, reported(150)),
            Row(ReadGuest, {"limit_s": 45}, Measured, measured(off, (0, 1, 2), (2, 1), spare_mib=200)),
            Row(Unplug, {"plugged_mib": 262}, Measured, measured(unplugged, (0, 1, 2), spare_mib=250), takes_s=2),
            Row(
                Throttle,
                {"cpu_cores": 2.5, "balloon_mib": 412, "disk_mib_s": None},
                Measured,
                measured(Bound(3, 2.5 / 3, 412, 312), (0, 1, 2), (2, 1), spare_mib=60),
                takes_s=1,
            ),
        ],
    )
    assert outcome.reached
    assert outcome.seconds == 6
    assert entry(outcome, Layer.APPLICATION, "memory_mib").verified == 150
    assert entry(outcome, Layer.GUEST, "memory_mib").verified == 200
    assert entry(outcome, Layer.HYPERVISOR, "memory_mib").verified == 100
    assert entry(outcome, Layer.GUEST, "cpu_cores").verified == 1
    assert entry(outcome, Layer.HYPERVISOR, "cpu_cores").verified == 0.5
    assert entry(outcome, Layer.HYPERVISOR, "memory_mib").asked == 100, "what fell through"
    assert [entry(outcome, layer, "cpu_cores").seconds for layer in Layer if layer is not Layer.COLD] == [3, 2, 1]
    assert outcome.sentence.startswith("took 1.5 cores, 300 MiB of 1.5 cores, 300 MiB in 6.0 s")


@pytest.mark.parametrize("reason", ["refused: busy", "no application is registered in the guest", "no answer in time"])
def test_a_layer_that_gives_nothing_falls_through_with_its_reason(reason: str) -> None:
    outcome = play(
        Cascade(FULL, ResourceVector(4, 924), 60.0),
        [
            Row(AskApplication, {}, ApplicationAnswered, answered(reason=reason)),
            Row(ReadGuest, {}, Measured, measured(FULL, **ALL_CPUS, spare_mib=300)),
            Row(Unplug, {"online": None, "plugged_mib": 412}, Measured, measured(Bound(4, None, 512, 412), (0,))),
        ],
    )
    row = entry(outcome, Layer.APPLICATION, "memory_mib")
    assert (row.promised, row.verified, row.reason) == (0, 0, reason)
    assert outcome.reached


def test_a_promise_of_what_was_not_asked_for_is_no_promise() -> None:
    """Waiting for it would cost half of the deadline."""
    outcome = play(
        Cascade(FULL, ResourceVector(3, 1024), 60.0),
        [
            Row(AskApplication, {}, ApplicationAnswered, answered(300)),
            Row(ReadGuest, {}, Measured, measured(FULL, **ALL_CPUS)),
            Row(Unplug, {"online": (0, 1, 2)}, Measured, measured(Bound(3, None, 512, 512), (0, 1, 2), (2, 1))),
            Row(Throttle, {"cpu_cores": 3}, Measured, measured(Bound(3, 1.0, 512, 512), (0, 1, 2))),
        ],
    )
    assert outcome.reached


def test_a_promise_is_waited_for_until_the_applications_share_of_the_deadline_is_over() -> None:
    cascade = Cascade(FULL, ResourceVector(4, 924), 4.0)
    rows = [Row(AskApplication, {"limit_s": 2}, ApplicationAnswered, answered(100), takes_s=0.5)]
    rows += [Row(ReadGuest, {"limit_s": pytest.approx(2.7)}, Measured, measured(FULL, None))]
    rows += [Row(PollApplication, {}, ApplicationReported, reported(done=False), takes_s=0.7)] * 2
    rows += [
        Row(ReadGuest, {"limit_s": pytest.approx(1.3)}, Measured, measured(FULL, None)),
        Row(ReadGuest, {"limit_s": pytest.approx(2.1)}, Measured, measured(FULL, None)),
    ]
    outcome = play(cascade, rows)
    assert "not released within its share" in entry(outcome, Layer.APPLICATION, "memory_mib").reason
    assert "no fresh reading" in outcome.sentence
    assert outcome.shortfall == ResourceVector(memory_mib=100)


def test_what_the_application_says_it_gave_is_never_added() -> None:
    """It lied: nothing could be unplugged."""
    outcome = play(
        Cascade(FULL, ResourceVector(4, 724), 60.0, NO_LIMIT),
        [
            Row(AskApplication, {}, ApplicationAnswered, answered(300)),
            Row(PollApplication, {}, ApplicationReported, reported(300)),
            Row(ReadGuest, {}, Measured, measured(FULL, **ALL_CPUS, spare_mib=0)),
        ],
    )
    assert all(row.verified == 0 for row in outcome.ledger)
    assert entry(outcome, Layer.APPLICATION, "memory_mib").promised == 300
    assert outcome.shortfall == ResourceVector(memory_mib=300)
    assert "no more memory to spare" in outcome.sentence


def test_memory_is_taken_in_steps_of_half_of_what_the_guest_can_spare() -> None:
    def plugged(mib: float, spare_mib: float) -> dict[str, Any]:
        return measured(Bound(4, None, 512, mib), (0, 1, 2, 3), spare_mib=spare_mib)

    play(
        Cascade(FULL, ResourceVector(4, 804), 60.0, NO_APPLICATION),
        [
            Row(ReadGuest, {}, Measured, plugged(512, 200)),
            Row(Unplug, {"plugged_mib": 412}, Measured, plugged(412, 101)),
            Row(Unplug, {"plugged_mib": 362}, Measured, plugged(362, 500)),
            Row(Unplug, {"plugged_mib": 292}, Measured, plugged(292, 500)),
        ],
    )


def test_an_unplug_that_stops_half_way_leaves_the_rest_to_the_balloon() -> None:
    half = measured(Bound(4, None, 512, 462), (0,), spare_mib=600, reason="memory is in use")
    outcome = play(
        Cascade(FULL, ResourceVector(4, 824), 60.0, NO_APPLICATION),
        [
            Row(ReadGuest, {}, Measured, measured(FULL, (0,), spare_mib=600)),
            Row(Unplug, {"plugged_mib": 312}, Measured, half),
            Row(Throttle, {"cpu_cores": None, "balloon_mib": 362}, Measured, measured(Bound(4, None, 362, 462), (0,))),
        ],
    )
    assert entry(outcome, Layer.GUEST, "memory_mib").verified == 50
    assert entry(outcome, Layer.HYPERVISOR, "memory_mib").verified == 150
    assert "memory is in use" in entry(outcome, Layer.GUEST, "memory_mib").reason


def test_an_unplug_that_does_nothing_and_says_nothing_is_not_repeated() -> None:
    idle = measured(FULL, (0,), spare_mib=600)
    play(
        Cascade(FULL, ResourceVector(4, 824), 1e6, NO_APPLICATION),
        [
            Row(ReadGuest, {}, Measured, idle),
            Row(Unplug, {"plugged_mib": 312}, Measured, idle),
            Row(Throttle, {"balloon_mib": 312}, Measured, idle),
        ],
    )


def test_a_cpu_that_stays_on_line_does_not_keep_memory_from_being_unplugged() -> None:
    """Memory goes on by virtio-mem, the CPU is not asked for again, and quota takes it."""
    stuck: dict[str, Any] = {"online": (0, 1, 2, 3), "unpluggable": (3, 2, 1)}
    failed = measured(FULL, **stuck, spare_mib=400, reason="CPU 3: busy")
    half = measured(Bound(4, None, 512, 412), **stuck, spare_mib=400)
    outcome = play(
        Cascade(FULL, ResourceVector(3, 824), 60.0, NO_APPLICATION),
        [
            Row(ReadGuest, {}, Measured, measured(FULL, **stuck, spare_mib=200)),
            Row(Unplug, {"online": (0, 1, 2)}, Measured, failed),
            Row(Unplug, {"online": None, "plugged_mib": 412}, Measured, half),
            Row(Unplug, {"online": None, "plugged_mib": 312}, Measured, measured(Bound(4, None, 512, 312), **stuck)),
            Row(Throttle, {"cpu_cores": 3}, Measured, measured(Bound(4, 0.75, 512, 312), **stuck)),
        ],
    )
    assert entry(outcome, Layer.GUEST, "memory_mib").verified == 200
    assert entry(outcome, Layer.GUEST, "cpu_cores").verified == 0
    assert entry(outcome, Layer.HYPERVISOR, "cpu_cores").verified == 1
    assert entry(outcome, Layer.GUEST, "cpu_cores").reason == "CPU 3: busy"


def test_a_quota_from_an_earlier_deflation_is_spread_anew_as_soon_as_cpus_go_off_line() -> None:
    """2 cores as 4 x 0.5: with two CPUs off line the VM would have 1 core, below its target of 1.5."""
    before, off = Bound(4, 0.5, 512, 512), Bound(2, 0.5, 512, 412)
    settled = Bound(2, 0.75, 512, 412)
    outcome = play(
        Cascade(before, ResourceVector(1.5, 824), 60.0, NO_APPLICATION),
        [
            Row(ReadGuest, {}, Measured, measured(before, **ALL_CPUS, spare_mib=200)),
            Row(Unplug, {"online": (0, 1)}, Measured, measured(off, (0, 1), spare_mib=200)),
            Row(Throttle, {"cpu_cores": 1.5, "balloon_mib": None}, Measured, measured(settled, (0, 1), spare_mib=200)),
            Row(Unplug, {"plugged_mib": 412}, Measured, measured(Bound(2, 0.75, 512, 412), (0, 1), spare_mib=200)),
            Row(Unplug, {"plugged_mib": 312}, Measured, measured(Bound(2, 0.75, 512, 312), (0, 1))),
            Row(Throttle, {"cpu_cores": 1.5}, Measured, measured(Bound(2, 0.75, 512, 312), (0, 1))),
        ],
    )
    assert outcome.reached
    assert entry(outcome, Layer.GUEST, "cpu_cores").verified == 0
    assert entry(outcome, Layer.HYPERVISOR, "cpu_cores").verified == 0.5


def test_a_vm_without_a_memory_device_is_ballooned() -> None:
    before = Bound(1, None, 1024, 0)
    bare = without(Layer.APPLICATION, Mechanism.VIRTIO_MEM)
    play(
        Cascade(before, ResourceVector(1, 724), 60.0, bare),
        [
            Row(ReadGuest, {}, Measured, measured(before, spare_mib=800)),
            Row(Throttle, {"balloon_mib": 724}, Measured, measured(Bound(1, None, 724, 0), spare_mib=400)),
        ],
    )


def test_what_is_no_whole_block_goes_by_balloon() -> None:
    unplugged = measured(Bound(4, None, 512, 384), (0,), spare_mib=800)
    outcome = play(
        Cascade(FULL, ResourceVector(4, 883), 60.0, without(Layer.APPLICATION, block_mib=128.0)),
        [
            Row(ReadGuest, {}, Measured, measured(FULL, (0,), spare_mib=800)),
            Row(Unplug, {"plugged_mib": 384}, Measured, unplugged),
            Row(Throttle, {"balloon_mib": 499}, Measured, measured(Bound(4, None, 499, 384), (0,))),
        ],
    )
    assert outcome.reached


def test_the_balloon_goes_on_while_it_moves_and_stops_when_it_does_not() -> None:
    def balloon(mib: float) -> dict[str, Any]:
        return measured(Bound(1, None, mib, 512), spare_mib=100)

    outcome = play(
        Cascade(Bound(1, None, 512, 512), ResourceVector(1, 824), 60.0, HYPERVISOR_ONLY),
        [
            Row(ReadGuest, {}, Measured, balloon(512)),
            Row(Throttle, {"balloon_mib": 462}, Measured, balloon(462)),
            Row(Throttle, {"balloon_mib": 412}, Measured, balloon(440)),
            Row(Throttle, {"balloon_mib": 390}, Measured, balloon(440)),
        ],
    )
    assert "no further progress" in entry(outcome, Layer.HYPERVISOR, "memory_mib").reason
    assert outcome.shortfall == ResourceVector(memory_mib=128)


def test_a_boasting_guest_keeps_the_boot_memory_its_kernel_lives_in() -> None:
    """It says it can spare more than it has, and nothing can be unplugged: no balloon below the hard floor."""
    before = Bound(1, None, 384, 2000)
    play(
        Cascade(
            before,
            ResourceVector(1, 1000),
            60.0,
            without(Layer.APPLICATION, Mechanism.VIRTIO_MEM, Mechanism.MEMORY_LIMIT),
        ),
        [
            Row(ReadGuest, {}, Measured, measured(before, spare_mib=1e6)),
            Row(Throttle, {"balloon_mib": 192}, Measured, measured(Bound(1, None, 192, 2000), spare_mib=1e6)),
        ],
    )


def test_without_a_reading_of_the_bound_no_step_is_reckoned_from_an_old_one() -> None:
    """200 MiB were unplugged, but nobody could read it; ballooning for them again would end far below the target."""
    blind = measured(None, (0, 1, 2, 3), spare_mib=800)
    outcome = play(
        Cascade(FULL, ResourceVector(3.5, 824), 60.0, NO_APPLICATION),
        [
            Row(ReadGuest, {}, Measured, measured(FULL, (0, 1, 2, 3), spare_mib=800)),
            Row(Unplug, {"plugged_mib": 312}, Measured, blind),
            Row(ReadGuest, {}, Measured, blind),
            Row(Throttle, {"cpu_cores": 3.5, "balloon_mib": None}, Measured, blind),
        ],
    )
    assert "could not be read" in outcome.sentence


def test_without_a_reading_of_the_guest_no_memory_is_taken_but_cpu_is() -> None:
    silent = measured(FULL, None)
    outcome = play(
        Cascade(FULL, ResourceVector(2, 824), 60.0, NO_APPLICATION),
        [
            Row(ReadGuest, {}, Measured, silent),
            Row(ReadGuest, {}, Measured, silent),
            Row(Throttle, {"cpu_cores": 2, "balloon_mib": None}, Measured, measured(Bound(4, 0.5, 512, 512), None)),
        ],
    )
    assert outcome.shortfall == ResourceVector(memory_mib=200)
    assert entry(outcome, Layer.APPLICATION, "cpu_cores").reason == "the guest agent is not connected"


def test_a_deadline_of_zero_does_what_needs_no_waiting() -> None:
    outcome = play(
        Cascade(FULL, ResourceVector(2, 824), 0.0),
        [
            Row(ReadGuest, {"limit_s": 1.0}, Measured, measured(FULL, **ALL_CPUS, spare_mib=800)),
            Row(Throttle, {"cpu_cores": 2, "balloon_mib": None}, Measured, measured(Bound(4, 0.5, 512, 512), (0,))),
        ],
    )
    assert outcome.shortfall == ResourceVector(memory_mib=200)
    assert "no time" in entry(outcome, Layer.GUEST, "memory_mib").reason
    assert "stopped at the deadline" in entry(outcome, Layer.HYPERVISOR, "memory_mib").reason


def test_time_that_a_layer_leaves_over_passes_to_the_next() -> None:
    play(
        Cascade(FULL, ResourceVector(4, 824), 10.0),
        [
            Row(AskApplication, {"limit_s": 5}, ApplicationAnswered, answered(reason="no"), takes_s=1),
            Row(ReadGuest, {"limit_s": 7}, Measured, measured(FULL, (0,), spare_mib=100), takes_s=7),
            Row(Throttle, {"limit_s": 2, "balloon_mib": 462}, Measured, measured(FULL, (0,), spare_mib=100), takes_s=2),
        ],
    )


def test_bandwidth_is_throttled_from_outside() -> None:
    before = Bound(1, None, 512, 0, disk_mib_s=100, network_mib_s=50)
    outcome = play(
        Cascade(before, ResourceVector(1, 512, 40, 50), 60.0, HYPERVISOR_ONLY),
        [
            Row(
                Throttle,
                {"cpu_cores": None, "balloon_mib": None, "disk_mib_s": 40, "network_mib_s": None},
                Measured,
                measured(Bound(1, None, 512, 0, 40, 50)),
            ),
        ],
    )
    assert entry(outcome, Layer.HYPERVISOR, "disk_mib_s").verified == 60
    assert outcome.reached


def test_a_missing_quota_is_named_only_where_cpu_was_asked_for() -> None:
    bare = without(Layer.APPLICATION, Layer.GUEST, Mechanism.QUOTA, why={Mechanism.QUOTA: "no cgroup"})
    full = measured(FULL, (0,), spare_mib=800)
    memory = play(
        Cascade(FULL, ResourceVector(4, 924), 60.0, bare),
        [
            Row(ReadGuest, {}, Measured, full),
            Row(Throttle, {"balloon_mib": 412}, Measured, measured(Bound(4, None, 412, 512), (0,))),
        ],
    )
    assert entry(memory, Layer.HYPERVISOR, "memory_mib").reason == ""
    cpu = play(Cascade(FULL, ResourceVector(2, 1024), 60.0, bare), [])
    assert entry(cpu, Layer.HYPERVISOR, "cpu_cores").reason == "no cgroup"
    assert cpu.shortfall == ResourceVector(2)


def test_cpus_that_the_guest_puts_back_at_once_are_left_to_the_quota_after_one_reading_and_the_reason_says_so() -> None:
    held = Bound(4, 0.5, 512, 512)
    outcome = play(
        Cascade(FULL, ResourceVector(2.0, 1024), 60.0, NO_APPLICATION),
        [
            Row(ReadGuest, {}, Measured, measured(FULL, **ALL_CPUS)),
            Row(Unplug, {"online": (0, 1)}, Measured, measured(FULL, **ALL_CPUS), takes_s=0.5),
            Row(Throttle, {"cpu_cores": 2.0}, Measured, measured(held, **ALL_CPUS), takes_s=0.1),
        ],
    )
    assert outcome.reached
    assert outcome.seconds < 1.0
    reason = entry(outcome, Layer.GUEST, "cpu_cores").reason
    assert reason == "CPU 2, 3 is on line after it was to go off: the quota takes over"
    assert entry(outcome, Layer.HYPERVISOR, "cpu_cores").verified == 2.0
