"""The acquirer where it is known which servers are calm: Agarwal et al. 2023 §B.4, Fig. 24.

`python -m ebbtide.simulator.matching.known_truth` prints a table. Every second server changes all the time, the others
seldom. Machines are asked for on random servers; shown is which share of those held stands on calm servers, hour by
hour, with replacement and without.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

import numpy as np

from ebbtide.matcher.acquire.net_changes import AcquirerOptions
from ebbtide.simulator.inputs.batches import Floats
from ebbtide.simulator.matching.acquiring import Acquisition
from ebbtide.simulator.matching.pools import Pool
from ebbtide.simulator.matching.running import Run, run
from ebbtide.simulator.matching.workload import Workload

HOUR_S: Final = 3600.0
_DAY_S: Final = 24 * HOUR_S


def halves(servers: int, least: int, seed: int, restless_s: float = 600.0, calm_s: float = 100_000.0) -> Pool:
    """Two and a half days of servers of which every second one changes often.

    :param least: cores that a server always leaves; 0: harvest VMs are evicted now and then.
    :param restless_s, calm_s: mean time between two changes of odd servers, and of even ones.
    """
    generator = np.random.default_rng(seed)
    rows = []
    for machine in range(servers):
        at_s, cores = 0.0, 8
        mean_s = restless_s if machine % 2 else calm_s
        while at_s < 2.5 * _DAY_S:
            rows.append((at_s, machine, cores))
            at_s += float(generator.exponential(mean_s))
            cores = int(np.clip(cores + generator.choice([-3, -2, 2, 3]), least, 12))
    columns = list(zip(*sorted(rows), strict=True))
    return Pool(np.array(columns[1]), np.array(columns[0]), np.array(columns[2]), servers, 2.5 * _DAY_S, 0.0)


def calm_share(found: Run, from_s: float, until_s: float) -> float:
    """Of the machines held within a window, those on even servers; NaN if none was."""
    if found.acquired is None:
        return float("nan")
    held = found.acquired.held
    steps = zip(held.at_s, held.servers, strict=True)
    shares = [np.mean(servers % 2 == 0) for at_s, servers in steps if from_s <= at_s < until_s and len(servers)]
    return float(np.mean(shares)) if shares else float("nan")


def shares(seed: int, replaced_share: float, held: int = 64, servers: int = 200, hours: int = 30) -> Floats:
    """By hour, the share of calm machines of so many that are held all the time."""
    acquisition = Acquisition(AcquirerOptions(held, held, replaced_share=replaced_share))
    found = run(halves(servers, 2, seed), Workload(), "capacity-random", seed, acquisition=acquisition)
    return np.array([calm_share(found, hour * HOUR_S, (hour + 1) * HOUR_S) for hour in range(hours)])


def lines(seeds: int = 10) -> Iterator[str]:
    """Means over seeds, with twice their standard error, in per cent."""
    yield "hour  kept as they come  a tenth replaced hourly"
    both = [np.array([shares(seed, share) for seed in range(1, seeds + 1)]) * 100 for share in (0.0, 0.1)]
    for hour in (0, 1, 2, 4, 6, 8, 12, 18, 24, 29):
        shown = [f"{one[:, hour].mean():6.1f} ± {2 * one[:, hour].std(ddof=1) / seeds**0.5:4.1f}" for one in both]
        yield f"{hour:4d}  {shown[0]:>17}  {shown[1]:>23}"


if __name__ == "__main__":
    for line in lines():
        sys.stdout.write(line + "\n")
