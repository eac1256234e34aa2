"""The waiting policy for the engine, from its options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ebbtide.matcher.policies import cluster_state, past_lengths
from ebbtide.matcher.policies.forest import Forest, nothing
from ebbtide.matcher.policies.waiting import SIZES
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.jobs import nodes
from ebbtide.simulator.jobs.columns import MACHINE, UNLIMITED_MIB, State
from ebbtide.simulator.jobs.engine import Machines
from ebbtide.simulator.jobs.policy import Policy
from ebbtide.simulator.waiting import arrays as a
from ebbtide.simulator.waiting import hooks

#: Decisions that are recorded at most.
RECORDS: Final = 60_000


@dataclass(frozen=True)
class Options:
    """Who waits.

    :param short_below_s: t of LJW; 0: no job is short.
    :param wait_below_s: b of SWW: who has waited so long gets a machine on demand; infinite: never.
    :param tries: lengths are found out by trying.
    :param try_up_to: the chance to be long up to which a job is tried; 1: all are.
    :param hold_s: how long a job is held at most for trials of others to tell.
    :param half_life_s: of what others tell, by when they came.
    :param lifetimes: of the spot machines that jobs are tried on, one after the other; s; none: on demand. A job whose
        machine goes is asked again. For ``late`` of nobody: who stays after its trial would stay on spot.
    :param late: what says who would wait b or longer: ``nobody``, ``marks`` or ``forest``.
    :param by_core_time: whether a length is core-time, or runtime.
    :param marks: of each job by its number; needed for ``marks``, filled in with ``fills_marks``.
    :param records: whether decisions are recorded with their marks; every ``stride``-th.
    :param random: fixed machines take any of those that wait, drawn at each start.
    :raises InvalidParameter: names the field.
    """

    short_below_s: float = 900.0
    wait_below_s: float = 86_400.0
    tries: bool = False
    try_up_to: float = 1.0
    hold_s: float = 0.0
    half_life_s: float = 120.0
    lifetimes: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    late: str = "nobody"
    by_core_time: bool = True
    marks: NDArray[np.int8] = field(default_factory=lambda: np.empty(0, np.int8))
    fills_marks: bool = False
    records: bool = False
    stride: int = 1
    random: bool = False
    forest: Forest = field(default_factory=nothing)

    def __post_init__(self) -> None:
        for name in ("short_below_s", "wait_below_s", "hold_s"):
            if not getattr(self, name) >= 0:
                raise InvalidParameter(name, f"must not be negative, but is {getattr(self, name):g}")
        if not self.half_life_s > 0:
            raise InvalidParameter("half_life_s", f"must be positive, but is {self.half_life_s:g}")
        if self.late not in a.LATE:
            raise InvalidParameter("late", f"must be one of {', '.join(a.LATE)}, not {self.late!r}")
        if len(self.lifetimes) and self.late != "nobody":
            raise InvalidParameter("lifetimes", "go with nobody who is late")
        if (self.late == "marks" or self.fills_marks) and not len(self.marks):
            raise InvalidParameter("marks", "are missing")
        if self.stride < 1:
            raise InvalidParameter("stride", f"must be at least 1, but is {self.stride}")


def elastic(machines: Machines) -> int:
    """Elastic machines that the policy needs beside the fixed ones."""
    return 1 + 2 * machines.cpu_cores


def policy(options: Options, machines: Machines) -> Policy:
    """The policy, for an engine with these machines and so many `elastic` ones."""

    def resized(s: State, p: Any, most_cores: int, seed: int) -> a.Waiting:
        knobs = np.zeros(a.KNOBS, np.int64)
        knobs[a.KNOB.fixed], knobs[a.KNOB.most] = machines.count, machines.cpu_cores
        knobs[a.KNOB.most_mib] = UNLIMITED_MIB if machines.memory_mib is None else machines.memory_mib
        knobs[a.KNOB.tries] = options.tries and options.short_below_s > 0
        knobs[a.KNOB.late] = a.LATE[options.late]
        knobs[a.KNOB.by_core_time] = options.by_core_time
        knobs[a.KNOB.marks], knobs[a.KNOB.records] = options.fills_marks, options.records
        knobs[a.KNOB.stride], knobs[a.KNOB.random] = options.stride, options.random
        fixed = s.machines[: machines.count]
        cluster = np.zeros(cluster_state.SUMS)
        cluster[cluster_state.ALL_CORES] = fixed[:, MACHINE.cores].sum()
        cluster[cluster_state.ALL_MIB] = fixed[:, MACHINE.memory].sum()
        return a.Waiting(
            knobs=knobs,
            numbers=np.array(
                [
                    *(options.short_below_s, options.wait_below_s, options.try_up_to, options.hold_s),
                    *(options.half_life_s, np.inf),
                ]
            ),
            sums=np.zeros(a.SUMS),
            cluster=cluster,
            features=np.zeros(len(cluster_state.FEATURES)),
            sizes=np.array(SIZES, np.int64),
            marks=options.marks,
            rows=np.zeros((RECORDS if options.records else 0, len(cluster_state.FEATURES))),
            labels=np.zeros(RECORDS if options.records else 0),
            asked_s=np.zeros(RECORDS if options.records else 0),
            past=np.zeros((machines.cpu_cores + 1, past_lengths.COLUMNS)),
            lifetimes=options.lifetimes,
            forest=options.forest,
            nodes=nodes.make(nodes.BEST_FIT, machines.count, machines.cpu_cores, seed),
        )

    kernels: dict[str, Any] = {
        "moved": hooks.moved,
        "started": hooks.started,
        "ended": hooks.ended,
        "schedule": hooks.schedule,
    }
    return Policy("waiting", kernels, a.Waiting, resized, by_demand=True)
