"""Calibration on a pool: `python -m ebbtide.simulator.matching.calibrating VMS` prints it for Azure's trace.

With RESULTS.json behind, that of the live default only, and into that file.

Every quarter of an hour each machine of the pool is asked for, as the match maker would, for several durations and
several cores left free; the pool's own changes say what became of it. Predictions know only what was before.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from ebbtide.matcher.match.rounds import LIVE_PREDICTION
from ebbtide.matcher.predict.calibration import Calibration
from ebbtide.matcher.predict.changes import Change
from ebbtide.matcher.predict.predictor import Predictor, PredictorOptions
from ebbtide.matcher.predict.rolling import NONE
from ebbtide.simulator.experiments.code import commit
from ebbtide.simulator.generators.harvest import Packing
from ebbtide.simulator.generators.replayed import vm_columns
from ebbtide.simulator.inputs.batches import Floats, Mask, VmBatch
from ebbtide.simulator.inputs.traces import Trace
from ebbtide.simulator.matching.pools import Pool, PoolSettings, pool

DURATIONS_S: Final = (600.0, 1800.0, 3600.0, 7200.0)
FREE: Final = (0.0, 2.0, 6.0)
#: What is shown: name, and options.
SHOWN: Final = {
    "Eq. 1, completed intervals": PredictorOptions(censored=False),
    "Eq. 1": PredictorOptions(),
    "Eq. 1 and size of shrinks": PredictorOptions(sized=True),
    "Eq. 3": PredictorOptions(form="next-shrink"),
    "landmarks": PredictorOptions(form="landmark", sized=True),
}


def calibrate(
    found: Pool,
    options: PredictorOptions,
    durations_s: Sequence[float] = DURATIONS_S,
    frees: Sequence[float] = FREE,
    every_s: float = 900.0,
    warm_up_s: float = 1.25 * 86_400.0,
) -> Calibration:
    """Predictions for all machines at regular times, and their outcomes.

    Without sizes a prediction came true if no shrink came within the duration; with sizes, if no more than the free
    cores were lost of those that there were.
    """
    calibration = Calibration()
    start_s = float(found.at_s[0])
    predictor = Predictor(start_s, options)
    cores = np.zeros(found.machines)
    names = [f"machine-{number}" for number in range(found.machines)]
    rows = np.array([predictor.row(name) for name in names])
    futures = [(found.at_s[found.machine == n], found.cores[found.machine == n]) for n in range(found.machines)]
    next_s = start_s + warm_up_s
    last_s = found.until_s - max(durations_s)
    for machine, at_s, after in zip(found.machine.tolist(), found.at_s.tolist(), found.cores.tolist(), strict=True):
        while next_s < at_s and next_s <= last_s:
            predictor.advance(next_s)
            there = (cores >= 1.0) & (predictor.directions()[rows] != NONE)
            elapsed_s = next_s - predictor.state.last_s[rows]
            for duration_s in durations_s:
                for free in frees if options.sized else frees[:1]:
                    p = predictor.probability(
                        predictor.directions()[rows], elapsed_s, duration_s, np.full(len(rows), free), cores
                    )
                    kept = _kept(futures, next_s, duration_s, free, options.sized)
                    calibration.add_all(np.clip(np.asarray(p)[there], 0.0, 1.0), kept[there])
            next_s += every_s
        predictor.observe(Change(names[machine], at_s, float(cores[machine]), float(after)))
        rows[machine] = predictor.row(names[machine])
        cores[machine] = after
    return calibration


def _kept(
    futures: Sequence[tuple[Floats, np.ndarray[tuple[int], np.dtype[np.int64]]]],
    now_s: float,
    duration_s: float,
    free: float,
    sized: bool,
) -> Mask:
    """Whether each machine kept its room."""
    kept = np.ones(len(futures), bool)
    for number, (at_s, cores) in enumerate(futures):
        low, high = np.searchsorted(at_s, [now_s, now_s + duration_s], side="right")
        if low == high or low == 0:
            continue
        if sized:
            kept[number] = cores[low:high].min() >= cores[low - 1] - free
        else:
            kept[number] = not (np.diff(cores[low - 1 : high]) < 0).any()
    return kept


#: Pools on which nothing was tuned, each with its seed.
POOLS: Final = {
    "random": (PoolSettings(Packing.RANDOM, 200, 0.10), 7),
    "packing": (PoolSettings(Packing.PACKING, 200, 0.10), 7),
    "random, VMs over 1 h": (PoolSettings(Packing.RANDOM, 230, 0.10, 3600.0), 7),
    "packing, VMs over 1 h": (PoolSettings(Packing.PACKING, 230, 0.10, 3600.0), 7),
    "fullest of ten, batches together": (PoolSettings(Packing.FULLEST_OF, 230, 0.10, together=True), 7),
    "fullest of ten, batches together, VMs over 1 h": (
        PoolSettings(Packing.FULLEST_OF, 230, 0.10, 3600.0, together=True),
        7,
    ),
    "random, a day later": (PoolSettings(Packing.RANDOM, 200, 0.10, from_s=4 * 86_400.0, until_s=9 * 86_400.0), 29),
}


def main(arguments: Sequence[str]) -> int:
    """Print the reliability curves."""
    if len(arguments) not in (1, 2):
        print("usage: python -m ebbtide.simulator.matching.calibrating VMS [RESULTS.json]", file=sys.stderr)
        return 2
    shown = SHOWN if len(arguments) == 1 else {"live": LIVE_PREDICTION}
    kept = []
    batches = (batch for batch in Trace(Path(arguments[0]), from_first=True) if isinstance(batch, VmBatch))
    vms = vm_columns(batches)
    for name, (settings, seed) in POOLS.items():
        replayed = pool(vms, settings, seed)
        for title, options in shown.items():
            calibration = calibrate(replayed, options)
            brier, worst = calibration.brier or 0.0, calibration.worst_error(200) or 0.0
            print(f"\n{name}: {title}: {calibration.count} outcomes, Brier {brier:.3f}, worst decile {worst:.3f}")
            rows = calibration.curve(200)
            for row in rows:
                print(f"  {row.low:.1f}  {row.count:7d}  predicted {row.predicted:.3f}  observed {row.observed:.3f}")
            deciles = [[row.low, row.count, round(row.predicted, 4), round(row.observed, 4)] for row in rows]
            told = {"count": calibration.count, "brier": round(brier, 4), "worst": round(worst, 4)}
            kept.append({"pool": name, "seed": seed, "settings": str(settings), **told, "deciles": deciles})
    if len(arguments) == 2:
        command = f"python -m {__spec__.name} {' '.join(Path(one).name for one in arguments)}"
        document = {"command": command, "commit": commit(), "form": LIVE_PREDICTION.form, "pools": kept}
        Path(arguments[1]).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
