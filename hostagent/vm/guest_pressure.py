"""Pressure of one VM: what its guest says of its memory, and what the agent concludes (docs/internals/pressure.md).

The judgement is made in `ebbtide.deflation.cascade.pressure`; this module feeds it and passes it on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Final

from ebbtide.deflation.allocations import Allocation
from ebbtide.deflation.cascade.ordinary import FRESH_S, Statement
from ebbtide.deflation.cascade.pressure import PressureReading, PressureWatch, Verdict
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.explanations import DecisionKind
from ebbtide.messages.guest import MemoryState, Notice, RequestNotice
from hostagent.clock import now as _now

#: The reserve of a guest that has not said what it needs, MiB (guestagent.memory).
LEAST_RESERVE_MIB: Final = 48.0


class GuestPressure:
    """One VM's pressure.

    :param allocation: the VM's row as of now.
    :param on_begin: called with a sentence when pressure begins.
    :param note: told of each change: (kind, sentence, inputs).
    """

    def __init__(
        self,
        allocation: Callable[[], Allocation],
        on_begin: Callable[[str], None],
        note: Callable[[DecisionKind, str, Mapping[str, object]], None],
    ) -> None:
        self._allocation = allocation
        self._on_begin = on_begin
        self._note = note
        self._watch = PressureWatch()
        self._verdict = Verdict(False, False, ZERO, "", False)
        #: Of the guest's last word: the kernel's figures alone do not say.
        self._boot_id = ""
        self._reserve_mib = LEAST_RESERVE_MIB
        self._said_at: float | None = None
        #: When the guest began to boot, by the loop's clock.
        self._booted_at = -math.inf
        #: What it said last, and when, by the loop's clock; None: nothing.
        self.said: tuple[MemoryState, float] | None = None
        #: Whether the last request that was noted did not count.
        self._refused_one = False

    @property
    def sentence(self) -> str:
        """Why the VM is under pressure; empty if it is not."""
        return self._verdict.sentence if self._verdict.under_pressure else ""

    @property
    def short_of_memory(self) -> bool:
        """Whether its kernel is short of memory; a request of its own is not that."""
        return self._verdict.short_of_memory

    @property
    def budget_s(self) -> float:
        """For how long its claims still count."""
        return self._watch.budget_s

    @property
    def wants(self) -> ResourceVector:
        """What the VM wants beyond its current size."""
        return self._verdict.wants

    def observe(self, said: MemoryState) -> None:
        """Take in what the guest said, asked or not."""
        self._boot_id, self._reserve_mib = said.boot_id, said.memory.reserve_mib
        self.said = said, _now()
        self._watch.observe(_now(), said.pressure_reading())
        self.judge()

    def sample(self, usable_mib: float | None, major_faults: int | None, said_at: float | None) -> None:
        """Take in what the guest's kernel says through its balloon driver: a guest that thrashes says nothing else.

        :param said_at: when it said so, seconds since the epoch.
        """
        if usable_mib is None or said_at is None or not self._says_anew(said_at):
            return
        if usable_mib >= self._reserve_mib:
            return  # no emergency: the guest's own word, with its stalls, says more
        reading = PressureReading(self._boot_id, usable_mib, self._reserve_mib, major_faults=major_faults)
        self._watch.observe(_now(), reading)
        self.judge()

    def sample_ordinary(self, said: Statement | None) -> None:
        """Take in what the balloon driver of a guest without our agent says: all that there is to know of it."""
        if said is None or not self._says_anew(said.said_at):
            return
        reading = PressureReading(
            self._boot_id, said.usable_mib, said.reserve_mib, major_faults=said.major_faults, ordinary=True
        )
        self._watch.observe(_now(), reading)
        self.judge()

    def _says_anew(self, said_at: float) -> bool:
        """Whether a statement is no old one: libvirt goes on giving the last one of a driver that has fallen silent.

        By its age, since the time of day may be set meanwhile.
        """
        before, self._said_at = self._said_at, said_at
        age_s = time.time() - said_at
        return said_at != before and abs(age_s) <= FRESH_S and age_s < _now() - self._booted_at

    def heard(self, notice: Notice) -> None:
        """Take in what the guest said of its own accord."""
        if not isinstance(notice, RequestNotice):
            self.observe(notice)
            return
        asked = ResourceVector(notice.cpu_cores, notice.memory_mib)
        refused = self._watch.request(_now(), asked, self._allocation(), notice.reason)
        if refused and self._refused_one:
            return  # a guest that asks again and again is no reason to fill the history
        self._refused_one = bool(refused)
        sentence = f"the guest asks for {asked}" + (f", which does not count: {refused}" if refused else "")
        self._note(DecisionKind.REQUEST, sentence, {"reason": notice.reason, **asked.as_dict()})
        self.judge()

    def deflated(self) -> None:
        """The VM was deflated further."""
        self._watch.deflated()

    def boots(self) -> None:
        """The guest boots anew, or is off: what it said is of the boot before."""
        self.said, self._booted_at = None, _now()
        self._watch.boots(_now())
        self.judge()

    def judge(self) -> None:
        """Judge again: pressure ends by the passing of time."""
        before, self._verdict = self._verdict, self._watch.verdict(_now(), self._allocation())
        if self._verdict.under_pressure and not before.under_pressure:
            self._note(DecisionKind.PRESSURE, self._verdict.sentence, {"wants": str(self._verdict.wants)})
            self._on_begin(self._verdict.sentence)
        elif before.under_pressure and not self._verdict.under_pressure:
            self._note(DecisionKind.PRESSURE, f"the pressure is over: {self._verdict.sentence}", {})
