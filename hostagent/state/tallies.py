"""Tallies of what the resizes of each VM came to, by layer: in memory, for metrics and history only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import product
from typing import Final, Literal, get_args

from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.resources import COMPONENTS, ResourceVector
from ebbtide.messages.operations import VMOutcome

Direction = Literal["deflate", "reinflate"]
Ending = Literal["done", "short", "error"]
DIRECTIONS: Final[tuple[Direction, ...]] = get_args(Direction)
ENDINGS: Final[tuple[Ending, ...]] = get_args(Ending)
#: Why a component was not reached, where no layer is to blame: a call failed, and nobody could be asked for it.
ERROR: Final = "error"
UNASKED: Final = "unasked"
#: All that `_reason` says.
REASONS: Final[Mapping[Direction, tuple[str, ...]]] = {
    "deflate": (*(layer.value for layer in Layer if layer is not Layer.COLD), ERROR, UNASKED),
    "reinflate": (Layer.GUEST.value, ERROR),
}


class Tally:
    """One VM's. Amounts are in the unit of the component's name."""

    def __init__(self) -> None:
        #: By direction and how they ended; steps of steady mode only where they failed.
        self.resizes: Counter[tuple[Direction, Ending]] = Counter()
        #: By direction, layer and component.
        self.asked: dict[tuple[Direction, str, str], float] = defaultdict(float)
        self.verified: dict[tuple[Direction, str, str], float] = defaultdict(float)
        #: By component, what its application has given and not got back, as far as that was seen; None: it was not.
        self.given: dict[str, float] | None = None
        #: By direction and layer.
        self.seconds: dict[tuple[Direction, str], float] = defaultdict(float)
        #: How often a component was not reached, by direction, component and reason.
        self.shortfalls: Counter[tuple[Direction, str, str]] = Counter()

    def add(self, outcome: VMOutcome, gently: bool = False) -> None:
        """Count a resize that has ended.

        :param gently: it was a step of steady mode, which takes what there is: less than its target is no shortfall.
        """
        ways = {name: _way(outcome, name) for name in COMPONENTS}
        present: set[Direction] = {way for way in ways.values() if way is not None}
        short = [name for name, missing in outcome.shortfall.vector().as_dict().items() if missing > 0]
        short_ways = {ways[name] for name in short}
        counts = not gently or bool(outcome.errors)
        for way in present if counts else ():
            ended: Ending = "error" if outcome.errors else "short" if way in short_ways else "done"
            self.resizes[way, ended] += 1
        worked: dict[tuple[Direction, str], float] = {}
        for row in outcome.ledger:
            if (direction := ways.get(row.resource)) is None:
                continue
            key = direction, row.layer.value
            self.asked[*key, row.resource] += row.asked
            self.verified[*key, row.resource] += row.verified
            if self.given is not None and row.layer is Layer.APPLICATION:
                amount = row.verified if direction == "deflate" else -row.verified
                self.given[row.resource] = max(self.given.get(row.resource, 0.0) + amount, 0.0)
            # A layer works on all components at once, and each of its rows says how long.
            worked[key] = max(worked.get(key, 0.0), row.seconds)
        for key, seconds in worked.items():
            self.seconds[key] += seconds
        for name in short if counts else ():
            if (direction := ways[name]) is not None:
                self.shortfalls[direction, name, _reason(outcome, direction, name)] += 1

    def application_holds(self, guest: ResourceVector) -> ResourceVector | None:
        """The part of what the guest layer keeps away that the application made possible; None: it is not known.

        An agent that finds a VM deflated has not seen whose part that was, until all of it was given back.
        """
        if guest.is_zero():
            self.given = {}
        if self.given is None:
            return None
        self.given = {name: min(amount, guest[name]) for name, amount in self.given.items()}
        return ResourceVector.of(self.given)


class Tallies:
    """Those of all VMs, by name, and of the whole host, with all that can be counted in it from the beginning."""

    def __init__(self) -> None:
        self._tallies: dict[str, Tally] = {}
        #: VMs that are gone included.
        self.whole = Tally()
        for way, layer in product(DIRECTIONS, Layer):
            self.whole.seconds[way, layer.value] = 0.0
            for name in COMPONENTS:
                self.whole.asked[way, layer.value, name] = self.whole.verified[way, layer.value, name] = 0.0
        for way, name in product(DIRECTIONS, COMPONENTS):
            for reason in REASONS[way]:
                self.whole.shortfalls[way, name, reason] = 0

    def add(self, outcome: VMOutcome, gently: bool = False) -> None:
        """Count a resize of a VM that has ended (`Tally.add`)."""
        for tally in (self.of(outcome.name), self.whole):
            tally.add(outcome, gently)

    def of(self, vm: str) -> Tally:
        return self._tallies.setdefault(vm, Tally())

    def forget(self, vm: str) -> None:
        self._tallies.pop(vm, None)


def _way(outcome: VMOutcome, component: str) -> Direction | None:
    """Which way a component was to go."""
    before, target = outcome.before.vector()[component], outcome.target.vector()[component]
    if before == target:
        return None
    return "deflate" if target < before else "reinflate"


def _reason(outcome: VMOutcome, direction: Direction, component: str) -> str:
    """Error, the last layer that was asked and gave less, or nobody. What a guest does not take back is its own."""
    if outcome.errors:
        return ERROR
    if direction == "reinflate":
        return Layer.GUEST.value
    rows = [
        row
        for row in outcome.ledger
        if row.resource == component and row.asked > row.verified and row.layer is not Layer.COLD
    ]
    return rows[-1].layer.value if rows else UNASKED
