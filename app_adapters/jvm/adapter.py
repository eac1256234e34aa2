"""The JVM adapter: collects, tells the JVM its size, and measures by the kernel what came back."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, replace
from typing import Sequence

from app_adapters import __version__
from app_adapters.adapter import Adapter, Answer, Capabilities, Deadline, Promise, Refusal, Release, SizeRange
from app_adapters.errors import ApplicationError
from app_adapters.jvm import plans
from app_adapters.jvm.flags import Flags, collector, parse_flags, with_value
from app_adapters.jvm.heap import Heap, Resident, parse_heap, read_resident
from app_adapters.jvm.plans import Plan, Setting, Unsupported
from app_adapters.jvm.processes import Finder, Process
from app_adapters.jvm.transports import Transport
from app_adapters.processes.originals import Originals
from app_adapters.processes.process import proportional_mib

READ_LIMIT_S = 1.0
DECIDE_LIMIT_S = 2.0
COLLECT_LIMIT_S = 60.0
LIVE_AGE_S = 120.0
#: In the maximum: what lies beside the heap moves, and must not cost it a part of its full size.
MARGIN_MIB = 32.0
RESERVE_MIB = 8.0
TOLERANCE_MIB = 10.0
#: The first size is by what lay beside the heap before; what lies there afterwards corrects it.
ROUNDS = 3
LOOK_S = 0.1
STILL_S = 0.5
PROGRESS_MIB = 1.0
MEASURED_BY = "proportional set size of the process (smaps)"


@dataclass(frozen=True)
class Facts:
    """A JVM at one time. `live_mib`: what survived the last collection that was seen, None where none was."""

    process: Process
    flags: Flags
    heap: Heap
    resident: Resident
    live_mib: float | None
    at_s: float

    @property
    def assumed_live_mib(self) -> float:
        """At most what is used now. 0 while nothing is known: garbage must not look like a floor."""
        return min(self.live_mib or 0.0, self.heap.used_mib)


class JVMAdapter(Adapter):
    """One JVM on this machine. `minimum_mib` is the resident size that it keeps in any case."""

    def __init__(self, finder: Finder, transport: Transport, originals: Originals, minimum_mib: float = 0.0) -> None:
        self._finder = finder
        self._transport = transport
        self._originals = originals
        self._minimum_mib = minimum_mib
        self._lock = threading.Lock()  # of the figures below
        self._facts: Facts | None = None
        self._live: tuple[Process, float, float] | None = None
        self._seconds: float | None = None
        self._working = False

    def capabilities(self) -> Capabilities:
        """Resident sizes; the maximum is that of the heap which the JVM was set up for."""
        facts = self._look()
        current_mib = proportional_mib(facts.process.pid)
        minimum_mib = maximum_mib = current_mib
        if not plans.obstacle(facts.flags):
            originals = self._originals.load(facts.process.pid, facts.process.start)
            minimum_mib = min(self._floor_mib(facts), current_mib)
            ceiling_mib = plans.heap_ceiling_mib(facts.flags, originals)
            maximum_mib = max(facts.resident.other_mib + ceiling_mib + MARGIN_MIB, current_mib)
        memory = SizeRange(round(current_mib, 3), round(minimum_mib, 3), round(maximum_mib, 3), 1.0)
        return Capabilities("jvm", __version__, {"memory_mib": memory}, self._expected_s(facts), True, ["ask", "force"])

    def status(self) -> dict[str, float]:
        """Its resident size. Raises: ApplicationError."""
        return {"memory_mib": round(proportional_mib(self._finder.find().pid), 3)}

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        """Promise what lies between the resident size and the target, which the live set bounds."""
        answer: Answer | None = None
        try:
            answer = self._decide(target, deadline)
        finally:
            if not isinstance(answer, Promise):
                self._transport.close()
        return answer

    def _decide(self, target: dict[str, float], deadline: Deadline) -> Answer:
        facts = self._read(DECIDE_LIMIT_S)
        floor_mib = self._floor_mib(facts)
        now_mib = facts.resident.all_mib
        target_mib = max(target["memory_mib"], floor_mib)
        decided = self._plan(facts, target_mib, deadline)
        if isinstance(decided, Unsupported):
            return Refusal(decided.reason, floor={"memory_mib": round(now_mib, 3)})
        # Not by what lived at the last collection: a service may have dropped it since, and only another one tells.
        least_mib = max(facts.resident.other_mib + plans.heap_floor_mib(facts.flags, 0.0), self._minimum_mib)
        if now_mib <= least_mib:
            reason = f"the JVM holds {now_mib:.0f} MiB, it needs {least_mib:.0f} MiB"
            return Refusal(reason, None, {"memory_mib": round(least_mib, 3)})
        return Promise(
            {"memory_mib": round(max(now_mib - target_mib, 0.0), 3)},
            self._expected_s(facts),
            lambda: self._work(facts.process, target["memory_mib"], deadline),
            "; ".join([f"{collector(facts.flags)}, {now_mib:.0f} to {target_mib:.0f} MiB", *decided.notes]),
        )

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        """Let the heap grow again; at its full size all flags are what they were. Memory comes on demand."""
        try:
            facts = self._read(DECIDE_LIMIT_S)
            process = facts.process
            originals = self._originals.load(process.pid, process.start)
        except ApplicationError:
            self._transport.close()
            raise
        # The margin of the maximum, so that the maximum that was offered always restores everything.
        heap_mib = target["memory_mib"] - facts.resident.other_mib
        is_full = heap_mib >= plans.heap_ceiling_mib(facts.flags, originals)
        settings = plans.growth(facts.flags, originals, facts.assumed_live_mib, heap_mib)

        def grow() -> Release:
            try:
                self._apply(process, facts.flags, settings)
            finally:
                self._transport.close()
            told = _told(facts.flags, settings)
            if is_full:
                try:
                    self._originals.forget(process.pid, process.start)
                except ApplicationError as error:  # the flags are back all the same
                    told = f"{told}; {error}"
            return Release({"memory_mib": 0.0}, "answers of the JVM", told)

        return Promise({}, 0.1, grow, _told(facts.flags, settings))

    def _work(self, process: Process, target_mib: float, deadline: Deadline) -> Release:
        began = time.monotonic()
        before_mib = proportional_mib(process.pid)
        self._working = True
        problem = ""
        told: list[str] = []
        notes: list[str] = []
        try:
            is_over = before_mib > target_mib + TOLERANCE_MIB
            # Without what lives, the limit of a concurrent collector could end below it: it would never rest.
            collects = is_over or self._must_know_what_lives(process, began)
            if collects:
                self._collect(process, 1, deadline)
            facts = self._read_of(process, collected=collects)
            settle_s = plans.settle_s(facts.flags)
            if is_over and plans.settles_first(facts.flags):
                self._settle(process, target_mib, settle_s, deadline)
            wanted_mib = target_mib
            for _ in range(ROUNDS):
                decided = self._plan(facts, wanted_mib, deadline)
                if isinstance(decided, Unsupported):
                    problem = decided.reason
                    break
                notes = list(decided.notes)
                if told and not decided.settings:
                    break
                facts = replace(facts, flags=self._apply(process, facts.flags, decided.settings))
                told += [_told(facts.flags, decided.settings)] if decided.settings else []
                after_mib = proportional_mib(process.pid)
                if after_mib > target_mib + TOLERANCE_MIB:  # each collection costs its service a pause
                    self._collect(process, decided.collections, deadline)
                    after_mib = self._settle(process, target_mib, settle_s, deadline)
                if after_mib <= target_mib + TOLERANCE_MIB or deadline.passed:
                    break
                facts = self._read_of(process, collected=decided.collections > 0)
                wanted_mib -= after_mib - target_mib
        except ApplicationError as error:
            problem = str(error)
        finally:
            self._working = False
            self._transport.close()
        after_mib = proportional_mib(process.pid)
        released_mib = max(before_mib - after_mib, 0.0)
        if released_mib > TOLERANCE_MIB and not problem:
            self._seconds = time.monotonic() - began
        parts = [f"resident {before_mib:.0f} to {after_mib:.0f} MiB", *told, *notes]
        if problem:
            parts.append(problem)
        elif after_mib > target_mib + TOLERANCE_MIB:
            parts.append(f"{after_mib - target_mib:.0f} MiB over the target stay resident")
        # Something came free though a part failed: it is told, and counts.
        complete = not problem or released_mib > 0
        return Release({"memory_mib": round(released_mib, 3)}, MEASURED_BY, "; ".join(parts), complete)

    def _must_know_what_lives(self, process: Process, now_s: float) -> bool:
        if self._facts is None or not plans.is_concurrent(self._facts.flags):
            return False
        return self._live is None or self._live[0] != process or now_s - self._live[2] > LIVE_AGE_S

    def _plan(self, facts: Facts, target_mib: float, deadline: Deadline) -> Plan | Unsupported:
        heap_mib = max(target_mib, self._minimum_mib) - facts.resident.other_mib - RESERVE_MIB
        return plans.plan(facts.flags, facts.assumed_live_mib, heap_mib, deadline.remaining_s)

    def _apply(self, process: Process, flags: Flags, settings: Sequence[Setting]) -> Flags:
        """Set flags after their original values are kept; returns the flags as they are then."""
        if settings:
            values = {name: flags[name].value for name, _ in settings}
            self._originals.remember(process.pid, process.start, values)
        for name, value in settings:
            self._transport.set_flag(process.pid, name, value, DECIDE_LIMIT_S)
            flags = with_value(flags, name, value)
            with self._lock:
                if self._facts is not None and self._facts.process == process:
                    self._facts = replace(self._facts, flags=flags)
        return flags

    def _collect(self, process: Process, count: int, deadline: Deadline) -> None:
        for _ in range(count):
            if deadline.passed:
                return
            limit_s = max(min(deadline.remaining_s, COLLECT_LIMIT_S), READ_LIMIT_S)
            self._transport.command(process.pid, "GC.run", limit_s)

    def _settle(self, process: Process, target_mib: float, settle_s: float, deadline: Deadline) -> float:
        """Wait until enough is back, or nothing more has come for a while; returns the resident size."""
        lowest_mib, moved_at = math.inf, time.monotonic()
        while True:
            now_mib = proportional_mib(process.pid)
            if now_mib < lowest_mib - PROGRESS_MIB:
                lowest_mib, moved_at = now_mib, time.monotonic()
            # At the target as well: what is still on its way back is to be in the figure.
            patience_s = min(STILL_S, settle_s) if now_mib <= target_mib + TOLERANCE_MIB else settle_s
            if time.monotonic() - moved_at >= patience_s:
                return now_mib
            if deadline.wait(LOOK_S):
                return now_mib

    def _look(self) -> Facts:
        """Facts that are new enough to tell sizes by; while a collection runs the JVM may not answer for long."""
        process = self._finder.find()
        with self._lock:
            known = self._facts
        if known is not None and known.process != process:
            known = None
        if known is not None and (self._working or time.monotonic() - known.at_s < self._transport.age_s):
            return known
        try:
            return self._read(READ_LIMIT_S)
        except ApplicationError:
            if known is None:
                raise
            return known
        finally:
            if not self._working:
                self._transport.close()

    def _read(self, limit_s: float, collected: bool = False) -> Facts:
        """The JVM as it is now. `collected`: what it uses has just survived a collection."""
        process = self._finder.find()
        flags = parse_flags(self._transport.command(process.pid, "VM.flags -all", limit_s))
        heap = parse_heap(self._transport.command(process.pid, "GC.heap_info", limit_s))
        now_s = time.monotonic()
        with self._lock:
            if collected:
                self._live = (process, heap.used_mib, now_s)
            live_mib = None
            if self._live is not None and self._live[0] == process and now_s - self._live[2] <= LIVE_AGE_S:
                live_mib = self._live[1]
        facts = Facts(process, flags, heap, read_resident(process.pid, heap), live_mib, now_s)
        with self._lock:
            self._facts = facts
        return facts

    def _read_of(self, process: Process, collected: bool) -> Facts:
        facts = self._read(DECIDE_LIMIT_S, collected)
        if facts.process != process:
            raise ApplicationError("the JVM was started again meanwhile")
        return facts

    def _floor_mib(self, facts: Facts) -> float:
        heap_mib = plans.heap_floor_mib(facts.flags, facts.assumed_live_mib)
        return max(facts.resident.other_mib + heap_mib, self._minimum_mib)

    def _expected_s(self, facts: Facts) -> float:
        return round(self._seconds if self._seconds is not None else plans.expected_s(facts.flags), 1)


def _told(flags: Flags, settings: Sequence[Setting]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings) or "nothing had to be set"
