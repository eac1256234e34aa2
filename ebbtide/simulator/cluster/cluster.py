"""A cluster that is fed arrivals: its state, its decisions, its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from ebbtide.deflation.kernels import WIDTH
from ebbtide.deflation.resources import COMPONENTS, ResourceVector
from ebbtide.simulator import archives
from ebbtide.simulator.cluster.checks import RULES, check
from ebbtide.simulator.cluster.loop import advance
from ebbtide.simulator.cluster.members import recount
from ebbtide.simulator.cluster.placing import scale_of
from ebbtide.simulator.cluster.returning import bring_back, move
from ebbtide.simulator.cluster.state import (
    ADMITTED,
    ALIVE,
    ARRIVAL,
    DEPARTED,
    FAULT,
    FAULT_COMPONENT,
    FAULT_NODE,
    FAULT_VM,
    HIGH,
    HOSTED,
    LOW,
    NOBODY,
    NODE,
    NOW_S,
    NUMBER,
    OFFERED,
    PREEMPTED,
    REFUSED,
    RETURNED,
    SOLD_CORES,
    SPARE,
    STAY_CORE_S,
    STAY_S,
    TALLY,
    VICTIMS,
    VM,
    WHOLE,
    WINDOW_FROM_S,
    WINDOW_UNTIL_S,
    Arrivals,
    Asked,
    Curves,
    Rules,
    asked,
    grown,
    new_nodes,
    new_tally,
    new_vms,
    new_work,
    table_of,
)
from ebbtide.simulator.errors import ConservationBroken, InvalidParameter, SimulatorError
from ebbtide.simulator.inputs.batches import Floats, Indices

#: Slots to begin with.
_SLOTS: Final = 256
#: Arrivals that the loop is given at once; the table of VMs has room for that many more than are alive.
CHUNK: Final = 8192
#: Relative, of integrals over a whole run.
_NEARLY: Final = 1e-6
_FORM: Final = 3


class Decisions(NamedTuple):
    """What became of arrivals."""

    #: By arrival: its node, or -1: refused.
    node: Indices
    #: A row for each VM that was preempted, in order: its number, its node, the number of the arrival for which.
    victims: Indices


@dataclass(frozen=True, slots=True)
class Hosted:
    """A VM on a node."""

    number: int
    low_priority: bool
    nominal: ResourceVector
    minimum: ResourceVector
    current: ResourceVector
    admitted_s: float
    departs_s: float


class Cluster:
    """Nodes, and the VMs on them. Arrivals are numbered from 0 on in the order in which they are taken.

    :param capacity: of each node, shape (n, 4) in the order of ``COMPONENTS``; 0 in disk or network: not declared.
    :param window_s: begin and end of what is measured; what comes before is warm-up.
    :param from_s: where time begins.
    :raises InvalidParameter: no nodes, or capacities that are negative, not finite, or none in CPU or memory.
    """

    def __init__(
        self,
        capacity: Floats,
        rules: Rules,
        curves: Curves,
        window_s: tuple[float, float] = (0.0, float("inf")),
        from_s: float = 0.0,
    ) -> None:
        if capacity.ndim != 2 or capacity.shape[1] != WIDTH or not len(capacity):
            raise InvalidParameter("capacity", f"must have the shape (nodes, {WIDTH}), not {capacity.shape}")
        if not np.isfinite(capacity).all() or (capacity < 0).any() or (capacity[:, :2] <= 0).any():
            raise InvalidParameter("capacity", "must be finite, not negative, and above 0 in CPU and memory")
        if not window_s[0] <= window_s[1]:
            raise InvalidParameter("window_s", f"must not end before it begins, but is {window_s}")
        self.rules = rules
        self.curves = curves
        self.nodes = new_nodes(capacity)
        self.vms = new_vms(_SLOTS)
        self.tally = new_tally(_SLOTS, window_s, from_s)
        self._work = new_work(_SLOTS)
        scale_of(self.nodes.capacity, self.tally.factors)
        for node in range(len(capacity)):
            recount(self.vms, self.nodes, rules, node)

    # --- time passes -------------------------------------------------------------------------------------------------

    def take(self, arrivals: Arrivals) -> Decisions:
        """Go through arrivals and all departures before the last of them.

        :raises InvalidParameter: times that fall, or departures before their arrivals.
        :raises ConservationBroken: a validating run has found something.
        """
        self._judge(arrivals)
        count = len(arrivals.at_s)
        outcomes = np.full(count, NOBODY, np.int64)
        victims = []
        for start in range(0, count, CHUNK):
            part = slice(start, min(start + CHUNK, count))
            victims.append(self._advance(asked(arrivals, part), -np.inf, outcomes[part]))
        return Decisions(outcomes, np.concatenate(victims) if victims else np.zeros((0, 3), np.int64))

    def finish(self, until_s: float) -> None:
        """Go through all departures until then, and check that all that came in has gone out or is still there.

        :raises ConservationBroken: it has not.
        """
        self._advance(np.zeros(0, ARRIVAL).view(np.recarray), until_s, np.zeros(0, np.int64))
        if not check(self.vms, self.nodes, self.tally, self.rules):
            raise self._broken()
        self._check_work()

    def pass_until(self, until_s: float) -> None:
        """Go through all departures until then.

        :raises ConservationBroken: a validating run has found something.
        """
        self._advance(np.zeros(0, ARRIVAL).view(np.recarray), until_s, np.zeros(0, np.int64))

    def bring_back(self, number: int, vm: Arrivals, node: int, least: Floats) -> bool:
        """Start a preempted VM again on a node, deflated if that is all there is; False: not even ``least`` fits.

        :param vm: one row: the sizes that it arrived with, and when it will depart now.
        """
        self._make_room(1)
        arguments = (self.vms, self.nodes, self.tally, self.curves, self.rules, self._work)
        started = bool(bring_back(*arguments, asked(vm, slice(0, 1)), number, node, least))
        self._judge_now()
        return started

    def move(self, number: int, node: int, shrunk: bool = False) -> bool:
        """Move a VM to another node, for which those there give; False: they cannot. What is free then is shared.

        :param shrunk: whether it gives all that it has above its minimum before it goes.
        """
        here = np.flatnonzero((self.vms.number == number) & (self.vms.node != NOBODY))
        arguments = (self.vms, self.nodes, self.tally, self.curves, self.rules, self._work)
        moved = bool(move(*arguments, int(here[0]), node, shrunk))
        self._judge_now()
        return moved

    def _judge_now(self) -> None:
        if self.rules.validate and not check(self.vms, self.nodes, self.tally, self.rules):
            raise self._broken()

    def _advance(self, arrivals: Asked, until_s: float, outcomes: Indices) -> Indices:
        self._make_room(len(arrivals))
        victims = np.zeros((len(self.vms), 3), np.int64)
        self.tally.state[VICTIMS] = 0
        well = advance(
            self.vms,
            self.nodes,
            self.tally,
            self.curves,
            self.rules,
            self._work,
            arrivals,
            until_s,
            outcomes,
            victims,
        )
        if not well:
            raise self._broken()
        return victims[: int(self.tally.state[VICTIMS])].copy()

    def _make_room(self, more: int) -> None:
        slots = len(self.vms)
        if self.tally.state[SPARE] < more:
            slots = max(2 * slots, int(self.tally.state[ALIVE]) + more)
            self.vms = grown(self.vms, self.tally, slots)
            self._work = new_work(slots)

    def _judge(self, arrivals: Arrivals) -> None:
        at_s = arrivals.at_s
        if not len(at_s):
            return
        if at_s[0] < self.now_s or (np.diff(at_s) < 0).any():
            raise InvalidParameter("at_s", f"must not fall, nor be before {self.now_s:g} s, where the cluster is")
        if not (arrivals.departs_s >= at_s).all():
            raise InvalidParameter("departs_s", "must not be before at_s")
        if not (np.isfinite(arrivals.upper).all() and (arrivals.upper >= arrivals.minimum).all()):
            raise InvalidParameter("minimum", "must not exceed upper, which must be finite")
        if (arrivals.minimum < 0).any():
            raise InvalidParameter("minimum", "must not be negative")
        if not ((arrivals.curve >= 0) & (arrivals.curve < len(self.curves.points))).all():
            raise InvalidParameter("curve", f"must be a row of {len(self.curves.points)} curves")

    # --- questions ---------------------------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        """Where time is."""
        return float(self.tally.clock[NOW_S])

    @property
    def taken(self) -> int:
        """Arrivals so far."""
        return int(self.tally.state[NUMBER])

    @property
    def alive(self) -> int:
        """VMs that run now."""
        return int(self.tally.state[ALIVE])

    def on(self, node: int) -> Iterator[Hosted]:
        """The VMs of a node, in the order in which they came."""
        vms, vm = self.vms, int(self.nodes.first[node])
        while vm != NOBODY:
            yield Hosted(
                number=int(vms.number[vm]),
                low_priority=bool(vms.sold_as[vm] == LOW),
                nominal=ResourceVector(*vms.upper[vm].tolist()),
                minimum=ResourceVector(*vms.minimum[vm].tolist()),
                current=ResourceVector(*vms.current[vm].tolist()),
                admitted_s=float(vms.admitted_s[vm]),
                departs_s=float(vms.departs_s[vm]),
            )
            vm = int(vms.after[vm])

    def hosted_core_s(self) -> Floats:
        """Nominal core-seconds that each node has hosted within the window so far."""
        nodes, clock = self.nodes, self.tally.clock
        until_s = min(self.now_s, float(clock[WINDOW_UNTIL_S]))
        since_s = np.maximum(nodes.since_s, clock[WINDOW_FROM_S])
        hosted: Floats = nodes.sold_core_s + nodes.sold_cores * np.maximum(until_s - since_s, 0.0)
        return hosted

    # --- checks ------------------------------------------------------------------------------------------------------

    def _broken(self) -> ConservationBroken:
        tally = self.tally
        rule = RULES[int(tally.fault[FAULT])].format(
            node=int(tally.fault[FAULT_NODE]),
            vm=int(tally.fault[FAULT_VM]),
            component=COMPONENTS[int(tally.fault[FAULT_COMPONENT])],
        )
        return ConservationBroken(f"at {self.now_s:.6f} s: {rule}")

    def _check_work(self) -> None:
        """Work in = work out: VMs and their time."""
        counts = self.tally.counts[WHOLE].sum(axis=0)
        if counts[OFFERED] != counts[ADMITTED] + counts[REFUSED]:
            raise ConservationBroken("VMs were asked for that were neither admitted nor refused")
        if counts[ADMITTED] + counts[RETURNED] != counts[DEPARTED] + counts[PREEMPTED] + self.alive:
            raise ConservationBroken("VMs were admitted that neither left nor are still there")
        if self.tally.counts[WHOLE, HIGH, PREEMPTED]:
            raise ConservationBroken("a high-priority VM was preempted")
        if counts[PREEMPTED] and not self.rules.preempts:
            raise ConservationBroken("VMs were preempted, which the policy never does")
        hosted, given = float(self.hosted_core_s().sum()), float(self.tally.window[SOLD_CORES])
        if abs(given - hosted) > _NEARLY * max(given, 1.0):
            raise ConservationBroken(f"the nodes hosted {hosted:.6f} core-seconds, but the cluster {given:.6f}")
        here = self.vms.node != NOBODY
        stays_s = self.now_s - self.vms.admitted_s[here]
        for stay, level, still, what in (
            (STAY_S, HOSTED, stays_s.sum(), "VM-seconds"),
            (STAY_CORE_S, SOLD_CORES, (stays_s * self.vms.upper[here, 0]).sum(), "core-seconds"),
        ):
            out = float(self.tally.stays[stay] + still)
            given = float(self.tally.whole[level])
            if abs(given - out) > _NEARLY * max(out, 1.0):
                raise ConservationBroken(f"{given:.6f} {what} were hosted, but stays come to {out:.6f}")

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the whole state; what is there under this name is replaced at once or not at all.

        :raises SimulatorError: it cannot be written.
        """
        arrays = {
            "vms": self.vms,
            "nodes": self.nodes,
            "tally": np.array([self.tally], TALLY),
            **{f"curves.{name}": column for name, column in self.curves._asdict().items()},
            "rules": np.array(self.rules, np.float64),
            "form": np.array(_FORM),
        }
        try:
            archives.write(path, arrays)
        except OSError as error:
            raise SimulatorError(f"{path} cannot be written: {error}") from error

    @classmethod
    def load(cls, path: Path) -> Cluster:
        """A cluster as it was saved; it goes on bit for bit as the other would have.

        :raises SimulatorError: the file cannot be read, or is no checkpoint.
        """
        try:
            arrays = archives.read(path)
            if int(arrays["form"]) != _FORM:
                raise SimulatorError(f"{path} is a checkpoint of another version")
            numbers = arrays["rules"].tolist()
            rules = Rules._make([*map(int, numbers[:-1]), numbers[-1]])
            cluster = cls.__new__(cls)
            cluster.rules = rules
            cluster.curves = Curves(*(arrays[f"curves.{name}"] for name in Curves._fields))
            cluster.nodes = table_of(arrays["nodes"], NODE)
            cluster.vms = table_of(arrays["vms"], VM)
            cluster.tally = table_of(arrays["tally"], TALLY)[0]
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise SimulatorError(f"{path} is no checkpoint of a cluster: {error}") from error
        cluster._work = new_work(len(cluster.vms))
        return cluster
