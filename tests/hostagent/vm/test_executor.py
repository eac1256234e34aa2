"""What a guest can spare, by its agent's word and by its kernel's."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest

from ebbtide.deflation.cascade.instructions import (
    ApplicationReported,
    AskApplication,
    ColdReclaimed,
    Measured,
    Mode,
    PollApplication,
    ReclaimCold,
    Unplug,
)
from ebbtide.deflation.cascade.ordinary import OrdinaryGuest
from ebbtide.deflation.cascade.reinflation import TellApplication, Told
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.guest import ApplicationPromise, ApplicationRelease, ColdFreed, Cpus, CpusSet, GuestStatus, Memory
from hostagent.errors import GuestRefused, GuestUnreachable, HypervisorError
from hostagent.libvirt.hypervisor import GuestCpus, HostSideReading
from hostagent.vm import executor as module
from hostagent.vm.executor import Executor


class Link:
    """A guest agent that says always the same."""

    def __init__(self, available_mib: float) -> None:
        self._available_mib = available_mib

    async def call(self, method: str, params: Any, answer: Any, limit_s: float, breaks: bool = True) -> Any:
        memory = Memory(
            total_mib=1000,
            available_mib=self._available_mib,
            reserve_mib=48,
            floor_mib=0,
            unpluggable_mib=self._available_mib - 48,
        )
        return GuestStatus(boot_id="b", uptime_s=100, cpus=Cpus(present=[0], online=[0], unpluggable=[]), memory=memory)


class Statistics:
    """A hypervisor whose balloon statistics go on from one reading to the next."""

    def __init__(self, *said: tuple[float | None, float]) -> None:
        self._said = list(said)
        self.readings = 0

    async def read(self, domain: str) -> HostSideReading:
        self.readings += 1
        usable_mib, at = self._said[min(self.readings, len(self._said)) - 1]
        return HostSideReading(1, None, 512, 512, usable_mib=usable_mib, usable_at=at)


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KERNEL_LOOK_S", 0.001)
    # Where the time is not to run out it does not on a busy machine either.
    monkeypatch.setattr(module, "KERNEL_SPEAKS_S", 20.0)


async def spare(available_mib: float, statistics: Statistics) -> float:
    executor = Executor("domain", statistics, Link(available_mib), "request")  # type: ignore[arg-type]
    _, guest = await executor.measure(waits=True)
    assert guest is not None
    return guest.spare_mib


async def test_without_the_kernels_word_the_agents_counts() -> None:
    assert await spare(500, Statistics((None, 0))) == 452


async def test_the_lower_of_both_counts() -> None:
    assert await spare(500, Statistics((300, 7))) == 252
    assert await spare(200, Statistics((900, 7))) == 152


async def test_what_was_freed_just_now_is_waited_for_in_the_kernels_next_word() -> None:
    statistics = Statistics((60, 7), (60, 7), (480, 8))
    assert await spare(500, statistics) == 432
    assert statistics.readings == 3


async def test_an_agent_whose_kernel_keeps_saying_less_is_not_believed() -> None:
    assert await spare(500, Statistics((60, 7), (58, 8))) == 10


async def test_a_kernel_that_says_nothing_new_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KERNEL_SPEAKS_S", 0.05)
    assert await spare(500, Statistics((60, 7))) == 12


async def test_a_quota_is_never_spread_over_vcpus_as_they_were_before_more_were_plugged() -> None:
    class Plugging(Statistics):
        vcpus = 1
        quota: tuple[float | None, float | None] | None = None

        async def read(self, domain: str) -> HostSideReading:
            return replace(await super().read(domain), vcpus=self.vcpus)

        async def set_vcpus(self, domain: str, count: int, limit_s: float) -> str:
            self.vcpus = count
            raise HypervisorError("libvirt is busy")

        async def set_quota(self, domain: str, cores_per_cpu: float | None, cap_cores: float | None) -> None:
            self.quota = cores_per_cpu, cap_cores

    sizes = Plugging((500, 1))
    executor = Executor("domain", sizes, Link(500), "request")  # type: ignore[arg-type]
    await executor.measure()
    with pytest.raises(HypervisorError):
        await executor._plug_vcpus(4, 0.0)
    await executor.enforce_cpu(2.0, 4)
    assert sizes.quota is not None
    assert sizes.quota == pytest.approx((0.5, 2.06))


@pytest.mark.parametrize("answers", [True, False])
async def test_a_qemu_guest_agent_is_asked_once_and_again_only_for_cpus_where_it_answers(answers: bool) -> None:
    class Asked(Statistics):
        times = 0

        async def read(self, domain: str) -> HostSideReading:
            return replace(await super().read(domain), vcpus=2, qemu_agent=True)

        async def guest_cpus(self, domain: str) -> GuestCpus | None:
            self.times += 1
            return GuestCpus((0, 1), (1,)) if answers else None

        async def set_guest_cpus(self, domain: str, online: tuple[int, ...]) -> str:
            return ""

    class Silent(Link):
        async def call(self, method: str, params: Any, answer: Any, limit_s: float, breaks: bool = True) -> Any:
            raise GuestUnreachable("its domain has no channel for one")

    sizes, link = Asked((500, 1)), Silent(500)
    executor = Executor("domain", sizes, link, "request", ordinary=OrdinaryGuest(), asks_cpus=True)  # type: ignore[arg-type]
    asked = []
    for cpus in (False, False, True, False):
        _, guest = await executor.measure(cpus)
        assert (guest.online if guest is not None else None) == ((0, 1) if answers else None)
        asked.append(sizes.times)
    assert asked == ([1, 1, 2, 2] if answers else [1, 1, 1, 1])
    await executor.carry_out(Unplug(1, 5.0, (0,), None))
    assert sizes.times == asked[-1] + 1, "what has come of it is read"


async def test_no_guest_can_have_a_vcpu_plugged_by_a_step_that_unplugs() -> None:
    class Unplugging(Statistics):
        def __init__(self) -> None:
            super().__init__((500, 1))
            self.counts: list[int] = []

        async def read(self, domain: str) -> HostSideReading:
            return replace(await super().read(domain), vcpus=4)

        async def set_vcpus(self, domain: str, count: int, limit_s: float) -> str:
            self.counts.append(count)
            return ""

    class Mapping(Link):
        online = (0, 7)

        async def call(self, method: str, params: Any, answer: Any, limit_s: float, breaks: bool = True) -> Any:
            if method == "cpus.set":
                return CpusSet(online=list(self.online))
            return await super().call(method, params, answer, limit_s, breaks)

    sizes, link = Unplugging(), Mapping(500)
    executor = Executor("domain", sizes, link, "request")  # type: ignore[arg-type]
    await executor.measure()
    unplug = Unplug(1, 5.0, (0,), None, unplug_vcpus=True)
    await executor.carry_out(unplug)
    assert sizes.counts == []
    link.online = (0, 1)
    await executor.carry_out(unplug)
    assert sizes.counts == [2]


class Growing(Statistics):
    """A VM whose memory is plugged."""

    plugged_mib: float | None = None

    async def set_plugged(self, domain: str, plugged_mib: float, limit_s: float) -> str:
        self.plugged_mib = plugged_mib
        return ""


class Switching(Link):
    """A guest agent that is told of CPUs, of which its guest has one."""

    online: tuple[int, ...] | None = (0,)

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(500)
        self._error, self.maps = error, list[list[int]]()

    async def call(self, method: str, params: Any, answer: Any, limit_s: float, breaks: bool = True) -> Any:
        if method != "cpus.set":
            return await super().call(method, params, answer, limit_s, breaks)
        self.maps.append(params["online"])
        if self._error is not None:
            raise self._error
        return CpusSet(online=params["online"])


@pytest.mark.parametrize("error", [GuestRefused("CPU 0 is busy"), GuestUnreachable("no answer")])
async def test_cpus_that_a_guest_does_not_put_on_line_keep_no_memory_from_it(error: Exception) -> None:
    sizes, link = Growing((500, 1)), Switching(error)
    measured = await Executor("domain", sizes, link, "request").carry_out(  # type: ignore[arg-type]
        Unplug(1, 5.0, (0,), 256.0)
    )
    assert isinstance(measured, Measured)
    assert (sizes.plugged_mib, measured.reason, measured.error) == (256.0, str(error), "")


async def test_a_guest_is_told_of_no_cpu_that_it_does_not_have() -> None:
    sizes, link = Growing((500, 1)), Switching()
    executor = Executor("domain", sizes, link, "request")  # type: ignore[arg-type]
    measured = await executor.carry_out(Unplug(1, 5.0, (0, 1, 2), None))
    assert isinstance(measured, Measured)
    assert (link.maps, measured.reason) == ([[0]], "the guest has no CPU 1, 2")


async def test_memory_and_cpus_that_are_given_together_do_not_wait_for_each_other() -> None:
    class Plugging(Growing):
        async def set_vcpus(self, domain: str, count: int, limit_s: float) -> str:
            return ""

        async def set_plugged(self, domain: str, plugged_mib: float, limit_s: float) -> str:
            await super().set_plugged(domain, plugged_mib, limit_s)
            async with asyncio.timeout(limit_s):
                await link.told.wait()
            return ""

    class Finding(Switching):
        """Its guest finds a vCPU once it has memory."""

        def __init__(self) -> None:
            super().__init__()
            self.told = asyncio.Event()

        async def call(self, method: str, params: Any, answer: Any, limit_s: float, breaks: bool = True) -> Any:
            said = await super().call(method, params, answer, limit_s, breaks)
            if method == "cpus.set":
                self.told.set()
            elif sizes.plugged_mib is not None:
                said.cpus.present.append(1)
            return said

    sizes, link = Plugging((500, 1)), Finding()
    executor = Executor("domain", sizes, link, "request")  # type: ignore[arg-type]
    measured = await executor.carry_out(Unplug(1, 2.0, (0, 1), 256.0, plug_vcpus=2))
    assert isinstance(measured, Measured)
    assert (link.maps, measured.reason, measured.error) == ([[0, 1]], "", "")


class Reclaiming:
    """A guest agent that makes cold pages free; None: until it is called off."""

    def __init__(self, freed_mib: float | None) -> None:
        self._freed_mib = freed_mib
        self.calls: list[str] = []

    async def call(self, method: str, params: Any, answer: Any, limit_s: float) -> ColdFreed:
        self.calls.append(method)
        if method == "cold.reclaim" and self._freed_mib is None:
            await asyncio.Event().wait()
        return ColdFreed(freed_mib=self._freed_mib or 0.0, done=True)


async def test_a_guest_that_makes_cold_pages_free_hears_that_it_is_called_off() -> None:
    link = Reclaiming(None)
    executor = Executor("domain", Statistics((500, 1)), link, "request")  # type: ignore[arg-type]
    task = asyncio.create_task(executor.carry_out(ReclaimCold(1, 5.0, 100.0)))
    while not link.calls:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert link.calls == ["cold.reclaim", "cold.stop"]


async def test_a_guest_cannot_have_made_more_free_than_it_was_asked_for() -> None:
    executor = Executor("domain", Statistics((500, 1)), Reclaiming(1e6), "request")  # type: ignore[arg-type]
    event = await executor.carry_out(ReclaimCold(1, 5.0, 100.0))
    assert isinstance(event, ColdReclaimed)
    assert (event.freed_mib, event.done) == (100.0, True)


class Giving(Link):
    """A guest whose memory falls by a step each time it is asked; 0: not at all."""

    def __init__(self, step_mib: float) -> None:
        super().__init__(500)
        self._step_mib = step_mib
        self._total_mib = 1000.0

    async def call(self, method: str, params: Any, answer: Any, limit_s: float, breaks: bool = True) -> Any:
        status = await super().call(method, params, answer, limit_s)
        self._total_mib -= self._step_mib
        return status.model_copy(update={"memory": status.memory.model_copy(update={"total_mib": self._total_mib})})


class Asked(Statistics):
    """A hypervisor that hears of plugged memory late."""

    def __init__(self) -> None:
        super().__init__((None, 0))
        self.calls: list[str] = []

    async def read(self, domain: str) -> HostSideReading:
        return replace(await super().read(domain), plugged_lags=True)

    async def ask_plugged(self, domain: str, plugged_mib: float) -> None:
        self.calls.append("ask_plugged")

    async def set_plugged(self, domain: str, plugged_mib: float, limit_s: float) -> str:
        self.calls.append("set_plugged")
        return ""

    async def call_off(self, domain: str) -> None:
        self.calls.append("call_off")


@pytest.mark.parametrize(
    ("step_mib", "until_mib", "stalled_s", "calls"),
    [
        (50, 900.0, 20.0, ["ask_plugged"]),
        (50, None, 20.0, ["set_plugged"]),
        (0, 900.0, 0.02, ["ask_plugged", "set_plugged"]),
    ],
)
async def test_a_guests_word_is_enough_where_it_may_be_and_comes_in_time(
    monkeypatch: pytest.MonkeyPatch, step_mib: float, until_mib: float | None, stalled_s: float, calls: list[str]
) -> None:
    monkeypatch.setattr(module, "SAID_LOOK_S", 0.001)
    monkeypatch.setattr(module, "SAID_STALLED_S", stalled_s)
    sizes = Asked()
    executor = Executor("domain", sizes, Giving(step_mib), "request")  # type: ignore[arg-type]
    event = await executor.carry_out(Unplug(1, 60.0, None, 412.0, until_total_mib=until_mib))
    assert isinstance(event, Measured)
    assert sizes.calls == calls
    assert executor.asked_for_more == (calls == ["ask_plugged"])
    if executor.asked_for_more:
        assert event.guest is not None
        assert event.guest.total_mib == until_mib, "the reading is what the guest said when it had given it"


class Releasing:
    """A guest agent that knows of no waiting, and says at once that its application goes on."""

    def __init__(self) -> None:
        self.params: list[Any] = []

    async def call(self, method: str, params: Any, answer: Any, limit_s: float, breaks: bool) -> ApplicationRelease:
        self.params.append(params)
        return ApplicationRelease(request_id="request", state="running")


async def test_a_guest_that_does_not_wait_with_its_answer_is_not_asked_the_faster() -> None:
    link = Releasing()
    executor = Executor("domain", Statistics((500, 1)), link, "request")  # type: ignore[arg-type]
    began_at = asyncio.get_running_loop().time()
    event = await executor.carry_out(PollApplication(1, 0.5, delay_s=0.05, until_mib=64.0))
    assert isinstance(event, ApplicationReported)
    assert event.now - began_at >= 0.05
    assert link.params == [{"request_id": "request", "wait_s": 0.5, "until_released_mib": 64.0}], "within its time"


class Telling:
    """A guest whose application takes a reinflation on."""

    def __init__(self) -> None:
        self.params: list[dict[str, Any]] = []

    async def call(self, method: str, params: Any, answer: Any, limit_s: float, breaks: bool) -> ApplicationPromise:
        self.params.append(params)
        return ApplicationPromise(request_id="request", state="promised", reason="gladly")


async def test_a_guest_is_told_the_cores_that_its_vm_has_at_full_size() -> None:
    link, size = Telling(), ResourceVector(1.5, 1024.0)
    executor = Executor("domain", Statistics((500, 1)), link, "request", size)  # type: ignore[arg-type]
    event = await executor.carry_out(TellApplication(1, 5.0, size, 1024.0))
    assert isinstance(event, Told)
    assert event.reason == "gladly"
    assert [params["full_cores"] for params in link.params] == [1.5]


@pytest.mark.parametrize(("memory_mib", "is_full"), [(1022.0, True), (1000.0, False)])
async def test_a_guest_is_told_whether_its_vm_has_all_of_its_memory(memory_mib: float, is_full: bool) -> None:
    link, sold = Telling(), ResourceVector(1.5, 1024.0)
    executor = Executor("domain", Statistics((500, 1)), link, "request", sold)  # type: ignore[arg-type]
    size = sold.with_component("memory_mib", memory_mib)
    await executor.carry_out(TellApplication(1, 5.0, size, memory_mib))
    assert [params["full"] for params in link.params] == [is_full]


@pytest.mark.parametrize("state", ["promised", "refused", "none", "silent", "called off"])
async def test_an_application_that_was_asked_may_be_giving_whatever_the_host_hears(state: str) -> None:
    class Asking:
        async def call(self, method: str, params: Any, answer: Any, limit_s: float, breaks: bool) -> ApplicationPromise:
            if state == "silent":
                raise GuestUnreachable("no answer in time")
            if state == "called off":
                raise asyncio.CancelledError
            return ApplicationPromise.model_validate({"request_id": "request", "state": state})

    executor = Executor("domain", Statistics((500, 1)), Asking(), "request")  # type: ignore[arg-type]
    with contextlib.suppress(asyncio.CancelledError):
        await executor.carry_out(
            AskApplication(1, 5.0, ResourceVector(1.0, 512.0), ("memory_mib",), 1024.0, 5.0, Mode.ASK)
        )
    assert executor.may_give == (state != "none")


async def test_what_the_guest_is_giving_is_called_off_with_the_step() -> None:
    sizes = Asked()
    executor = Executor("domain", sizes, Giving(0), "request")  # type: ignore[arg-type]
    task = asyncio.create_task(executor.carry_out(Unplug(1, 60.0, None, 412.0, until_total_mib=900.0)))
    while not sizes.calls:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sizes.calls == ["ask_plugged", "call_off"]
    assert not executor.asked_for_more
