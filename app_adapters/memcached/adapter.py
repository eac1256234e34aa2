"""Adapter of memcached: shrinks its cache, coldest items first, until the kernel has the memory back.

`cache_memlimit` alone frees nothing: pages go back only by `slabs reassign N 0` while more is allocated than the limit,
and a page takes its items with it. So the coldest items are deleted first (memcached_items), and the survivors are
moved together (memcached_pages).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import time
from typing import Iterator

from app_adapters import __version__
from app_adapters.adapter import (
    FULL_SHARE,
    Adapter,
    Answer,
    Capabilities,
    Deadline,
    Promise,
    Refusal,
    Release,
    SizeRange,
)
from app_adapters.errors import ApplicationError
from app_adapters.memcached.client import MIB, MemcachedClient, Slabs
from app_adapters.memcached.items import delete_coldest
from app_adapters.memcached.pages import Pace, return_pages, usual_answer_s
from app_adapters.processes.process import arguments, environment, resident_mib
from app_adapters.registry import Ready, address, amount

MINIMUM_MIB = 64.0
SMALLEST_LIMIT_MIB = 8  # memcached takes no less
STEPS = 4
STEP_MIB = 16
TOLERANCE_MIB = 10.0
MARGIN_MIB = (
    8.0  # in the maximum: what lies beside the items moves, and must not cost the limit a part of its full size
)
SETTLE_S = 1.0
# Resident beside the pages: hash table, connections, threads. What is above that was freed and kept.
USUAL_OVERHEAD_MIB = 48.0
USUAL_OVERHEAD_SHARE = 0.1
MALLOC_SETTING = b"MALLOC_MMAP_THRESHOLD_"
# Letters of memcached's command line after which a value follows, in the same word or the next.
OPTIONS_WITH_VALUE = "abceflmnopstuBDINPRUY"


class MemcachedAdapter(Adapter):
    """A memcached on this machine. `minimum_mib` is the resident size that it keeps."""

    def __init__(self, host: str = "127.0.0.1", port: int = 11211, minimum_mib: float = MINIMUM_MIB) -> None:
        self._host = host
        self._port = port
        self._minimum_mib = minimum_mib
        self._seconds_per_mib = 0.01  # replaced by what the last deflation took
        self._largest_limits: dict[int, int] = {}  # by pid
        self._taken_mib = 0  # its limit before the first deflation that was not undone, 0: nothing is taken

    def capabilities(self) -> Capabilities:
        """Resident sizes; the maximum is that of the limit which memcached was started with."""
        client = self._client()
        try:
            stats = client.stats()
            rss_mib = self._rss_mib(stats)
            overhead_mib = _overhead_mib(rss_mib, client.slabs())
            maximum_mib = self._largest_limit_mib(stats) + overhead_mib + MARGIN_MIB
        finally:
            client.close()
        minimum_mib = min(self._minimum_mib, rss_mib)
        memory = SizeRange(round(rss_mib, 3), round(minimum_mib, 3), round(max(maximum_mib, rss_mib), 3), 1.0)
        expected_s = self._expected_s(rss_mib - minimum_mib)
        return Capabilities("memcached", __version__, {"memory_mib": memory}, expected_s, True, ["ask", "force"])

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        """Promise what lies between the resident size and the target, which the minimum bounds."""
        client = self._client()
        try:
            stats, settings, slabs = client.stats(), client.stats("settings"), client.slabs()
            rss_mib = self._rss_mib(stats)
            obstacle = self._obstacle(client, stats, settings) or _kept_by_allocator(
                rss_mib, slabs, environment(int(stats["pid"]))
            )
        finally:
            client.close()
        floor = {"memory_mib": self._minimum_mib}
        if obstacle:
            return Refusal(obstacle, floor={"memory_mib": round(rss_mib, 3)})
        target_mib = max(target["memory_mib"], self._minimum_mib)
        if rss_mib <= self._minimum_mib and target["memory_mib"] < rss_mib:  # else its limit is to hold it there
            return Refusal(
                f"memcached holds {rss_mib:.0f} MiB, its minimum is {self._minimum_mib:.0f} MiB", None, floor
            )
        self._largest_limit_mib(stats)
        wanted_mib = math.floor(target_mib - _overhead_mib(rss_mib, slabs))
        limit_mib = max(wanted_mib, math.floor(self._minimum_mib / 2), SMALLEST_LIMIT_MIB)
        amount_mib = max(rss_mib - target_mib, 0.0)
        expected_s = self._expected_s(amount_mib)
        notes = self._notes(stats, settings)
        return Promise(
            {"memory_mib": round(amount_mib, 3)},
            expected_s,
            lambda: self._shrink(limit_mib, target_mib, deadline, notes),
            "; ".join([f"{rss_mib:.0f} to {target_mib:.0f} MiB", *notes]),
        )

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        """Raise the limit, at most to that of before the first deflation. It holds at once; memory comes on demand."""
        client = self._client()
        try:
            stats, slabs = client.stats(), client.slabs()
        finally:
            client.close()
        now_mib = _limit_mib(stats)
        wanted_mib = math.floor(target["memory_mib"] - _overhead_mib(self._rss_mib(stats), slabs))
        self._largest_limit_mib(stats)
        before_mib = self._taken_mib
        if not before_mib:
            return Promise({}, 0.0, _nothing, "nothing had been taken")
        full = wanted_mib >= FULL_SHARE * before_mib
        limit_mib = max(before_mib if full else wanted_mib, now_mib)

        def raise_limit() -> Release:
            client = self._client()
            try:
                client.set_limit(limit_mib)
                measured = _limit_mib(client.stats())
            finally:
                client.close()
            if measured != limit_mib:
                raise ApplicationError(f"limit_maxbytes is {measured} MiB after cache_memlimit {limit_mib}")
            if limit_mib >= before_mib:
                self._taken_mib = 0
            return Release({"memory_mib": 0.0}, "limit_maxbytes", f"limit raised from {now_mib} to {measured} MiB")

        return Promise({}, 0.1, raise_limit, f"limit {now_mib} to {limit_mib} MiB")

    def status(self) -> dict[str, float]:
        """Its resident size by the kernel alone, while the process is the one that was asked last."""
        for pid in self._largest_limits:
            with contextlib.suppress(ApplicationError):
                return {"memory_mib": round(resident_mib(pid, "memcached"), 3)}
        return super().status()

    def _client(self) -> MemcachedClient:
        return MemcachedClient(self._host, self._port)

    def _rss_mib(self, stats: dict[str, str]) -> float:
        return resident_mib(int(stats["pid"]), "memcached")

    def _expected_s(self, amount_mib: float) -> float:
        return round(0.5 + max(amount_mib, 0.0) * self._seconds_per_mib, 1)

    def _largest_limit_mib(self, stats: dict[str, str]) -> int:
        """The limit at full size: what the process was started with, or the largest that was seen.

        From the command line, so that an adapter which starts while memcached is small still knows it.
        """
        pid = int(stats["pid"])
        known = self._largest_limits.get(pid)
        if known is None:
            known = _started_limit_mib(arguments(pid))
            # Another adapter may have taken what is missing.
            self._taken_mib = known if _limit_mib(stats) < known else 0
        self._largest_limits = {pid: max(known, _limit_mib(stats))}
        return self._largest_limits[pid]

    def _obstacle(self, client: MemcachedClient, stats: dict[str, str], settings: dict[str, str]) -> str:
        """Why this memcached cannot give memory back, empty where it can."""
        if settings.get("slab_reassign") != "yes":
            return "memcached runs with slab reassignment disabled (-o no_slab_reassign), so it cannot give pages back"
        if settings.get("memory_file", "(null)") != "(null)":
            return "memcached keeps its items in a file (-e), which it cannot give back"
        try:
            client.set_limit(_limit_mib(stats))  # changes nothing, and fails with preallocated memory
        except ApplicationError as error:
            return f"memcached cannot change its limit, as with large pages (-L): {error}"
        return ""

    def _notes(self, stats: dict[str, str], settings: dict[str, str]) -> list[str]:
        notes = []
        found = environment(int(stats["pid"]))
        if found is None:
            notes.append("whether MALLOC_MMAP_THRESHOLD_ is set could not be seen")
        elif MALLOC_SETTING not in found:
            notes.append("memcached was started without MALLOC_MMAP_THRESHOLD_, so its pages may stay resident")
        if not _can_dump(settings):
            notes.append("items cannot be listed, so hot ones may go with the cold")
        dropped = int(stats.get("lru_bumps_dropped", "0"))
        if dropped:
            notes.append(f"{dropped} LRU bumps were dropped, so some hot items may count as cold")
        return notes

    def _shrink(self, limit_mib: int, target_mib: float, deadline: Deadline, notes: list[str]) -> Release:
        began = time.monotonic()
        client, deleter = self._client(), self._client()
        try:
            before = client.stats()
            before_mib = self._rss_mib(before)
            can_dump = _can_dump(client.stats("settings"))
            pace = Pace(usual_answer_s(client))
            problem = ""
            try:
                now_mib = _limit_mib(client.stats())
                if limit_mib < now_mib:
                    self._taken_mib = max(self._taken_mib, now_mib)
                for i, step_mib in enumerate(_steps(now_mib, limit_mib, client.slabs())):
                    client.set_limit(step_mib)
                    if i == 0 and can_dump:
                        delete_coldest(client, deleter, min(limit_mib, now_mib), _dumps_hash(before), deadline)
                    return_pages(client, step_mib, pace, deadline)
            except ApplicationError as error:
                problem = str(error)
                client.close()  # it may stand in the middle of an answer
            stats = client.stats()
            after_mib = self._rss_mib(stats)
            while not problem and after_mib > target_mib + TOLERANCE_MIB and time.monotonic() - began < SETTLE_S:
                if deadline.wait(0.05):
                    break
                after_mib = self._rss_mib(stats)
            malloced_mib = client.slabs().malloced_bytes / MIB
        finally:
            client.close()
            deleter.close()
        released_mib = max(before_mib - after_mib, 0.0)
        if released_mib > STEP_MIB and not problem:
            self._seconds_per_mib = (time.monotonic() - began) / released_mib
        parts = [
            f"resident {before_mib:.0f} to {after_mib:.0f} MiB, "
            f"limit {_limit_mib(stats)} MiB, allocated {malloced_mib:.0f} MiB"
        ]
        if problem:
            parts.append(problem)
        elif after_mib > target_mib + TOLERANCE_MIB:
            parts.append(f"{after_mib - target_mib:.0f} MiB over the target stay resident")
        # Something came free though a part failed: it is told, and counts.
        complete = not problem or released_mib > 0
        measured_by = "VmRSS of the process, limit_maxbytes and total_malloced of its stats"
        return Release({"memory_mib": round(released_mib, 3)}, measured_by, "; ".join(parts + notes), complete)


def _nothing() -> Release:
    return Release({"memory_mib": 0.0}, "nothing", "nothing was to be done")


def _kept_by_allocator(rss_mib: float, slabs: Slabs, environment: dict[bytes, bytes] | None) -> str:
    """Why pages that memcached frees would not come back, empty where they would or where it is not known.

    glibc raises its threshold for memory of its own mapping as soon as some is freed (mallopt(3)): the first pages come
    back, later ones stay in the heap. Shrinking further would cost items and give nothing.
    """
    kept_mib = _overhead_mib(rss_mib, slabs)
    if environment is None or MALLOC_SETTING in environment:
        return ""
    if kept_mib <= USUAL_OVERHEAD_MIB + USUAL_OVERHEAD_SHARE * slabs.malloced_bytes / MIB:
        return ""
    return (
        f"{kept_mib:.0f} MiB are resident beyond what memcached has allocated: it was started without "
        "MALLOC_MMAP_THRESHOLD_, so its allocator keeps the pages that it frees"
    )


def _limit_mib(stats: dict[str, str]) -> int:
    return int(stats["limit_maxbytes"]) // MIB


def _overhead_mib(rss_mib: float, slabs: Slabs) -> float:
    return max(rss_mib - slabs.malloced_bytes / MIB, 0.0)


def _can_dump(settings: dict[str, str]) -> bool:
    return settings.get("dump_enabled") == "yes" and settings.get("lru_crawler") == "yes"


def _dumps_hash(stats: dict[str, str]) -> bool:
    """Whether items can be dumped in the order of the hash table (since 1.6.9): none twice, none missed."""
    numbers = [int(number) for number in re.findall(r"\d+", stats.get("version", ""))[:3]]
    return numbers >= [1, 6, 9]


def _started_limit_mib(argv: list[str]) -> int:
    """The limit of a memcached command line, 64 MiB where it has none (memcached(1): -m), read as getopt_long does."""
    limit_mib = 64
    words = iter(argv[1:])
    for word in words:
        if word == "--":
            break
        if word.startswith("--"):
            name, sign, value = word[2:].partition("=")
            if not (name.startswith("memory-l") and "memory-limit".startswith(name)):
                continue
            value = value if sign else next(words, "")
        elif word.startswith("-"):
            value = _memory_option(word[1:], words)
        else:
            continue
        number = re.match(r"\s*\+?([0-9]+)", value)  # atoi
        limit_mib = int(number.group(1)) if number else limit_mib
    return limit_mib


def _memory_option(letters: str, words: Iterator[str]) -> str:
    """The value of -m in a word of options of one letter (`-dm 1024`, `-vvm1024`), empty where it has none."""
    for i, letter in enumerate(letters):
        if letter in OPTIONS_WITH_VALUE:
            value = letters[i + 1 :] or next(words, "")
            return value if letter == "m" else ""
    return ""


def _steps(now_mib: int, limit_mib: int, slabs: Slabs) -> Iterator[int]:
    """Limits on the way down. Where nothing has to be freed for it, the first one is at once what is allocated."""
    malloced_mib = math.ceil(slabs.malloced_bytes / MIB)
    start_mib = min(now_mib, max(malloced_mib, limit_mib))
    if now_mib <= limit_mib:  # a deflation never raises the limit
        if malloced_mib > limit_mib:  # an earlier one was broken off before all pages were back
            yield now_mib
        return
    count = max(1, min(STEPS, (start_mib - limit_mib) // STEP_MIB))
    for i in range(1, count + 1):
        yield start_mib - (start_mib - limit_mib) * i // count


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memcached", type=address, default=("127.0.0.1", 11211), metavar="HOST:PORT", help="default: 127.0.0.1:11211"
    )
    parser.add_argument(
        "--minimum-mib",
        type=amount,
        default=MINIMUM_MIB,
        metavar="N",
        help="resident MiB it keeps (default: %(default)g)",
    )


DESCRIPTION = """\
Shrinks a memcached on this machine: its limit first, the coldest items next, then page by page.

Start memcached with MALLOC_MMAP_THRESHOLD_=131072 in its environment, or pages stay resident.

example:
  MALLOC_MMAP_THRESHOLD_=131072 memcached -u nobody -l 127.0.0.1 -U 0 -m 1024
  ebb-adapter memcached --memcached 127.0.0.1:11211 --minimum-mib 128
"""

READY = Ready(
    "a memcached on this machine",
    DESCRIPTION,
    _options,
    lambda options: MemcachedAdapter(options.memcached[0], options.memcached[1], options.minimum_mib),
)
