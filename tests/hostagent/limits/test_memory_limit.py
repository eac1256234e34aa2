"""The way to a memory limit, on cgroup v1 and v2, with kernel and libvirt made up: several VMs on one swap, failures.

The real ones are in tests/guests/test_host_memory.py and tests/guests/test_cgroup_v2.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import libvirt
import pytest

from ebbtide.deflation.cascade.backing import Swap
from hostagent.errors import HypervisorError, HypervisorTimeout
from hostagent.limits import memory_limit
from hostagent.limits.cgroups import MIB, NO_RECLAIM, CgroupError
from hostagent.limits.footprints import LimitedVM
from hostagent.threads import LIMITS
from tests.hostagent.limits.limited_vms import ALLOWANCE_MIB, VM, LibvirtRefuses, Limits


async def test_on_version_1_the_limit_goes_down_in_growing_steps(limits: Limits) -> None:
    vm = VM()
    _, made = limits(a=vm)
    assert await made.set("ebb-a.a", 400, 30) == ""
    assert vm.limit_mib == 400
    assert vm.limits[:4] == [684, 652, 604, 540], "16, 32, 48, 64 MiB below the usage"
    assert vm.held, "what the kernel cannot keep makes the VM wait, not die"


async def test_on_version_2_the_limit_is_set_only_once_the_usage_is_below(limits: Limits) -> None:
    vm = VM(version=2)
    _, made = limits(a=vm)
    assert await made.set("ebb-a.a", 400, 30) == ""
    assert vm.limits == [500]
    assert len(vm.reclaims) >= 4
    assert max(vm.reclaims) <= 5 * 16 + 1, "step by step"


@pytest.mark.parametrize("version", [1, 2])
async def test_memory_that_cannot_be_reclaimed_leaves_the_limit_where_it_got_to(limits: Limits, version: int) -> None:
    vm = VM(version=version, least_mib=600)
    _, made = limits(a=vm)
    reason = await made.set("ebb-a.a", 400, 30)
    assert "instead of 400" in reason
    assert "brought nothing" in reason
    assert vm.limit_mib is not None
    assert 500 <= vm.limit_mib <= 520
    assert vm.hard_mib is not None
    assert vm.usage_mib <= vm.hard_mib


async def test_on_version_2_a_usage_that_grows_at_the_last_moment_gets_no_limit_below_it(limits: Limits) -> None:
    vm = VM(version=2, usage_mib=480, least_mib=1e9)
    _, made = limits(a=vm)
    looks = iter([480])

    def usage() -> int:
        return next(looks, 600) * MIB

    vm.usage = usage  # type: ignore[method-assign]
    reason = await made.set("ebb-a.a", 400, 30)
    assert reason.startswith("the memory limit stopped at 516 MiB instead of 400")
    assert vm.limits == [616]


async def test_on_version_2_a_limit_without_time_for_a_step_is_not_below_what_was_asked_for(limits: Limits) -> None:
    """Many at once wait for one another: a guest that has touched little would be held to just that."""
    idle, busy = VM(version=2, usage_mib=300), VM(version=2)
    _, made = limits(a=idle, b=busy)
    assert await made.set("ebb-a.a", 400, 0) == ""
    assert idle.limits == [500]
    assert await made.set("ebb-a.b", 400, 0) == "the memory limit stopped at 616 MiB instead of 400: its time was up"


async def test_on_version_2_an_attempt_that_brings_nothing_does_not_raise_the_limit_before_it(limits: Limits) -> None:
    vm = VM(version=2, usage_mib=600, least_mib=600, hard_mib=600)
    _, made = limits(a=vm)
    for _ in range(2):
        assert (await made.set("ebb-a.a", 400, 30)).startswith("the memory limit stopped at 500 MiB instead of 400")
    assert (vm.limit_mib, vm.limits) == (500, [])


async def test_a_kernel_that_cannot_reclaim_is_a_reason_and_no_error(limits: Limits) -> None:
    vm = VM(version=2, kernel_is_old=True)
    _, made = limits(a=vm)
    assert await made.set("ebb-a.a", 400, 30) == f"no memory limit of 400 MiB: {NO_RECLAIM}"
    assert vm.limits == []
    assert vm.reclaims == []


@pytest.mark.parametrize("version", [1, 2])
async def test_without_psi_the_refaults_alone_say_when_memory_is_in_use(limits: Limits, version: int) -> None:
    calm, busy = VM(version=version, psi=False), VM(version=version, psi=False, refaults_a_look=100_000)
    _, made = limits(a=calm, b=busy)
    assert await made.set("ebb-a.a", 400, 30) == ""
    assert calm.limit_mib == 400
    reason = await made.set("ebb-a.b", 400, 30)
    assert "pages a second fetched back" in reason
    assert busy.limit_mib is not None
    assert busy.limit_mib > 400


async def test_two_limits_do_not_count_on_the_same_swap(limits: Limits) -> None:
    first, second = VM(), VM()
    machine, made = limits(a=first, b=second)
    machine.swap = Swap(600, 600)
    assert await made.set("ebb-a.a", 400, 30) == ""
    machine.swap = Swap(600, 600 - first.swapped_mib)
    reason = await made.set("ebb-a.b", 400, 30)
    assert "it may need 368 MiB more" in reason
    assert "back other limits" in reason
    assert second.limits == []


async def test_a_limit_that_libvirt_may_set_late_keeps_others_off_its_swap_until_it_has(
    limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, made = limits(a=VM(version=2, usage_mib=300), b=VM())
    machine.swap = Swap(600, 600)
    late, call = machine.vms["ebb-a.a"], machine.call

    async def hangs(function: Callable[[Any], Any], *, modifies: str | None = None, limit_s: float = 15.0) -> Any:
        if modifies == "ebb-a.a":
            raise HypervisorTimeout("libvirt did not answer within 30 s")
        return await call(function)

    monkeypatch.setattr(machine, "call", hangs)
    for _ in range(2):
        with pytest.raises(HypervisorTimeout):
            await made.set("ebb-a.a", 400, 30)
        assert "368 MiB back other limits" in await made.set("ebb-a.b", 400, 30)
    late.hard_mib = 400 + ALLOWANCE_MIB
    machine.answered["ebb-a.a"].set()
    await asyncio.sleep(0.01)
    assert "368 MiB back other limits" in await made.set("ebb-a.b", 400, 30), "it has been set"
    late.hard_mib = None
    assert await made.set("ebb-a.b", 400, 30) == "", "it is gone"
    await made.close()
    assert len(asyncio.all_tasks()) == 1


async def test_a_limit_that_comes_into_force_while_another_one_is_reckoned_is_counted(
    limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, made = limits(a=VM(version=2, usage_mib=300), b=VM(), c=VM(hard_mib=768 + ALLOWANCE_MIB))
    machine.swap = Swap(600, 600)
    look, looked, go_on = made._look, asyncio.Event(), asyncio.Event()

    async def slowly(domain: str, measure: bool = True, limit_s: float = 15.0) -> LimitedVM:
        if domain == "ebb-a.c":
            looked.set()
            await go_on.wait()
        return await look(domain, measure, limit_s)

    approach, begun, reached = made._approach, asyncio.Event(), asyncio.Event()

    async def later(domain: str, vm: LimitedVM, limit_mib: float, until: float) -> str:
        if domain == "ebb-a.a":
            begun.set()
            await reached.wait()
        return await approach(domain, vm, limit_mib, until)

    go_on.set()
    monkeypatch.setattr(made, "_look", slowly)
    monkeypatch.setattr(made, "_approach", later)
    first = asyncio.create_task(made.set("ebb-a.a", 400, 30), name="first")
    await begun.wait()
    looked.clear()
    go_on.clear()
    second = asyncio.create_task(made.set("ebb-a.b", 400, 30), name="second")
    await looked.wait()
    reached.set()
    assert await first == ""
    go_on.set()
    assert "368 MiB back other limits" in await second
    assert machine.vms["ebb-a.b"].limits == []


async def test_a_limit_is_not_set_while_it_is_unknown_what_another_one_counts_on(limits: Limits) -> None:
    first, second = VM(hard_mib=500, swapped_mib=0), VM()
    machine, made = limits(a=first, b=second)
    machine.unreadable = {"ebb-a.a"}
    with pytest.raises(HypervisorError, match="did not answer"):
        await made.set("ebb-a.b", 400, 30)
    assert second.limits == []
    assert await made.check("ebb-a.") == {}, "and no limit that stands is lifted for that"
    first.hard_mib = None
    assert await made.set("ebb-a.b", 400, 30) == "", "one that has ended counts on nothing"


async def test_swap_that_vanishes_on_the_way_ends_it_and_lifts_the_limit(limits: Limits) -> None:
    vm = VM()
    machine, made = limits(a=vm)

    def vanish() -> None:
        if len(vm.limits) == 2:
            machine.swap = Swap(0, 0)

    vm.meanwhile = vanish
    reason = await made.set("ebb-a.a", 400, 30)
    assert reason.startswith("no memory limit of 400 MiB: the host has no swap")
    assert vm.hard_mib is None
    assert not vm.held


async def test_the_check_lifts_as_many_limits_as_must_go(limits: Limits) -> None:
    first = VM(hard_mib=500, swapped_mib=200)
    second = VM(hard_mib=500, swapped_mib=200)
    free = VM()
    machine, made = limits(a=first, b=second, c=free)
    machine.swap = Swap(1000, 500)
    assert await made.check("ebb-a.") == {}
    machine.swap = Swap(1000, 300)
    assert list(await made.check("ebb-a.")) == ["ebb-a.a"]
    assert (first.hard_mib, second.hard_mib) == (None, 500)
    machine.swap = Swap(0, 0)
    assert list(await made.check("ebb-b.")) == [], "those of another agent are its own business"
    assert list(await made.check("ebb-a.")) == ["ebb-a.b"]
    assert free.limits == []


async def test_the_check_lifts_a_limit_while_the_kernel_reclaims_memory_of_many_vms(limits: Limits) -> None:
    """Each of them keeps a thread, and asyncio's own are a few more than there are CPUs."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    standing = VM(hard_mib=500, swapped_mib=200)
    slow = {f"s{number}": VM(version=2) for number in range(4)}
    machine, made = limits(a=standing, **slow)
    in_kernel, go_on = threading.Semaphore(0), threading.Event()

    def reclaim(_amount: int) -> int:
        in_kernel.release()
        go_on.wait(60.0)
        return 0

    for vm in slow.values():
        vm.reclaim = reclaim  # type: ignore[method-assign, assignment]
    setting = [asyncio.create_task(made.set(f"ebb-a.{name}", 400, 0.5)) for name in slow]
    try:
        async with asyncio.timeout(20.0):
            for _ in slow:
                await LIMITS.run(in_kernel.acquire)
            machine.swap = Swap(0, 0)
            assert list(await made.check("ebb-a.")) == ["ebb-a.a"]
            await asyncio.to_thread(len, slow)  # so does the journal write
    finally:
        go_on.set()
        await asyncio.gather(*setting)
    assert standing.hard_mib is None


@pytest.mark.parametrize("version", [1, 2])
async def test_a_vm_that_came_back_with_a_limit_waits_at_it_instead_of_being_killed(
    limits: Limits, version: int
) -> None:
    """From a snapshot, or from memory that another program has saved."""
    vm = VM(version=version, hard_mib=500)
    _, made = limits(a=vm)
    assert await made.check("ebb-a.") == {}
    assert (vm.held, vm.hard_mib) == (version == 1, 500)


async def test_a_limit_that_is_lifted_while_it_is_looked_at_leaves_nothing_that_waits(limits: Limits) -> None:
    vm = VM(hard_mib=500)
    _, made = limits(a=vm)
    have_it_wait = vm.hold_at_limit

    def lifted_meanwhile(hold: bool) -> bool:
        vm.hard_mib = None
        return have_it_wait(hold)

    vm.hold_at_limit = lifted_meanwhile  # type: ignore[method-assign]
    assert await made.check("ebb-a.") == {}
    assert not vm.held


async def test_a_vm_that_waits_at_its_limit_tries_again_under_a_higher_one_and_keeps_the_limit(limits: Limits) -> None:
    vm = VM(hard_mib=500, held=True, waits=True)
    _, made = limits(a=vm)
    for _ in range(3):
        assert await made.check("ebb-a.") == {}
    assert vm.raised == [516]
    assert vm.hard_mib == 500
    vm.waits = True  # much later, once more
    assert await made.check("ebb-a.") == {}
    assert vm.raised == [516, 516]


async def test_a_vm_that_still_waits_at_its_limit_at_the_next_look_gets_its_memory_back(limits: Limits) -> None:
    vm = VM(hard_mib=500, held=True, waits=True, for_ever=True)
    _, made = limits(a=vm)
    assert await made.check("ebb-a.") == {}
    assert await made.check("ebb-a.") == {
        "ebb-a.a": "the VM stands still: what it needs at its limit cannot be reclaimed"
    }
    assert vm.hard_mib is None
    assert not vm.held


async def test_a_vm_that_waits_at_its_limit_is_helped_although_its_monitor_hangs(limits: Limits) -> None:
    vm = VM(hard_mib=500, held=True, waits=True, for_ever=True)
    machine, made = limits(a=vm)
    machine.unreadable = {"ebb-a.a"}
    assert await made.check("ebb-a.") == {}
    assert vm.raised == [516]
    assert list(await made.check("ebb-a.")) == ["ebb-a.a"]
    assert vm.hard_mib is None


async def test_limits_that_swap_backs_no_more_are_lifted_although_libvirt_does_not_answer(limits: Limits) -> None:
    first, second = VM(hard_mib=500, swapped_mib=200), VM(hard_mib=500, swapped_mib=200)
    machine, made = limits(a=first, b=second)
    machine.swap = Swap(1000, 500)
    assert await made.check("ebb-a.") == {}
    machine.unreadable, machine.looks = set(machine.vms), 0
    for vm in machine.vms.values():
        vm.broken = LibvirtRefuses(libvirt.VIR_ERR_OPERATION_TIMEOUT)
    assert await made.check("ebb-a.") == {}, "no answer is no reason"
    assert machine.looks == 1, "nor is each of them waited for"
    first.swapped_mib, machine.swap = 300, Swap(1000, 300)
    assert await made.check("ebb-a.") == {}, "what has gone to swap since needs no more room there"
    machine.swap = Swap(1000, 280)
    assert list(await made.check("ebb-a.")) == ["ebb-a.a"]
    assert (first.hard_mib, second.hard_mib) == (None, 500)
    machine.swap = Swap(0, 0)
    assert list(await made.check("ebb-a.")) == ["ebb-a.b"]
    assert second.hard_mib is None


async def test_a_libvirt_that_hangs_does_not_hold_up_the_next_look_at_the_limits(
    limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limit, "TOLD_WITHIN_S", 0.01)
    first, second = VM(hard_mib=500, swapped_mib=200), VM(hard_mib=500, swapped_mib=200)
    machine, made = limits(a=first, b=second)
    machine.swap = Swap(1000, 500)
    assert await made.check("ebb-a.") == {}
    call = machine.call

    async def hangs(function: Callable[[Any], Any], *, modifies: str | None = None, limit_s: float = 15.0) -> Any:
        return await (asyncio.Event().wait() if modifies else call(function))

    monkeypatch.setattr(machine, "call", hangs)
    first.swapped_mib, machine.swap = 300, Swap(1000, 280)
    assert list(await made.check("ebb-a.")) == ["ebb-a.a"]
    machine.swap = Swap(0, 0)
    assert list(await made.check("ebb-a.")) == ["ebb-a.b"]
    assert (first.hard_mib, second.hard_mib) == (None, None)
    await made.close()
    assert len(asyncio.all_tasks()) == 1, "nothing is told any more"


async def test_a_domain_that_hangs_is_asked_last_and_hides_no_other(limits: Limits) -> None:
    first, second = VM(hard_mib=500), VM(hard_mib=500)
    machine, made = limits(a=first, b=second)
    assert await made.check("ebb-a.") == {}
    machine.unreadable = {"ebb-a.a"}
    assert await made.check("ebb-a.") == {}
    second.touchable_mib, machine.looks = 5000, 0
    assert "ebb-a.b" in await made.check("ebb-a."), "by what libvirt says of it now"
    assert machine.looks == 2


async def test_what_libvirt_said_of_an_earlier_run_of_a_domain_does_not_count(limits: Limits) -> None:
    vm = VM(hard_mib=500)
    machine, made = limits(a=vm)
    assert await made.check("ebb-a.") == {}
    machine.unreadable, machine.swap = {"ebb-a.a"}, Swap(0, 0)
    earlier, machine.vms["ebb-a.a"] = vm, VM(hard_mib=500)
    machine.vms["ebb-a.a"].pid = 2
    made._groups.clear()
    assert await made.check("ebb-a.") == {}
    assert earlier.hard_mib == machine.vms["ebb-a.a"].hard_mib == 500


async def test_a_limit_that_is_lifted_while_its_vm_tries_again_is_not_put_back(limits: Limits) -> None:
    vm = VM(hard_mib=500, held=True, waits=True)
    _, made = limits(a=vm)
    write = vm.set_limit

    def lifted_then(limit: int | None) -> bool:
        assert write(limit)
        vm.hard_mib = None
        return True

    vm.set_limit = lifted_then  # type: ignore[method-assign]
    assert await made.check("ebb-a.") == {}
    assert vm.raised == [516]
    assert vm.hard_mib is None


async def test_a_limit_is_lifted_although_libvirt_does_not_answer(limits: Limits) -> None:
    vm = VM(hard_mib=500, held=True)
    _, made = limits(a=vm)
    vm.broken = LibvirtRefuses(libvirt.VIR_ERR_OPERATION_TIMEOUT)
    await made.lift("ebb-a.a")
    assert vm.hard_mib is None
    assert not vm.held


async def test_a_limit_that_neither_way_can_lift_is_an_error(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    vm = VM(hard_mib=500)
    _, made = limits(a=vm)
    vm.broken = LibvirtRefuses(libvirt.VIR_ERR_OPERATION_TIMEOUT)

    def gone(_domain: str, _files: Path) -> str:
        raise CgroupError("no such process")

    monkeypatch.setattr(memory_limit, "qemu_pid", gone)
    with pytest.raises(HypervisorError):
        await made.lift("ebb-a.a")


async def test_a_higher_limit_needs_no_swap(limits: Limits) -> None:
    vm = VM(hard_mib=500)
    machine, made = limits(a=vm)
    machine.swap = Swap(0, 0)
    assert await made.set("ebb-a.a", 500, 30) == ""
    assert vm.limit_mib == 500


async def test_a_limit_on_more_than_the_guest_can_touch_is_none(limits: Limits) -> None:
    vm = VM(hard_mib=500)
    _, made = limits(a=vm)
    assert await made.set("ebb-a.a", 768, 30) == ""
    assert vm.hard_mib is None


STOOD = "it was lifted meanwhile: the VM stands still: what it needs at its limit cannot be reclaimed"


@pytest.mark.parametrize("when", ["_observe", "_step"], ids=["between two steps", "as a step is being made"])
async def test_a_limit_that_the_watch_lifts_on_its_way_is_given_up_and_never_comes_back_without_a_hold(
    limits: Limits, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    vm = VM()
    _, made = limits(a=vm)
    as_ever, times = getattr(made, when), 0

    async def watched(*arguments: Any) -> Any:
        nonlocal times
        times += 1
        if times == 2:
            vm.waits = vm.for_ever = True
            assert [await made.check("ebb-a."), list(await made.check("ebb-a."))] == [{}, ["ebb-a.a"]]
            assert (vm.hard_mib, vm.held) == (None, False)
            vm.waits = vm.for_ever = False
        return await as_ever(*arguments)

    monkeypatch.setattr(made, when, watched)
    assert await made.set("ebb-a.a", 400, 30) == f"no memory limit of 400 MiB: {STOOD}"
    assert (vm.hard_mib, vm.held) == (None, False)
    assert len([limit for limit in vm.limits if limit is not None]) == 2
    # The next one is none of that.
    assert await made.set("ebb-a.a", 400, 30) == ""
    assert vm.limit_mib == 400


async def test_a_limit_that_the_watch_lifts_as_libvirt_is_about_to_set_one_stands_with_a_hold_until_that_goes_too(
    limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm, stood = VM(), []
    _, made = limits(a=vm)
    settle = made._settle

    def lifted() -> None:
        if len(vm.limits) == 1:
            vm.waits = True
            assert made._lift_in_cgroup("ebb-a.a")
            vm.waits = False
            made._approached["ebb-a.a"] = "the VM stands still"

    async def settling(*arguments: Any) -> str:
        stood.append((vm.hard_mib == vm.limits[1], vm.held))
        return await settle(*arguments)

    vm.meanwhile = lifted
    monkeypatch.setattr(made, "_settle", settling)
    assert "it was lifted meanwhile" in await made.set("ebb-a.a", 400, 30)
    assert stood == [(True, True)]
    assert (vm.hard_mib, vm.held) == (None, False)
