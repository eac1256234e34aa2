"""Verdict whether a guest is under memory pressure, and what it wants (docs/internals/pressure.md;
docs/internals/contracts.md, safety).

A state machine without a clock: readings and requests in, a verdict out. All of it is the guest's own word and not to
be trusted: it can keep the guest from being shrunk and ask for what the VM was sold, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ebbtide.deflation.allocations import Allocation
from ebbtide.deflation.cascade.ordinary import SHORT_SHARE
from ebbtide.deflation.resources import ZERO, ResourceVector


@dataclass(frozen=True, slots=True)
class Thresholds:
    """From where on a figure is a sign of pressure."""

    #: Share of time in which some task, and all tasks, waited for memory, per cent (Linux: PSI).
    some_percent: float
    full_percent: float
    #: PSI also rises while a kernel only drops caches, which is what a deflation is for. It counts only together with
    #: a witness that the memory is missed: so many page faults a second that waited for a disk, or available memory
    #: under so large a share of the guest's reserve.
    witness_faults_per_s: float
    witness_available: float
    #: So many such faults are a sign by themselves, with a little PSI where the kernel has it: programs that start
    #: cause them too.
    faults_per_s: float
    faults_some_percent: float
    #: So small a share of the guest's reserve left available is a sign by itself.
    available: float


#: Pressure begins when a reading is beyond these ...
ENTER: Final = Thresholds(20.0, 10.0, 10.0, 1.0, 100.0, 5.0, 0.25)
#: ... and ends when readings have stayed within these.
LEAVE: Final = Thresholds(8.0, 4.0, 5.0, 1.25, 40.0, 2.0, 0.75)
#: Counters are compared over at least this long, in seconds: a single stall is no pressure.
WINDOW_S: Final = 1.5
#: A comparison over longer than this says nothing of now, in seconds.
LONGEST_WINDOW_S: Final = 30.0
#: A reading older than this is none, in seconds: no memory is taken.
STALE_S: Final = 10.0
#: A guest under pressure that falls silent stays so for this long, in seconds: thrashing silences it, for minutes.
UNSEEN_S: Final = 180.0
#: So long a guest must be calm until its pressure has ended, in seconds; doubled each time pressure comes back within
#: AGAIN_S of its end.
CALM_S: Final = 10.0
LONGEST_CALM_S: Final = 320.0
AGAIN_S: Final = 300.0
#: How long a request of the guest stands, in seconds.
REQUEST_S: Final = 30.0
#: A request counts once in this many seconds; doubled by each one that is repeated (within twice the cool-down)
#: although the VM has not been deflated meanwhile.
COOL_DOWN_S: Final = 60.0
LONGEST_COOL_DOWN_S: Final = 3840.0
#: Claims of pressure and requests count for so long at a stretch, in seconds: they are the guest's word alone, and one
#: that claims without end would never be deflated. Each second without a claim that counts gives back so much of it,
#: and one that has spent it is heard again when it has this share of it. A claim costs at least the shortest calm that
#: would end it: one that ends by a reboot, or by figures that go back, would cost nothing, however often it begins.
BUDGET_S: Final = 900.0
REFILL: Final = 0.25
HEARD_AGAIN: Final = 0.25


@dataclass(frozen=True, slots=True)
class PressureReading:
    """What a guest says of its memory. None: it does not say, which is not zero."""

    boot_id: str
    available_mib: float
    reserve_mib: float
    #: PSI of memory: averages over 10 s in per cent, and microseconds stalled since boot.
    some_percent: float | None = None
    full_percent: float | None = None
    some_total_us: int | None = None
    full_total_us: int | None = None
    #: Since boot: faults that waited for a disk, and pages swapped in.
    major_faults: int | None = None
    swap_in_pages: int | None = None
    #: Said by the balloon driver of a guest without our agent, once a second: less of its reserve may be used up.
    ordinary: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be thought of a VM now."""

    #: It is shrunk no further and gets at once what can be spared.
    under_pressure: bool
    #: There is a fresh reading; without one no memory is taken (docs/internals/contracts.md, safety).
    known: bool
    #: What it wants beyond its current size, never beyond nominal.
    wants: ResourceVector
    sentence: str
    #: Whether its kernel is short of memory; not where it is only presumed to be, or asks for more itself.
    short_of_memory: bool


@dataclass(frozen=True, slots=True)
class _Rates:
    """What two readings say of the time between them; None where a counter is missing or went back."""

    some_percent: float | None = None
    full_percent: float | None = None
    faults_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Signs:
    """A reading together with its rates."""

    reading: PressureReading
    rates: _Rates

    @property
    def some_percent(self) -> float | None:
        return _larger(self.reading.some_percent, self.rates.some_percent)

    @property
    def full_percent(self) -> float | None:
        return _larger(self.reading.full_percent, self.rates.full_percent)

    def press(self, limit: Thresholds) -> bool:
        """Whether they are beyond the thresholds."""
        reading, some, faults = self.reading, self.some_percent, self.rates.faults_per_s
        share = max(limit.available, SHORT_SHARE) if reading.ordinary else limit.available
        if reading.available_mib < share * reading.reserve_mib:
            return True
        if faults is not None and faults >= limit.faults_per_s and (some is None or some >= limit.faults_some_percent):
            return True
        missed = (faults or 0.0) >= limit.witness_faults_per_s
        return self.stall(limit) and (missed or reading.available_mib < limit.witness_available * reading.reserve_mib)

    def stall(self, limit: Thresholds) -> bool:
        """Whether tasks wait for memory, whyever."""
        return (self.some_percent or 0.0) >= limit.some_percent or (self.full_percent or 0.0) >= limit.full_percent

    @property
    def unwitnessed(self) -> bool:
        """Whether a stall is all that is known: there is no second reading yet that would tell its faults apart."""
        return self.stall(ENTER) and self.rates.faults_per_s is None and self.reading.major_faults is not None

    def __str__(self) -> str:
        parts = []
        if self.some_percent is not None and self.full_percent is not None:
            parts.append(
                f"some task waits for memory {self.some_percent:.0f} % of the time, all do {self.full_percent:.0f} %"
            )
        if self.rates.faults_per_s is not None:
            parts.append(f"{self.rates.faults_per_s:.0f} major faults a second")
        parts.append(f"{self.reading.available_mib:.0f} MiB available, reserve {self.reading.reserve_mib:.0f} MiB")
        return ", ".join(parts)


class PressureWatch:
    """One VM's pressure. ``now`` is in seconds, of a clock that never goes back."""

    def __init__(self) -> None:
        self._baseline: tuple[float, PressureReading] | None = None
        self._seen_at: float | None = None
        self._signs: _Signs | None = None
        #: Of the window before the last one, see `_rates`.
        self._earlier_faults_per_s = 0.0
        self._pressed = False
        self._calm_since: float | None = None
        self._calm_s = CALM_S
        self._ended_at: float | None = None
        self._wanted = ZERO
        self._reason = ""
        self._asked_at: float | None = None
        self._cool_down_s = COOL_DOWN_S
        self._deflated_since = False
        #: For how long its claims still count.
        self.budget_s = BUDGET_S
        self._metered_at: float | None = None
        #: What a second adds to the budget, and the calm of this pressure: it counts as claimed once it is broken.
        self._per_s = REFILL
        self._calm_passed_s = 0.0
        self._spent = False
        #: Since when there has been a claim that counts.
        self._claims_since: float | None = None

    def observe(self, now: float, reading: PressureReading) -> None:
        """Take in a reading: of a regular look, or as the guest pushed it."""
        if self._seen_at is not None and now - self._seen_at > UNSEEN_S:
            self._pressed, self._calm_since = False, None
        rates = self._signs.rates if self._signs is not None else _Rates()
        if self._baseline is None or self._baseline[1].boot_id != reading.boot_id:
            # No rate from one reading, and none across a reboot.
            self.boots(now)
            self._baseline, rates = (now, reading), _Rates()
        elif (window_s := now - self._baseline[0]) >= WINDOW_S:
            rates = self._rates(self._baseline[1], reading, window_s) if window_s <= LONGEST_WINDOW_S else _Rates()
            self._baseline = (now, reading)
        self._seen_at, self._signs = now, _Signs(reading, rates)
        self._judge(now, self._signs)

    def boots(self, now: float) -> None:
        """The guest boots anew, or is off: what it said before says nothing of now."""
        # A new boot starts without the old one's troubles. But a reboot is the guest's word, too: what it claimed
        # before stays booked, and coming back is coming back.
        if self._pressed:
            self._pass(now)
            self._end_calm(-1.0)
            self._ended_at = now
        self._baseline = self._seen_at = self._calm_since = None
        self._pressed, self._wanted, self._earlier_faults_per_s = False, ZERO, 0.0

    def request(self, now: float, asked: ResourceVector, allocation: Allocation, reason: str) -> str:
        """Take in the guest's own request for ``asked`` beyond what the VM has.

        :returns: why it does not count; empty if it does.
        """
        wanted = (allocation.current + asked).smaller(allocation.nominal)
        if wanted.fits_in(allocation.current):
            return "the VM has all of that which it was sold" if not asked.is_zero() else "the request names nothing"
        if self._asked_at is not None:
            since_s = now - self._asked_at
            if since_s < self._cool_down_s:
                return f"asked {since_s:.0f} s ago; it counts again in {self._cool_down_s - since_s:.0f} s"
            repeated = since_s < 2 * self._cool_down_s and not self._deflated_since
            self._cool_down_s = min(2 * self._cool_down_s, LONGEST_COOL_DOWN_S) if repeated else COOL_DOWN_S
        self._asked_at, self._wanted, self._reason = now, wanted, reason
        self._deflated_since = False
        return ""

    def deflated(self) -> None:
        """The VM was deflated further: it has reason to ask again, so its cool-down is the shortest."""
        self._deflated_since = True
        self._cool_down_s = COOL_DOWN_S

    def verdict(self, now: float, allocation: Allocation) -> Verdict:
        """What is to be thought of the VM now, at its current size."""
        age_s = now - self._seen_at if self._seen_at is not None else None
        known = age_s is not None and age_s <= STALE_S
        pressed = self._pressed and age_s is not None and age_s <= UNSEEN_S
        asks = self._asked_at is not None and now - self._asked_at <= REQUEST_S and not self._wanted.is_zero()
        # Unknown is not zero: an agent that was started just now, or has not looked for long, takes nothing meanwhile.
        presumed = known and not pressed and self._signs is not None and self._signs.unwitnessed
        wants, reasons = ZERO, []
        if pressed:
            lacks_mib = max(allocation.nominal.memory_mib - allocation.current.memory_mib, 0.0)
            wants = ResourceVector(memory_mib=lacks_mib)
            reasons.append(f"under memory pressure: {self._signs}")
            if not known:
                reasons.append(f"silent for {age_s:.0f} s since")
        if presumed:
            reasons.append(f"it is not known yet whether the memory is missed: {self._signs}")
        if asks:
            wants = wants.larger(self._wanted.less(allocation.current))
            reasons.append(f"asks for more itself: {self._reason or 'no reason given'}")
        # The calm before pressure has ended is no claim, but silence in it is no calm.
        calm = pressed and known and self._calm_since is not None and not (asks or presumed)
        self._meter(now, pressed or asks or presumed, calm)
        if self._spent and reasons:
            heard_s = (HEARD_AGAIN * BUDGET_S - self.budget_s) / REFILL
            why = f"it has claimed pressure for {BUDGET_S:g} s, which is all that counts; again in {heard_s:.0f} s"
            return Verdict(False, known, ZERO, f"{why}: {'; '.join(reasons)}", False)
        if not reasons:
            reasons.append(f"no pressure: {self._signs}" if known else "no fresh reading, so no memory is taken")
        return Verdict(pressed or asks or presumed, known, wants, "; ".join(reasons), pressed)

    def _meter(self, now: float, claims: bool, calm: bool) -> None:
        """Book the time since the last verdict, and from now on against the budget of claims, or in its favour."""
        self._pass(now)
        if self._claims_since is not None and not claims:
            self._book(min(now - self._claims_since - CALM_S, 0.0))
        self._spent = self.budget_s <= 0 or (self._spent and self.budget_s < HEARD_AGAIN * BUDGET_S)
        if self._spent or not claims:
            self._claims_since, self._per_s = None, REFILL
        else:
            self._claims_since = now if self._claims_since is None else self._claims_since
            self._per_s = 0.0 if calm else -1.0

    def _pass(self, now: float) -> None:
        """Book the time since the last verdict, as that said."""
        passed_s = now - self._metered_at if self._metered_at is not None else 0.0
        if self._per_s == 0:
            self._calm_passed_s += passed_s
        self._book(passed_s * self._per_s)
        self._metered_at = now

    def _book(self, seconds: float) -> None:
        self.budget_s = min(max(self.budget_s + seconds, 0.0), BUDGET_S)

    def _end_calm(self, per_s: float) -> None:
        """Book the calm of a pressure: -1 where the pressure went on after it."""
        self._book(self._calm_passed_s * per_s)
        self._calm_passed_s, self._calm_since = 0.0, None

    def _judge(self, now: float, signs: _Signs) -> None:
        if signs.press(ENTER):
            if not self._pressed:
                again = self._ended_at is not None and now - self._ended_at < AGAIN_S
                self._calm_s = min(2 * self._calm_s, LONGEST_CALM_S) if again else CALM_S
                # Of the one before, which silence or a reboot has ended.
                self._calm_passed_s = 0.0
            self._pressed = True
            self._end_calm(-1.0)
        elif self._pressed and signs.press(LEAVE):
            self._end_calm(-1.0)
        elif self._pressed:
            self._calm_since = now if self._calm_since is None else self._calm_since
            if now - self._calm_since >= self._calm_s:
                self._pressed, self._ended_at = False, now
                self._end_calm(REFILL)

    def _rates(self, earlier: PressureReading, later: PressureReading, window_s: float) -> _Rates:
        faults = _larger(
            rate_per_s(earlier.major_faults, later.major_faults, window_s),
            rate_per_s(earlier.swap_in_pages, later.swap_in_pages, window_s),
        )
        lasting = faults
        if faults is not None:
            if later.some_percent is None:
                # Without PSI a program that starts looks the same: only what lasts over two windows counts.
                lasting = min(faults, self._earlier_faults_per_s)
            self._earlier_faults_per_s = faults
        return _Rates(
            stalled_percent(earlier.some_total_us, later.some_total_us, window_s),
            stalled_percent(earlier.full_total_us, later.full_total_us, window_s),
            lasting,
        )


def rate_per_s(earlier: int | None, later: int | None, window_s: float) -> float | None:
    """How fast a counter rose; None where it is not known or went back."""
    if earlier is None or later is None or later < earlier:
        return None
    return (later - earlier) / window_s


def stalled_percent(earlier_us: int | None, later_us: int | None, window_s: float) -> float | None:
    """Share of a time that was stalled, per cent; None where it is not known."""
    rate = rate_per_s(earlier_us, later_us, window_s)
    return None if rate is None else min(rate / 1e6 * 100, 100.0)


def _larger(a: float | None, b: float | None) -> float | None:
    known = [value for value in (a, b) if value is not None]
    return max(known) if known else None
