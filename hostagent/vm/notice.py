"""Notice of a preemption: the guest is told, and its programs get their part of the time, before its power button."""

from __future__ import annotations

import asyncio
from typing import Final

from ebbtide.messages.guest import PreemptionTold
from hostagent.errors import GuestRefused, GuestUnreachable
from hostagent.vm.guest_link import GuestLink

#: The guest's own power-off gets this part of the notice, its programs the rest.
POWER_OFF_SHARE: Final = 1 / 3
#: Programs that poll the notice have so long to see it, where no drop-in program holds the guest for longer: seconds,
#: and as a part of the notice at the most.
POLLED_S, POLLED_SHARE = 5.0, 1 / 6
LOOK_S: Final = 0.5
CALL_LIMITS_S: Final = (1.0, 5.0)


async def give_notice(link: GuestLink, request_id: str, reason: str, notice_s: float) -> tuple[float, str]:
    """Tell a guest that it goes, and wait until its programs have ended or their time is over.

    A guest that cannot be told is only powered off.

    :returns: what is left for its power-off, in seconds, and what became of the notice.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    until, seen = began + notice_s * (1 - POWER_OFF_SHARE), began + min(POLLED_S, notice_s * POLLED_SHARE)
    said = "its guest was not told: it has no agent that answers"
    first: float | None = None
    while link.connected and (left_s := until - loop.time()) > 0:
        params = {"request_id": request_id, "seconds_left": round(left_s, 3), "kind": "stop", "reason": reason}
        limit_s = min(max(left_s, CALL_LIMITS_S[0]), CALL_LIMITS_S[1])
        try:
            told = await link.call("preemption", params, PreemptionTold, limit_s)
        except (GuestUnreachable, GuestRefused) as error:
            said = f"its guest was not told: {error}" if first is None else said
            break
        first = left_s if first is None else first
        said = f"its guest was told {first:.0f} s before"
        if told.programs:
            said += f", and {told.programs - told.running} of {told.programs} programs ended in time"
        if not told.running and loop.time() >= seen:
            break
        await asyncio.sleep(min(LOOK_S, max(until - loop.time(), 0.0)))
    return max(notice_s - (loop.time() - began), 0.0), said
