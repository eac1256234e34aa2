"""The model `preemption`: what preempted VMs lose, by what becomes of them; over a trace of VMs.

See docs/research/preemption.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ebbtide.deflation.placement.rebalance_pace import RebalancePace
from ebbtide.simulator.cluster import model
from ebbtide.simulator.cluster.preempted import Account, Costs, ReturningCluster, Way
from ebbtide.simulator.cluster.settings import ClusterPolicy
from ebbtide.simulator.cluster.state import (
    ADMITTED,
    HELD_CORES,
    HELD_MIB,
    LOW,
    LOW_CORES,
    LOW_DEFLATED,
    LOW_HOSTED,
    SOLD_CORES,
    SOLD_MIB,
    WINDOW,
)
from ebbtide.simulator.cluster.workload import DAY_S
from ebbtide.simulator.experiments.fields import Given
from ebbtide.simulator.experiments.model import POLICY, Outcome, Progress


@dataclass(frozen=True, slots=True)
class PreemptionSettings:
    """One case of the model."""

    cluster: model.ClusterSettings
    way: Way
    costs: Costs
    pace: RebalancePace


#: What a run gives.
METRICS: Final = (
    *model.METRICS,
    *("preempted_vms_share", "preemptions_per_day", "deflated_vm_h_share", "deflated_vm_h_per_day"),
    *("taken_core_h_per_day", "taken_gib_h_per_day", "back_median_s", "back_mean_s", "back_within_1_h_share"),
    *("not_back_share", "off_vm_h_per_day", "work_lost_core_h_per_day", "work_lost_share", "moves_per_day"),
    *("moves_instead_per_day", "moved_gib_per_day"),
)


class PreemptionModel:
    """The cluster of `deflation-cluster` under deflation, with what becomes of the preempted."""

    name: Final = "preemption"
    version: Final = 4
    metrics: Final = METRICS

    def settings(self, given: Mapping[str, Any]) -> PreemptionSettings:
        fields = Given(given)
        way = Way(fields.choice(POLICY, [way.value for way in Way], Way.STOP.value))
        usual, pace = Costs(), RebalancePace()
        costs = Costs(
            boot_s=fields.number("boot_s", usual.boot_s, least=0),
            notice_s=fields.number("notice_s", usual.notice_s, least=0),
            program_share=fields.number("program_share", usual.program_share, least=0, most=1),
            disk_mib_s=fields.number("disk_mib_s", usual.disk_mib_s, above=0),
            checkpoint_every_s=fields.number("checkpoint_every_s", usual.checkpoint_every_s, above=0),
            move_mib_s=fields.number("move_mib_s", usual.move_mib_s, above=0),
            deadline_s=fields.number("deadline_s", usual.deadline_s, least=0),
            boot_memory_share=fields.number("boot_memory_share", usual.boot_memory_share, least=0, most=1),
            rebalance_every_s=fields.number("rebalance_every_s", usual.rebalance_every_s, above=0),
            rebalance_most_moves=fields.whole("rebalance_most_moves", usual.rebalance_most_moves, least=1),
        )
        rebalancing = RebalancePace(
            hold_s=fields.number("rebalance_hold_s", pace.hold_s, least=0),
            rest_s=fields.number("rebalance_rest_s", pace.rest_s, least=0),
            longest_s=fields.number("rebalance_longest_s", pace.longest_s, least=0),
            least_worth=fields.number("rebalance_least_worth", pace.least_worth, least=0),
        )
        settings = PreemptionSettings(model.settings_of(fields, ClusterPolicy.DEFLATION), way, costs, rebalancing)
        fields.end()
        return settings

    def bounds(self, settings: PreemptionSettings) -> dict[str, float]:
        """As of `deflation-cluster`."""
        return model.MODEL.bounds(settings.cluster)

    def prepare(self, settings: Sequence[PreemptionSettings], progress: Progress) -> Any:
        return model.MODEL.prepare([one.cluster for one in settings], progress)

    def run(self, settings: PreemptionSettings, seed: int, prepared: Any, progress: Progress) -> Outcome:
        case, window_s = model.Case(settings.cluster, seed, prepared), settings.cluster.window_s
        run = ReturningCluster(case.cluster, case.arrivals, settings.way, settings.costs, window_s, settings.pace)
        run.run(window_s[1], progress)
        outcome = case.outcome()
        return Outcome({**outcome.metrics, **_figures(case, run.account, window_s)}, outcome.tables, outcome.warnings)


def _figures(case: model.Case, account: Account, window_s: tuple[float, float]) -> dict[str, float]:
    """Of the window; NaN where there is nothing to take a share of."""
    levels, span_s = case.cluster.tally.window, window_s[1] - window_s[0]
    days, back_s = span_s / DAY_S, np.array(account.back_s)
    came = back_s[np.isfinite(back_s)]
    admitted = case.cluster.tally.counts[WINDOW, LOW, ADMITTED]
    low_core_s = float(levels[LOW_CORES])
    return {
        "preempted_vms_share": _share(len(account.preempted), admitted),
        "preemptions_per_day": account.preemptions / days,
        "deflated_vm_h_share": _share(levels[LOW_DEFLATED], levels[LOW_HOSTED]),
        "deflated_vm_h_per_day": float(levels[LOW_DEFLATED]) / 3600.0 / days,
        "taken_core_h_per_day": float(levels[SOLD_CORES] - levels[HELD_CORES]) / 3600.0 / days,
        "taken_gib_h_per_day": float(levels[SOLD_MIB] - levels[HELD_MIB]) / 1024.0 / 3600.0 / days,
        "back_median_s": float(np.median(came)) if len(came) else float("nan"),
        "back_mean_s": float(came.mean()) if len(came) else float("nan"),
        "back_within_1_h_share": _share((back_s <= 3600.0).sum(), len(back_s)),
        "not_back_share": _share(len(back_s) - len(came), len(back_s)),
        "off_vm_h_per_day": account.off_vm_s / 3600.0 / days,
        "work_lost_core_h_per_day": account.lost_core_s / 3600.0 / days,
        "work_lost_share": _share(account.lost_core_s, low_core_s),
        "moves_per_day": account.moves / days,
        "moves_instead_per_day": account.moves_instead / days,
        "moved_gib_per_day": account.moved_mib / 1024.0 / days,
    }


def _share(part: float, whole: float) -> float:
    return float(part) / float(whole) if whole > 0 else float("nan")


MODEL: Final = PreemptionModel()
