"""Notice of a preemption: the guest is told, and its programs get their part of the time, before it goes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ebbtide.messages.guest import PreemptionTold
from hostagent.errors import GuestRefused, GuestSilent, GuestUnreachable, NoticeWithdrawn
from hostagent.vm.guest_link import UNKNOWN_METHOD, GuestLink

#: Programs that poll the notice have so long to see it, where no drop-in program holds the guest for longer: seconds,
#: and as a part of the notice at the most.
POLLED_S, POLLED_SHARE = 5.0, 1 / 6
LOOK_S: Final = 0.5
CALL_LIMITS_S: Final = (1.0, 5.0)
#: For so long a guest agent is waited for that has gone: it may be started again. Before it is first told, a part of
#: the notice at the most, so that one that never comes leaves the rest to the power-off.
BACK_S, BACK_SHARE = 10.0, 1 / 3


@dataclass(slots=True)
class RunningNotice:
    """The notice that a VM has now, which can be called off until its programs' time is over."""

    #: Of its request; empty: none runs.
    request_id: str = ""
    #: Why it was called off; empty: it was not.
    withdrawn: str = ""
    #: Held while that is being stored: until then the notice is not over.
    calling_off: asyncio.Lock = field(default_factory=asyncio.Lock)


async def give_notice(
    link: GuestLink, running: RunningNotice, told: Mapping[str, str], notice_s: float, kept_s: float
) -> str:
    """Tell a guest that it goes, and wait until its programs have ended or their time is over.

    A guest that cannot be told just goes; one whose agent has answered before is waited for.

    :param told: request id, kind and reason.
    :param kept_s: of the notice, what comes after its programs: power-off or saving.
    :returns: what became of the notice.
    :raises NoticeWithdrawn: it was called off.
    """
    running.request_id, running.withdrawn = told["request_id"], ""
    try:
        said = await _tell(link, running, told, notice_s, kept_s)
        async with running.calling_off:
            running.request_id = ""
    finally:
        running.request_id = ""
    if running.withdrawn:
        raise NoticeWithdrawn(f"{said}; its preemption was called off: {running.withdrawn}")
    return said


async def _tell(
    link: GuestLink, running: RunningNotice, told: Mapping[str, str], notice_s: float, kept_s: float
) -> str:
    loop = asyncio.get_running_loop()
    began = loop.time()
    until, seen = began + max(notice_s - kept_s, 0.0), began + min(POLLED_S, notice_s * POLLED_SHARE)
    said = "its guest was not told: it has no agent that answers"
    first: float | None = None
    #: Whether it was sent the notice and did not answer: programs that start may keep its agent from that.
    is_sent = False
    back_until = began + (min(BACK_S, notice_s * BACK_SHARE) if link.may_come_back else 0.0)
    while not running.withdrawn and (left_s := until - loop.time()) > 0:
        programs: PreemptionTold | None = None
        if link.connected:
            params = {**told, "seconds_left": round(left_s, 3)}
            limit_s = min(max(left_s, CALL_LIMITS_S[0]), CALL_LIMITS_S[1])
            try:
                programs = await link.call("preemption", params, PreemptionTold, limit_s)
            except GuestSilent as error:
                if first is None:
                    is_sent, said = True, f"its guest was sent its notice, and has not answered: {error}"
                    # A call that was not answered has ended the conversation: a hello comes first again.
                    back_until = max(back_until, loop.time() + BACK_S)
            except (GuestUnreachable, GuestRefused) as error:
                said = f"its guest was not told: {error}" if first is None and not is_sent else said
                if isinstance(error, GuestRefused) and error.code == UNKNOWN_METHOD:
                    break
        if programs is None:
            if loop.time() >= back_until:
                break
            await asyncio.sleep(min(LOOK_S, max(until - loop.time(), 0.0)))
            continue
        back_until = loop.time() + BACK_S if programs.running else began
        first = left_s if first is None else first
        said = f"its guest was told {first:.0f} s before"
        if programs.programs:
            said += f", and {programs.programs - programs.running} of {programs.programs} programs ended in time"
        if not programs.running and loop.time() >= seen:
            break
        await asyncio.sleep(min(LOOK_S, max(until - loop.time(), 0.0)))
    return said
