"""When a guest that does not answer probably will: what is learned of boots, and when it counts as never."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.cascade.readiness import (
    LEAST_PATIENCE_S,
    LONGEST_S,
    PRIOR_S,
    REMEMBERED,
    VMS_REMEMBERED,
    BootTimes,
    NotYet,
    Readiness,
    Silence,
)

NOTHING = BootTimes()


def learned(*boots: tuple[str, float]) -> BootTimes:
    times = NOTHING
    for vm, seconds in boots:
        times = times.with_boot(vm, seconds)
    return times


def test_without_any_boot_the_prior_counts() -> None:
    assert NOTHING.expected_s("low-1") == PRIOR_S
    assert NOTHING.left_s("low-1", 10.0) == PRIOR_S - 10.0


def test_a_vm_goes_by_the_longest_of_its_own_last_boots() -> None:
    times = learned(("low-1", 90.0), *[("low-1", 7.0 + n) for n in range(REMEMBERED)])
    assert times.expected_s("low-1") == 7.0 + REMEMBERED - 1, "the first is forgotten"


def test_a_vm_that_has_not_booted_here_goes_by_three_in_four_of_the_others() -> None:
    times = learned(*[(f"vm-{n}", float(n)) for n in range(1, 10)])
    assert times.expected_s("new") == 7.0


def test_one_that_is_late_probably_takes_half_as_long_again_and_then_never_comes() -> None:
    times = learned(("low-1", 8.0))
    assert times.left_s("low-1", 7.5) == 0.5
    assert times.left_s("low-1", 20.0) == 10.0
    assert times.left_s("low-1", LEAST_PATIENCE_S) is None
    assert learned(("slow", 200.0)).left_s("slow", 700.0) == 350.0, "a slow one is waited for longer"
    assert learned(("slow", 200.0)).left_s("slow", 800.0) is None


def test_no_guest_makes_itself_waited_for_for_hours_by_slow_boots() -> None:
    assert learned(("low-1", 1e6)).expected_s("low-1") == LONGEST_S


def test_of_many_vms_the_one_that_booted_longest_ago_is_forgotten() -> None:
    times = learned(*[(f"vm-{n}", 5.0) for n in range(VMS_REMEMBERED)], ("vm-0", 6.0), ("new", 5.0))
    assert len(times.seen) == VMS_REMEMBERED
    assert "vm-1" not in times.seen
    assert times.seen["vm-0"] == [5.0, 6.0]


@given(st.lists(st.floats(0.1, 400.0), max_size=8), st.floats(0.0, 2000.0), st.floats(0.0, 2000.0))
def test_one_that_never_comes_is_not_expected_again(boots: list[float], one: float, other: float) -> None:
    times = learned(*[("low-1", seconds) for seconds in boots])
    early, late = sorted((one, other))
    left = times.left_s("low-1", early)
    assert left is None or left >= 0
    if left is None:
        assert times.left_s("low-1", late) is None
    assert times.left_s("low-1", early) is not None or early >= LEAST_PATIENCE_S


def look(readiness: Readiness, now: float, connected: bool = False) -> NotYet | None:
    return readiness.not_yet(now, connected, NOTHING, "low-1")


def test_a_guest_that_boots_is_expected_and_its_boot_is_learned_once() -> None:
    readiness = Readiness()
    readiness.booting(100.0)
    assert look(readiness, 104.0) == NotYet(Silence.BOOTING, PRIOR_S - 4.0)
    assert readiness.heard(107.0, "boot-1") == 7.0
    assert look(readiness, 108.0, connected=True) is None
    # The connection breaks, and the same boot says hello again.
    assert look(readiness, 120.0) == NotYet(Silence.LOST, PRIOR_S)
    assert readiness.heard(121.0, "boot-1") is None


def test_a_reboot_is_learned_as_a_boot() -> None:
    readiness = Readiness()
    readiness.booting(0.0)
    readiness.heard(7.0, "boot-1")
    readiness.booting(50.0, Silence.REBOOTING)
    assert look(readiness, 52.0) == NotYet(Silence.REBOOTING, PRIOR_S - 2.0)
    assert readiness.heard(59.0, "boot-2") == 9.0


def test_a_silence_whose_beginning_was_not_seen_teaches_nothing() -> None:
    found_by_a_new_agent = Readiness()
    assert look(found_by_a_new_agent, 10.0) == NotYet(Silence.LOST, PRIOR_S)
    assert look(found_by_a_new_agent, 15.0) == NotYet(Silence.LOST, PRIOR_S - 5.0)
    assert found_by_a_new_agent.heard(16.0, "boot-1") is None


def test_one_that_was_off_boots_when_it_runs_whoever_started_it() -> None:
    readiness = Readiness()
    readiness.booting(0.0)
    readiness.heard(7.0, "boot-1")
    readiness.off()
    assert look(readiness, 60.0) == NotYet(Silence.BOOTING, PRIOR_S)


def test_an_agent_that_never_comes_is_not_expected_any_more() -> None:
    readiness = Readiness()
    readiness.booting(0.0)
    assert look(readiness, LEAST_PATIENCE_S - 1) is not None
    assert look(readiness, LEAST_PATIENCE_S) is None
