"""Gives memcached's pages back one by one, as fast as its clients do not feel it."""

from __future__ import annotations

import math
import time

from app_adapters.adapter import Deadline
from app_adapters.errors import ApplicationError
from app_adapters.memcached.client import MIB, Busy, MemcachedClient, Slabs

PAGES_PER_LOOK = 32
STALL_S = 5.0
#: Between two looks whether a page has moved. Each look is a request, which takes processors that the mover could have:
#: so the first is after this part of what a page has taken lately, and the others a part of it apart.
LOOK_S, LONGEST_LOOK_S = 0.0002, 0.05
FIRST_LOOK, NEXT_LOOK = 0.7, 0.15
#: How much the latest page counts in that.
LATEST = 0.25
#: An answer that takes so long, or so many times what is usual here, is slow.
SLOW_S = 0.001
SLOW_TIMES = 4.0
LEAST_PAUSE_S = 0.0002
MOST_PAUSE_S = 0.002
USUAL_PROBES = 9


class Pace:
    """How long to wait after a page, by how quickly memcached answers. Pure.

    Not at all while answers come quickly: the mover holds its locks for one item at a time, so what clients feel of it
    is the processor that it takes. Where every answer is slow, as in an emulated guest, that is what is usual.
    """

    def __init__(self, usual_s: float) -> None:
        self._slow_s = max(SLOW_S, SLOW_TIMES * usual_s)
        self.pause_s = 0.0
        self._page_s = 0.0

    def answered(self, seconds: float) -> None:
        """memcached took so long for an answer."""
        if seconds > self._slow_s:
            self.pause_s = min(max(2 * self.pause_s, LEAST_PAUSE_S), MOST_PAUSE_S)
        else:
            self.pause_s = self.pause_s / 2 if self.pause_s > LEAST_PAUSE_S else 0.0

    def moved(self, seconds: float, looks: int) -> None:
        """A page took so long, from its beginning to that of the next, and so many looks in vain.

        Without one it may have taken much less: what is waited must not be what is learned.
        """
        self._page_s += LATEST * ((seconds if looks else 0.0) - self._page_s)

    def look_s(self, looks: int) -> float:
        """How long to wait for a page after so many looks at it."""
        share = NEXT_LOOK if looks else FIRST_LOOK
        return min(max(share * self._page_s, LOOK_S), LONGEST_LOOK_S)


def usual_answer_s(client: MemcachedClient) -> float:
    """The median time of an answer that costs nothing."""
    times = []
    for _ in range(USUAL_PROBES):
        began = time.monotonic()
        client.settle()
        times.append(time.monotonic() - began)
    return sorted(times)[len(times) // 2]


def return_pages(client: MemcachedClient, limit_mib: int, pace: Pace, deadline: Deadline) -> None:
    """Give pages back, emptiest class first, until no more is allocated than the limit.

    Raises: ApplicationError where the deadline passes or memcached gets no further.
    """
    lowest, moved_at = math.inf, time.monotonic()
    while True:
        slabs = client.slabs()
        surplus = math.ceil((slabs.malloced_bytes - limit_mib * MIB) / MIB)
        if surplus <= 0:
            return
        if slabs.malloced_bytes < lowest:
            lowest, moved_at = slabs.malloced_bytes, time.monotonic()
        elif time.monotonic() - moved_at > STALL_S:
            raise ApplicationError(f"no page came free for {STALL_S:g} s, {surplus} MiB over the limit")
        pages = pages_to_move(slabs, min(surplus, PAGES_PER_LOOK))
        if not pages:
            raise ApplicationError(f"no slab class has a page to spare, {surplus} MiB over the limit")
        began_at: float | None = None
        for source in pages:
            if began_at is not None:
                deadline.wait(pace.look_s(0))
            looks = _move(client, source, pace, moved_at + STALL_S, deadline)
            if looks is None:
                raise ApplicationError(f"the deadline passed {surplus} MiB over the limit of {limit_mib} MiB")
            now = time.monotonic()
            if began_at is not None:
                pace.moved(now - began_at, looks)
            began_at = now


def _move(client: MemcachedClient, source: int, pace: Pace, end: float, deadline: Deadline) -> int | None:
    """Have one page moved, once the one before is done or time is over; returns after how many looks in vain.

    None: the deadline has passed.
    """
    looks = 0
    while not deadline.passed:
        began = time.monotonic()
        try:
            client.reassign(source)
        except Busy:
            looks += 1
            pace.answered(time.monotonic() - began)
            deadline.wait(pace.look_s(looks))
            if time.monotonic() > end:
                return looks
            continue
        pace.answered(time.monotonic() - began)
        if pace.pause_s:
            deadline.wait(pace.pause_s)
        return looks
    return None


def pages_to_move(slabs: Slabs, count: int) -> list[int]:
    """Class ids, one for each page: always the class with most free room, which keeps its last page."""
    pages = {id_: class_.pages for id_, class_ in slabs.classes.items()}
    free = {id_: class_.free_chunks for id_, class_ in slabs.classes.items()}
    order: list[int] = []
    for _ in range(count):
        movable = [id_ for id_, number in pages.items() if number > 1]
        if not movable:
            break
        best = max(movable, key=lambda id_: (free[id_] // slabs.classes[id_].chunks_per_page, pages[id_]))
        pages[best] -= 1
        free[best] = max(free[best] - slabs.classes[best].chunks_per_page, 0)
        order.append(best)
    return order
