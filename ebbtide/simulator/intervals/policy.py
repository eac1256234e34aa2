"""First fit that knows of machine intervals, for the engine (Wijayawardana 2025 §6.1, Algorithms 1 to 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.intervals.arrays import GROWN, H1, HEURISTICS, SHORTER_H, Intervals
from ebbtide.simulator.intervals.looks import changed, ended, moved, schedule
from ebbtide.simulator.jobs.columns import Floats, State
from ebbtide.simulator.jobs.intake import CLASS_GROWTH, CLASSES
from ebbtide.simulator.jobs.policy import Policy
from ebbtide.simulator.nodes import tree as node_tree

__all__ = ["HEURISTICS", "Options", "band", "policy"]


@dataclass(frozen=True)
class Options:
    """What the policy goes by.

    :param heuristics: a name of `HEURISTICS`.
    :param stable: machines that are never switched off: the first so many.
    :param every_s: time between two instants at which machines may be switched.
    :param big_core_s: work from which a job is big (H1), in core-seconds.
    :param long_s: runtime from which it is long (H3).
    :param aggressiveness: A: the risk that is taken is below it (H4).
    :param ended: of past intervals, how many had which length in steps, by band: shape (bands, steps); longer ones
        count as steps - 1. More bands tell machines apart by their numbers; the thesis has one.
    :param learns: whether intervals that end count, too.
    :raises InvalidParameter: names the field.
    """

    heuristics: str
    stable: int
    every_s: float
    big_core_s: float
    long_s: float
    aggressiveness: float
    ended: Floats
    learns: bool = True

    def __post_init__(self) -> None:
        if self.heuristics not in HEURISTICS:
            raise InvalidParameter("policy", f"must be one of {', '.join(HEURISTICS)}, not {self.heuristics!r}")
        if not (math.isfinite(self.every_s) and self.every_s > 0):
            raise InvalidParameter("every_s", f"must be above 0 and finite, but is {self.every_s:g}")
        if not 0 <= self.aggressiveness <= 1:
            raise InvalidParameter("aggressiveness", f"must be a share, but is {self.aggressiveness:g}")
        if self.ended.ndim != 2 or self.ended.shape[0] < 1 or self.ended.shape[1] < 2:
            raise InvalidParameter("ended", f"must have shape (bands, steps), not {self.ended.shape}")


def band(machine: int, stable: int, machines: int, bands: int) -> int:
    """The band of a machine: those that may be switched off, in so many parts by their numbers."""
    share = (machine - stable) / max(machines - stable, 1)
    return min(max(int(share * bands + 1e-9), 0), bands - 1)


def policy(options: Options) -> Policy:
    """The policy for the engine."""

    def resized(s: State, p: Any, most_cores: int, seed: int) -> Intervals:
        machines, bands = len(s.machines), len(options.ended)
        past = np.array(options.ended, np.float64) if p is None else p.ended
        # Where big jobs are told apart no others go on stable machines.
        stable_only = options.stable if HEURISTICS[options.heuristics] & H1 else 0
        return Intervals(
            facts=np.array([HEURISTICS[options.heuristics], options.stable, 1, options.learns, 1, 0, 0, 0], np.int64),
            numbers=np.array(
                [options.every_s, options.big_core_s, options.long_s, options.aggressiveness, -np.inf, 0.0, np.inf]
            ),
            ended=past,
            tails=np.zeros(options.ended.shape),
            sums=np.zeros(options.ended.shape),
            met=np.zeros(options.ended.shape[1]) if p is None else p.met,
            hopeless=np.full((3, most_cores + 1), np.inf),
            tree=node_tree.tree_of(machines),
            known=np.full(machines, -1, np.int64),
            spare=np.zeros(machines, np.int64),
            edges=np.concatenate([[0.0], CLASS_GROWTH ** np.arange(1.0, CLASSES) * (1 - 1e-9), [np.inf]]),
            killed=np.zeros(1 + len(SHORTER_H)) if p is None else p.killed,
            bands=np.array([band(i, options.stable, machines, bands) for i in range(machines)], np.int64),
            grown=np.zeros(GROWN, np.int64),
            refused_s=np.where(np.arange(machines) < stable_only, 0.0, np.inf),
            after=np.arange(1, machines + 1),
        )

    kernels: dict[str, Any] = {"moved": moved, "changed": changed, "ended": ended, "schedule": schedule}
    return Policy("intervals", kernels, Intervals, resized, by_demand=False)
