"""Results of sweeps in experiments/results/*.json: written of what ``ebb sim run`` made, compared seed by seed, and put
into the pages that quote them.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "experiments" / "results"
#: Kept by seed, so that schemes are compared seed by seed.
BY_SEED = ("jct_mean_s", "jct_p90_s", "jct_geometric_mean_s", "waste", "kills_per_task", "wait_mean_s", "cost_total")
BY_SEED += ("goodput", "wasted_share", "kills", "failure_rate", "wait_p50_s", "wait_p90_s", "wait_p99_s", "intervals")
BY_SEED += ("wait_p95_s",)
BY_SEED += ("kills_under_1_h", "kills_under_5_h", "kills_under_30_h", "on_demand_cost", "wait_mean_h", "total_cost")
BY_SEED += ("low_preempted_share", "low_rejected_share", "high_rejected_share")
BY_SEED += ("preempted_vms_share", "preemptions_per_day", "deflated_vm_h_share", "taken_core_h_per_day")
BY_SEED += ("back_median_s", "not_back_share", "work_lost_core_h_per_day", "moves_per_day", "moved_gib_per_day")
BY_SEED += ("interruptible_jct_geometric_mean_s", "uninterruptible_jct_geometric_mean_s", "slowdown_geometric_mean")
BY_SEED += ("pool_stable_for_10_min", "pool_stable_for_30_min", "pool_stable_for_60_min")
BY_SEED += ("at_once_share", "refault_mib_per_vm_h", "low_memory_share")
MEAN, P90, NJCT = BY_SEED[:3]
#: And so are these, by how their names begin.
BY_SEED_TOO = ("calibration_",)
#: Sweeps of which the completion time of each job is kept, too, by seed.
BY_JOB = ("persistent",)
JOBS = "completion_s"
#: Of a line.
WIDTH = 120
#: Where what is written into a page ends.
END = "<!-- up to here -->"


def measured(path: Path) -> dict[str, Any]:
    """The figures of a benchmark's file. Raises ValueError where they are not to be quoted."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("quick"):
        raise ValueError(f"{path} is of a quick pass, or one of too few runs")
    return dict(document["figures"])


def keep(directory: Path, metrics: Collection[str] = ()) -> None:
    """Keep a sweep, or these of its metrics; of a case of which a run failed only that it did, and why."""
    from ebbtide.simulator.experiments import load

    results = load(directory)
    meta = results.meta
    kept = origin(meta)
    failed = {failure["run"].rpartition(", seed=")[0]: failure["error"] for failure in meta["failures"]}
    if failed:
        kept["failed"] = failed
    cases = []
    for case in results.cases():
        if ", ".join(f"{name}={value}" for name, value in case.items()) in failed:
            continue
        rows = np.ones(len(results.columns["seed"]), bool)
        for name, value in case.items():
            rows &= results.columns[name] == value
        order = np.argsort(results.columns["seed"][rows])
        values = {name: results.columns[name][rows][order] for name in metrics or results.metrics}
        each = {name for name in values if name in BY_SEED or name.startswith(BY_SEED_TOO)}
        found = {name: [short(x) for x in column] for name, column in values.items() if name in each}
        found |= {name: short(float(column.mean())) for name, column in values.items() if name not in each}
        if meta["name"] in BY_JOB:
            found[JOBS] = _by_job(results.table("jobs"), case)
        cases.append(
            json.dumps(
                case | {name: value for name, value in found.items() if value not in (None, [None] * len(order))}
            )
        )
    text = f'{json.dumps(kept)[:-1]},\n"cases": [\n' + ",\n".join(cases) + "\n]}\n"
    (KEPT / f"{meta['name']}.json").write_text(text, encoding="utf-8")


def _by_job(table: Mapping[str, Any], case: Mapping[str, Any]) -> list[list[int]]:
    """Whole seconds, by seed and job."""
    mine = np.logical_and.reduce([table[name] == value for name, value in case.items()])
    seeds = table["seed"][mine]
    return [table[JOBS][mine][seeds == seed].round().astype(int).tolist() for seed in np.unique(seeds)]


def origin(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of how a sweep was made: what of meta.json does not belong to the machine; older ones say less."""
    from ebbtide.simulator.experiments.results import READING

    names = ("name", "version", "commit", "seeds", "settings", "policies")
    kept = {name: meta[name] for name in names if name in meta}
    kept["command"] = without_places(str(meta["command"]))
    kept["inputs"] = {name: given["sha256"] for name, given in meta["inputs"].items()}
    kept["read"] = {
        name: {word: given[word] for word in READING if given.get(word)} for name, given in meta["inputs"].items()
    }
    return kept


def without_places(command: str) -> str:
    """What was run, wherever its file and inputs were and its results were put, and with however many processes."""
    words = iter(command.split())
    kept = []
    for word in words:
        if word in ("--results", "--workers"):
            next(words)
        elif word == "--input":
            name, _, path = next(words).partition("=")
            kept += [word, f"{name}={Path(path).name}"]
        else:
            kept.append(f"experiments/{Path(word).name}" if word.endswith(".toml") else word)
    return " ".join(kept)


def short(value: float) -> float | None:
    """Six digits; None of what is no number, or infinite: JSON has no word for it."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


class Sweep:
    """A kept sweep."""

    def __init__(self, name: str) -> None:
        self.kept: dict[str, Any] = json.loads((KEPT / f"{name}.json").read_text(encoding="utf-8"))

    def of(self, metric: str, **case: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
        """By seed."""
        return np.array(self._case(case)[metric], np.float64)

    def has(self, metric: str, **case: Any) -> bool:
        """Whether any seed has a figure of it."""
        return metric in self._case(case)

    def jobs(self, **case: Any) -> list[list[int]]:
        """Completion times in whole seconds, by seed and job: of sweeps in `BY_JOB`."""
        return list(self._case(case)[JOBS])

    def mean(self, metric: str, **case: Any) -> float:
        return float(np.mean(self._case(case)[metric]))

    def against(self, other: dict[str, Any], metric: str, **case: Any) -> tuple[float, float]:
        """The change of a mean in per cent against another case, and half of its 95 % interval, seed by seed."""
        return interval(100.0 * (self.of(metric, **case) / self.of(metric, **other) - 1.0))

    def share(self, base: dict[str, Any], best: dict[str, Any], metric: str, **case: Any) -> tuple[float, float]:
        """What a case has of the gain of the best over the base, and half of its 95 % interval (jackknife)."""
        ours, theirs = (1.0 - self.of(metric, **one) / self.of(metric, **base) for one in (case, best))
        return of_sums(ours, theirs)

    def points(self, other: dict[str, Any], metric: str, **case: Any) -> tuple[float, float]:
        """The change of a share in points against another case, and half of its 95 % interval, seed by seed."""
        return interval(100.0 * (self.of(metric, **case) - self.of(metric, **other)))

    def relative(self, other: dict[str, Any], metric: str, **case: Any) -> tuple[float, float]:
        """The change of the sum over seeds against another case, per cent; half of its 95 % interval (jackknife).

        For what differs much from seed to seed, and may be 0 for one.
        """
        ratio, half = of_sums(self.of(metric, **case), self.of(metric, **other))
        return 100.0 * (ratio - 1.0), 100.0 * half

    def values(self, name: str) -> list[Any]:
        """Of an axis, in order."""
        return list(dict.fromkeys(one[name] for one in self.kept["cases"]))

    def _case(self, case: dict[str, Any]) -> dict[str, Any]:
        (found,) = (one for one in self.kept["cases"] if all(one[name] == case[name] for name in case))
        return dict(found)

    def made(self, more: str = "") -> str:
        """Its command and seeds; what is to be known of them."""
        return filled(f"`{self.kept['command']}`, {self.seeds}{more}.")

    @property
    def seeds(self) -> str:
        seeds = self.kept["seeds"]
        return f"seeds {seeds[0]} to {seeds[-1]}"

    @property
    def command(self) -> str:
        command = f"`{self.kept['command']}`,"
        if len(command) > WIDTH:
            command = command.replace(" --input ", "\n--input ")
        return f"{command}\n{self.seeds}, jobs and pool drawn anew by each."


def interval(values: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float]:
    """The mean, and half of its 95 % interval."""
    count = len(values)
    half = student(count) * float(values.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    return float(values.mean()), half


def of_sums(
    ours: np.ndarray[Any, np.dtype[np.float64]], theirs: np.ndarray[Any, np.dtype[np.float64]]
) -> tuple[float, float]:
    """The ratio of the sums of what belongs together in pairs, and half of its 95 % interval (jackknife)."""
    count = len(ours)
    without = (ours.sum() - ours) / (theirs.sum() - theirs)
    spread = math.sqrt((count - 1) / count * float(((without - without.mean()) ** 2).sum()))
    return float(ours.sum() / theirs.sum()), student(count) * spread


def student(count: int) -> float:
    """Of Student's t, for the 95 % interval of the mean of so many."""
    return float(stats.t.ppf(0.975, count - 1))


def change(found: tuple[float, float], digits: int = 0) -> str:
    """Per cent with half of the interval."""
    return f"{found[0]:+.{digits}f} ± {found[1]:.{digits}f}"


def part(found: tuple[float, float], digits: int = 2) -> str:
    """A figure with half of the interval."""
    return f"{found[0]:.{digits}f} ± {found[1]:.{digits}f}"


# --- pages ---------------------------------------------------------------------------------------------------------


def filled(text: str) -> str:
    """A paragraph in lines of the pages' width."""
    return textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def head(*cells: str) -> Iterator[str]:
    yield row(*cells)
    yield "|" + "---|" * len(cells)


def begin(script: str) -> str:
    """Where what a script writes into a page begins."""
    return f"<!-- from here on: written by scripts/{script} -->"


def placed(page: str, begin: str, lines: Iterable[str]) -> str:
    """The page with these lines in their place."""
    before, rest = page.split(begin)
    text = "\n".join(lines).strip("\n")
    return f"{before}{begin}\n\n{text}\n\n{END}{rest.split(END)[1]}"


def sections(first: Callable[[], Iterator[str]], others: Mapping[str, Callable[[], Iterator[str]]]) -> Iterator[str]:
    """The lines of a page.

    :param others: sections by the results that they are made of; those without results are left out.
    """
    yield from first()
    for name, section in others.items():
        if (KEPT / f"{name}.json").exists():
            yield ""
            yield from section()


def rewrite(page: Path, written: Callable[[str], str], arguments: Sequence[str], metrics: Collection[str] = ()) -> None:
    """Keep results, and write the page anew.

    :param arguments: directories that ``ebb sim run`` wrote; a ``.json`` is kept as it is.
    :param metrics: what of a directory is kept; default: all.
    """
    for argument in map(Path, arguments):
        if argument.suffix == ".json":
            (KEPT / argument.name).write_text(argument.read_text(encoding="utf-8"), encoding="utf-8")
        else:
            keep(argument, metrics)
    page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
