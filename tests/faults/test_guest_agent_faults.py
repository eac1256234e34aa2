"""The guest agent dies, stops, lies or floods; real guests (docs/reference/faults.md)."""

from __future__ import annotations

import pytest

from tests.faults.ward import LOW, PERIOD_S, Ward

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]


async def test_a_guest_agent_that_is_killed_in_a_deflation_costs_time_only(ward: Ward) -> None:
    request_id = await ward.begin_target(1.5, 480)
    await ward.until_falling()
    await ward.hand().restart_agent()
    operation = await ward.ended(request_id)
    assert operation.state.value in ("done", "partial"), operation.sentence
    await ward.connected()
    await ward.hold()


async def test_of_a_guest_whose_agent_stands_still_only_cpu_is_taken_by_quota(ward: Ward) -> None:
    hand = ward.hand()
    pid = await hand.pid("-m guestagent")
    await hand.signal("STOP", pid)
    try:
        operation = await ward.target(1.5, 480)
        assert operation.state.value == "partial"
        (outcome,) = operation.vms
        assert outcome.after.memory_mib == 768, "memory was taken without a word of the guest"
        assert outcome.after.cpu_cores == pytest.approx(1.5, abs=0.01)
        assert "the guest agent" in operation.sentence
        # All three CPUs stay on line: each has a part of the quota.
        assert await hand.online() == (0, 1, 2)
        await ward.hold()
    finally:
        await hand.signal("CONT", pid)
    await ward.connected()
    assert (await ward.target(1.5, 480)).state.value == "done"
    await ward.hold()


async def test_a_guest_whose_agent_stops_keeps_its_size_on_the_one_cpu_that_is_left_on_line(ward: Ward) -> None:
    assert (await ward.target(0.9, 768)).state.value == "done"
    hand, vm = ward.hand(), ward.host.vm(LOW)
    assert await hand.online() == (0,)
    pid = await hand.pid("-m guestagent")
    await hand.signal("STOP", pid)
    try:
        vm.request_check()
        await ward.until("the guest has fallen silent", lambda: not vm.link.connected)
        looks = vm.drift_repair.looks
        await ward.until("it was looked at again", lambda: vm.drift_repair.looks >= looks + 2)
        seen = await ward.seen(LOW)
        assert seen.held.cpu_cores == pytest.approx(0.9, abs=0.01)
        await ward.hold()
    finally:
        await hand.signal("CONT", pid)
    await ward.connected()


async def test_cpus_that_a_lying_agent_calls_off_line_are_held_by_the_cap_of_the_domain(ward: Ward) -> None:
    async with ward.hand().impostor("liar", "cpus"):
        await ward.connected()
        operation = await ward.target(1.0, 768)
        assert operation.state.value == "done", operation.sentence
        assert await ward.hand().online() == (0, 1, 2)
        # One that idles uses nothing that could be seen.
        async with ward.hand().running("pin_cpu", "1", "busy"):
            vm = ward.host.vm(LOW)
            await ward.until("the lie was counted", lambda: vm.status().broken_offline_total > 0)
        await ward.hold()
    await ward.connected()


@pytest.mark.parametrize("window_s", [10.0, pytest.param(30.0, marks=pytest.mark.deep)], ids=["run", "deep"])
async def test_a_root_who_fights_back_with_all_means_gets_no_more_cpu_than_is_committed(
    ward: Ward, window_s: float
) -> None:
    """CPUs put on line in a loop, the agent killed, and one in its place that lies alternately; twice the window."""
    committed = 0.5  # so little that a busy host can give more
    assert (await ward.target(committed, 768)).state.value == "done"
    hand = ward.hand()
    used = []
    async with hand.impostor("liar", "alternately"):
        await ward.connected()
        async with hand.running("rogue"):
            used.append(await ward.cores_used(window_s))
    async with hand.running("rogue", "kill"):
        used.append(await ward.cores_used(window_s))
    print(f"cores used of {committed:g} committed, over {window_s:g} s each: {used}")
    # A window may begin and end within a period of the quota. The cap is 3 % more, and 4 % over that were seen on a
    # slow machine (.535 of .5); without a cap it would be twice as much.
    assert max(used) <= committed * (1.08 + PERIOD_S / window_s), used
    assert max(used) >= committed * 0.5, f"the guest was to fight for more: {used}"
    await hand.awaken_agent()
    await ward.connected()
    await ward.hold()


async def test_frozen_figures_of_the_guest_do_not_starve_it(ward: Ward) -> None:
    """What the guest said at first is far more than what it can spare by now."""
    hand = ward.hand()
    async with hand.impostor("liar", "memory"):
        await ward.connected()
        async with hand.running("hog", "400"):
            operation = await ward.target(3.0, 330)
            assert operation.state.value == "partial", operation.sentence
            await ward.hold()
    await ward.connected()


async def test_what_an_application_only_claims_to_have_freed_counts_for_nothing(ward: Ward) -> None:
    async with ward.hand().impostor("liar", "application"):
        await ward.connected()
        operation = await ward.target(3.0, 560)
        assert operation.state.value == "done", operation.sentence
        rows = {row.layer.value: row for row in operation.vms[0].ledger}
        assert rows["application"].promised > 0
        assert rows["application"].verified <= rows["guest"].verified
        fall = operation.vms[0].before.memory_mib - operation.vms[0].after.memory_mib
        assert rows["guest"].verified + rows["hypervisor"].verified == pytest.approx(fall, abs=2)
        await ward.hold()
    await ward.connected()


@pytest.mark.parametrize("kind", ["many", "long"])
async def test_a_guest_that_floods_its_channel_loses_the_conversation_and_no_more(ward: Ward, kind: str) -> None:
    hand = ward.hand()
    async with hand.impostor("flood", kind):
        await ward.until("the conversation is over", lambda: not ward.host.vm(LOW).link.connected)
        operation = await ward.target(2.0, 600)
        assert operation.state.value == "partial"
        assert operation.vms[0].after.memory_mib == 768
        assert operation.vms[0].after.cpu_cores == pytest.approx(2.0, abs=0.01)
        await ward.hold()
    await ward.connected()
