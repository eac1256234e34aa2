"""How a guest's programs and its power-off share the notice of a preemption; time is faked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from ebbtide.messages.guest import PreemptionTold
from hostagent.errors import GuestRefused, GuestSilent, GuestUnreachable, HostAgentError, NoticeWithdrawn
from hostagent.vm.guest_link import HELLO_FIRST, UNKNOWN_METHOD
from hostagent.vm.notice import RunningNotice, give_notice
from tests.hostagent.faked_loop import FakedLoop


class Link:
    """A guest with programs that run for a while."""

    def __init__(self, programs: int, for_s: float, error: HostAgentError | None = None) -> None:
        self.connected, self.may_come_back = True, False
        self.programs, self.for_s, self.error = programs, for_s, error
        self.told: list[Mapping[str, Any]] = []
        self.began: float | None = None

    async def call(self, method: str, params: Mapping[str, Any], answer: type, limit_s: float) -> PreemptionTold:
        assert (method, answer) == ("preemption", PreemptionTold)
        if self.error is not None:
            raise self.error
        now = asyncio.get_running_loop().time()
        self.began = now if self.began is None else self.began
        self.told.append(params)
        return PreemptionTold(programs=self.programs, running=self.programs * (now - self.began < self.for_s))


def notice_to(
    link: Any, notice_s: float = 30.0, kept_s: float | None = None, running: RunningNotice | None = None
) -> tuple[float, str]:
    """What is left of a notice once the programs have had theirs, and what became of it."""
    told = {"request_id": "p", "kind": "stop", "reason": "minimum"}
    kept_s = notice_s / 3 if kept_s is None else kept_s
    loop = FakedLoop()
    try:
        began = loop.time()
        said = loop.run_until_complete(give_notice(link, running or RunningNotice(), told, notice_s, kept_s))
        return notice_s - (loop.time() - began), said
    finally:
        loop.close()


def test_programs_that_end_leave_the_rest_of_the_time_to_the_power_off() -> None:
    left_s, said = notice_to(link := Link(2, 8.2))
    assert left_s == pytest.approx(21.5)
    assert said == "its guest was told 20 s before, and 2 of 2 programs ended in time"
    assert link.told[0] == {"request_id": "p", "seconds_left": 20.0, "kind": "stop", "reason": "minimum"}
    assert {told["request_id"] for told in link.told} == {"p"}, "one notice, asked for again"


def test_programs_that_do_not_end_have_two_thirds_of_the_time() -> None:
    left_s, said = notice_to(Link(2, 1000.0))
    assert left_s == pytest.approx(10.0)
    assert said.endswith("0 of 2 programs ended in time")


def test_what_saving_takes_is_none_of_the_programs_time() -> None:
    left_s, said = notice_to(Link(1, 1000.0), 30.0, kept_s=18.0)
    assert left_s == pytest.approx(18.0)
    assert said.startswith("its guest was told 12 s before")


def test_without_a_program_those_that_poll_have_five_seconds() -> None:
    assert notice_to(Link(0, 0.0)) == (25.0, "its guest was told 20 s before")
    assert notice_to(Link(0, 0.0), 6.0)[0] == pytest.approx(5.0)


@pytest.mark.parametrize(
    "error", [GuestUnreachable("it does not read"), GuestRefused("no method preemption", UNKNOWN_METHOD)]
)
def test_a_guest_that_cannot_be_told_is_powered_off_at_once(error: HostAgentError) -> None:
    left_s, said = notice_to(Link(0, 0.0, error))
    assert (left_s, said) == (30.0, f"its guest was not told: {error}")
    silent = Link(0, 0.0)
    silent.connected = False
    assert notice_to(silent) == (30.0, "its guest was not told: it has no agent that answers")


@pytest.mark.parametrize(("away_s", "left_s"), [(5.0, 15.0), (1000.0, 19.5)])
def test_a_guest_agent_that_is_started_again_takes_no_time_from_its_programs(away_s: float, left_s: float) -> None:
    class StartedAgain(Link):
        async def call(self, method: str, params: Mapping[str, Any], answer: type, limit_s: float) -> PreemptionTold:
            now = asyncio.get_running_loop().time()
            if self.began is not None and 1.0 <= now - self.began < 1.0 + away_s:
                raise GuestUnreachable("it is started again")
            return await super().call(method, params, answer, limit_s)

    found_s, said = notice_to(StartedAgain(1, 15.0))
    assert found_s == pytest.approx(left_s, abs=1.0)
    assert said.startswith("its guest was told 20 s before")


@pytest.mark.parametrize(
    "first", [GuestRefused("hello first", HELLO_FIRST), GuestRefused("8 requests are under way"), None]
)
def test_an_agent_that_was_started_again_just_before_a_notice_is_waited_for(first: GuestRefused | None) -> None:
    class StartedAgain(Link):
        """Its host hears of that by the first call, or has heard of it before."""

        @property
        def connected(self) -> bool:
            return first is not None or self.is_back()

        @connected.setter
        def connected(self, value: bool) -> None: ...

        @staticmethod
        def is_back() -> bool:
            return asyncio.get_running_loop().time() >= 4.0

        async def call(self, method: str, params: Mapping[str, Any], answer: type, limit_s: float) -> PreemptionTold:
            if first is not None and not self.is_back():
                raise first
            return await super().call(method, params, answer, limit_s)

    agent = StartedAgain(1, 3.0)
    agent.may_come_back = True
    left_s, said = notice_to(agent)
    assert said == "its guest was told 16 s before, and 1 of 1 programs ended in time"
    assert left_s == pytest.approx(22.5, abs=1.0)


@pytest.mark.parametrize(("notice_s", "left_s"), [(60.0, 50.0), (6.0, 4.0)])
def test_an_agent_that_does_not_come_back_costs_ten_seconds_or_a_third_of_the_notice(
    notice_s: float, left_s: float
) -> None:
    gone = Link(0, 0.0)
    gone.connected, gone.may_come_back = False, True
    found_s, said = notice_to(gone, notice_s)
    assert found_s == pytest.approx(left_s, abs=0.5)
    assert said == "its guest was not told: it has no agent that answers"


def test_a_guest_that_is_slow_to_answer_its_notice_keeps_the_rest_of_it() -> None:
    class Slow(Link):
        """Its programs take so long to start; a call that it does not answer ends a conversation, and it says hello."""

        answers_at, back_at = 22.0, 0.0

        @property
        def connected(self) -> bool:
            return asyncio.get_running_loop().time() >= self.back_at

        @connected.setter
        def connected(self, value: bool) -> None: ...

        async def call(self, method: str, params: Mapping[str, Any], answer: type, limit_s: float) -> PreemptionTold:
            if asyncio.get_running_loop().time() < self.answers_at:
                await asyncio.sleep(limit_s)
                self.back_at = asyncio.get_running_loop().time() + 2.0
                raise GuestSilent(f"no answer in {limit_s:g} s")
            return await super().call(method, params, answer, limit_s)

    slow, silent, short = Slow(1, 5.0), Slow(1, 5.0), Slow(1, 3.0)
    slow.may_come_back = silent.may_come_back = short.may_come_back = True
    left_s, said = notice_to(slow, 60.0)
    assert said.endswith("and 1 of 1 programs ended in time")
    assert left_s == pytest.approx(27.0), "its programs ran from 28 s on"
    silent.answers_at = 1000.0
    left_s, said = notice_to(silent, 60.0)
    assert left_s == pytest.approx(20.0)
    assert said.startswith("its guest was sent its notice, and has not answered: no answer in ")
    short.answers_at = 6.0
    left_s, said = notice_to(short, 18.0)
    assert said == "its guest was told 5 s before, and 1 of 1 programs ended in time"
    assert left_s == pytest.approx(8.0), "its programs ran from 7 s on"


def test_an_agent_that_knows_of_no_notices_is_not_asked_again() -> None:
    old = Link(0, 0.0, GuestRefused("no method preemption", UNKNOWN_METHOD))
    old.may_come_back = True
    assert notice_to(old) == (30.0, "its guest was not told: no method preemption")


def test_without_any_time_the_power_is_cut_at_once() -> None:
    assert notice_to(Link(1, 1.0), 0.0)[0] == 0.0


def test_a_notice_that_is_called_off_ends_at_once_and_says_so() -> None:
    running = RunningNotice()

    class CalledOff(Link):
        async def call(self, method: str, params: Mapping[str, Any], answer: type, limit_s: float) -> PreemptionTold:
            told = await super().call(method, params, answer, limit_s)
            assert running.request_id == "p", "it can be called off while it runs"
            running.withdrawn = "there is room"
            return told

    link = CalledOff(1, 1000.0)
    with pytest.raises(NoticeWithdrawn, match="its preemption was called off: there is room"):
        notice_to(link, running=running)
    assert len(link.told) == 1
    assert running.request_id == ""
