"""Figures of a run within its window: shares of VMs, overcommitment, throughput."""

from __future__ import annotations

import numpy as np

from ebbtide.simulator.cluster.cluster import Cluster
from ebbtide.simulator.cluster.members import CPU, MEMORY
from ebbtide.simulator.cluster.state import (
    ADMITTED,
    COHORT_PREEMPTED,
    DEFLATED_AT_START,
    DEFLATIONS,
    HELD_CORES,
    HELD_MIB,
    HIGH,
    HIGH_CORES,
    HIGH_RATE,
    HOSTED,
    LOW,
    LOW_CORES,
    LOW_RATE,
    OFFERED,
    PREEMPTED,
    REFUSED,
    SOLD_CORES,
    SOLD_MIB,
    WINDOW,
    WINDOW_FROM_S,
    WINDOW_UNTIL_S,
)
from ebbtide.simulator.inputs.batches import Floats


def metrics_of(cluster: Cluster) -> dict[str, float]:
    """Figures of the window as far as the cluster has come; NaN where there is nothing to take a share of.

    Shares are of VMs: preempted per admitted, refused per offered, all within the window; the cohort's share is of
    those alone that were admitted within the window. Overcommitment is nominal cores (MiB) per core (MiB) of the
    nodes. Throughput is relative to that of the same VMs at nominal size.
    """
    tally = cluster.tally
    high, low = tally.counts[WINDOW, HIGH], tally.counts[WINDOW, LOW]
    span_s = min(cluster.now_s, float(tally.clock[WINDOW_UNTIL_S])) - float(tally.clock[WINDOW_FROM_S])
    mean = tally.window / span_s if span_s > 0 else np.full(len(tally.window), np.nan)
    cores, mib = cluster.nodes.capacity[:, CPU].sum(), cluster.nodes.capacity[:, MEMORY].sum()
    return {
        "nodes": float(len(cluster.nodes.capacity)),
        "low_preempted_share": _share(low[PREEMPTED], low[ADMITTED]),
        "low_preempted_cohort_share": _share(low[COHORT_PREEMPTED], low[ADMITTED]),
        "low_rejected_share": _share(low[REFUSED], low[OFFERED]),
        "high_rejected_share": _share(high[REFUSED], high[OFFERED]),
        "low_offered": float(low[OFFERED]),
        "low_admitted": float(low[ADMITTED]),
        "low_preempted": float(low[PREEMPTED]),
        "low_started_deflated": float(low[DEFLATED_AT_START]),
        "high_offered": float(high[OFFERED]),
        "high_admitted": float(high[ADMITTED]),
        "hosted_mean": float(mean[HOSTED]),
        "hosted_overcommitment": float(mean[SOLD_CORES] / cores),
        "hosted_overcommitment_peak": float(tally.peak[SOLD_CORES] / cores),
        "hosted_memory_overcommitment": float(mean[SOLD_MIB] / mib),
        "held_cpu_share": float(mean[HELD_CORES] / cores),
        "held_memory_share": float(mean[HELD_MIB] / mib),
        "low_throughput": _share(mean[LOW_RATE], mean[LOW_CORES]),
        "high_throughput": _share(mean[HIGH_RATE], mean[HIGH_CORES]),
        "throughput_per_core": float((mean[LOW_RATE] + mean[HIGH_RATE]) / cores),
        "deflations": float(low[DEFLATIONS]),
    }


def node_overcommitment(cluster: Cluster) -> Floats:
    """Nominal cores per core that each node hosted, mean over the window as far as the cluster has come."""
    nodes, clock = cluster.nodes, cluster.tally.clock
    span_s = min(cluster.now_s, float(clock[WINDOW_UNTIL_S])) - float(clock[WINDOW_FROM_S])
    shares: Floats = (
        cluster.hosted_core_s() / (span_s * nodes.capacity[:, CPU]) if span_s > 0 else nodes.since_s * np.nan
    )
    return shares


def _share(part: float, whole: float) -> float:
    return float(part) / float(whole) if whole > 0 else float("nan")
