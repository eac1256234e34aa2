"""Net change of an acquirer at the end of a period: scaling and replacement as one (Agarwal et al. 2023, §3.2, App. A).

Taken apart, scaling would give back what replacement has just asked for, or ask for what that gives back. Here each
machine that scaling takes away counts as one that replacement wanted to be rid of, and none is asked for in its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

from ebbtide.deflation.errors import InvalidField

#: Shares of whole machines, and utilisations, are compared with this tolerance.
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class AcquirerOptions:
    """How many machines, and how restless they may be. Utilisation is wanted cores / cores that are there.

    :param least_machines: never fewer by our own doing; what goes by itself is asked for again.
    :param most_machines: never more; while some are being replaced there are up to ``replaced_share`` more.
    :param replaced_share: of the machines, replaced in each period: those whose cores changed most recently. By
        stability: of the cores, those of the machines that are least stable.
    :param least_utilisation: below it machines are given back.
    :param most_utilisation: above it machines are asked for.
    :param period_s: between two looks.
    :param expected_cores: of a machine that is not there yet, while there is none to go by.
    :param evidence_s: by stability: a machine is replaced only after so long; what it did until then may be chance.
    :param least_gain: by stability: only where a machine is so much less stable than the mean core, which is what
        a new one is expected to be.
    :raises InvalidField: names what cannot be.
    """

    least_machines: int = 1
    most_machines: int = 64
    replaced_share: float = 0.1
    least_utilisation: float = 0.6
    most_utilisation: float = 0.8
    period_s: float = 3600.0
    expected_cores: float = 4.0
    evidence_s: float = 9000.0
    least_gain: float = 0.05

    def __post_init__(self) -> None:
        if not 0 <= self.least_machines <= self.most_machines:
            raise InvalidField("least_machines", f"must be from 0 to most_machines, {self.most_machines}")
        if not 0 <= self.replaced_share <= 1:
            raise InvalidField("replaced_share", f"must be from 0 to 1, but is {self.replaced_share:g}")
        if not 0 <= self.least_utilisation < self.most_utilisation <= 1:
            raise InvalidField("least_utilisation", "must be below most_utilisation, and both from 0 to 1")
        for name in ("evidence_s", "least_gain"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidField(name, f"must be finite and not negative, but is {value:g}")
        for name in ("period_s", "expected_cores"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidField(name, f"must be above 0 and finite, but is {value:g}")


@dataclass(frozen=True, slots=True)
class View:
    """A machine at the end of a period.

    :param cores: whole cores that it has.
    :param unchanged_s: since its last core change, or since it came; infinite: longer than is remembered.
    :param busy: tasks run there.
    :param stability: how likely it keeps its cores for a task of the median duration; None: it is not known. Where it
        is known of no machine, the time since the last change decides (Algorithm 2).
    :param known_s: for how long it has been there.
    :param off: it is switched off: it has no cores until somebody starts it.
    """

    cores: float
    unchanged_s: float
    busy: bool = False
    stability: float | None = None
    known_s: float = math.inf
    off: bool = False


@dataclass(frozen=True, slots=True)
class NetChange:
    """What is to be done about the machines.

    :param more: how many are to be asked for, beside replacements.
    :param fewer: how many that were asked for, beside replacements, are not wanted any more.
    :param replaced: go as soon as another one is there for each.
    :param removed: go without.
    :param utilisation: what it was decided by; None: there are no cores.
    """

    more: int
    fewer: int
    replaced: tuple[str, ...]
    removed: tuple[str, ...]
    utilisation: float | None
    sentence: str


def net_change(
    machines: Mapping[str, View],
    unknown: int,
    marked: Set[str],
    coming: int,
    wanted_cores: float,
    options: AcquirerOptions,
) -> NetChange:
    """Algorithm 2 and the scaling policy at once. The change in number is what scaling wants, and nothing else.

    :param machines: those that are kept so far.
    :param unknown: machines that are kept and of which nothing is known now: they count as the others do on average.
    :param marked: of ``machines``, those for which another one was asked already.
    :param coming: machines that were asked for beside replacements, and are not there yet.
    :param wanted_cores: of all tasks that run and wait. Counting those that wait is ours: utilisation alone never says
        by how much there is too little.
    """
    cores = sum(view.cores for view in machines.values())
    mean = cores / len(machines) if cores > 0 else options.expected_cores
    there = cores + mean * unknown
    count = len(machines) + unknown + coming
    worst, mean_stability = _ranked(machines, options)
    more = _missing(there + mean * coming, mean, count, wanted_cores, options)
    fewer, removed = 0, tuple[str, ...]()
    if more == 0:
        fewer, removed = _surplus(machines, worst, there, mean, count, coming, wanted_cores, options)
    left = [name for name in worst if name not in removed and name not in marked]
    if mean_stability is None:
        share = math.floor(options.replaced_share * (len(machines) + unknown) + _ROUNDING)
        still = max(share - len(removed) - sum(name not in removed for name in marked), 0)
        replaced = tuple(left[:still])
    else:
        gone = sum(machines[name].cores for name in {*removed, *marked} if name in machines)
        replaced = _unstable(machines, left, mean_stability, options.replaced_share * there - gone, options)
    utilisation = wanted_cores / there if there > 0 else None
    return NetChange(
        more, fewer, replaced, removed, utilisation, _sentence(utilisation, more, fewer, replaced, removed)
    )


def _ranked(machines: Mapping[str, View], options: AcquirerOptions) -> tuple[list[str], float | None]:
    """The machines, the worst first, and the stability of the mean core; None: it is not known of any.

    Of machines that are as bad an idle one goes: the paper does not say which, and it is gone at once.
    """
    known = {
        name: (view.stability, max(view.cores, _ROUNDING))
        for name, view in machines.items()
        if view.stability is not None and view.known_s >= options.evidence_s
    }
    if not any(view.stability is not None for view in machines.values()):
        return sorted(machines, key=lambda name: (machines[name].unchanged_s, machines[name].busy, name)), None
    cores = sum(weight for _, weight in known.values())
    # With nothing to compare with all are alike.
    mean = sum(value * weight for value, weight in known.values()) / cores if known else 1.0

    def worst(name: str) -> tuple[float, float, bool, str]:
        # A newcomer has changed only in that it came: it counts as the mean core.
        return known[name][0] if name in known else mean, machines[name].unchanged_s, machines[name].busy, name

    return sorted(machines, key=worst), mean


def _unstable(
    machines: Mapping[str, View], worst: Sequence[str], mean: float, cores: float, options: AcquirerOptions
) -> tuple[str, ...]:
    """Of machines, the worst first, those that are worth a swap, of so many cores at the most, and always one."""
    found: list[str] = []
    for name in worst:
        view = machines[name]
        if view.stability is None or view.known_s < options.evidence_s:
            continue
        if view.stability > mean - options.least_gain or cores <= 0 or (found and view.cores > cores):
            break
        found.append(name)
        cores -= view.cores
    return tuple(found)


def _missing(cores: float, mean: float, count: int, wanted_cores: float, options: AcquirerOptions) -> int:
    """How many machines are too few."""
    more = 0
    if wanted_cores > options.most_utilisation * cores + _ROUNDING:
        more = math.ceil((wanted_cores / options.most_utilisation - cores) / mean - _ROUNDING)
    return max(min(max(more, options.least_machines - count), options.most_machines - count), 0)


def _surplus(
    machines: Mapping[str, View],
    worst: Sequence[str],
    there: float,
    mean: float,
    count: int,
    coming: int,
    wanted_cores: float,
    options: AcquirerOptions,
) -> tuple[int, tuple[str, ...]]:
    """How many requests, and which machines, are too many: requests first, then the worst machines.

    One that is so large that without it too little would be left stays.
    """
    cores = there + mean * coming
    fewer = 0

    def too_many(of: float) -> bool:
        if count > options.most_machines:
            return True
        if count <= options.least_machines or wanted_cores >= options.least_utilisation * cores - _ROUNDING:
            return False
        return wanted_cores <= options.most_utilisation * (cores - of) + _ROUNDING

    while fewer < coming and too_many(mean):
        fewer, count, cores = fewer + 1, count - 1, cores - mean
    removed: list[str] = []
    # What is coming does not count before it has come.
    most_removed = count - coming + fewer - options.least_machines
    for name in worst:
        if len(removed) < most_removed and too_many(machines[name].cores):
            removed.append(name)
            count, cores = count - 1, cores - machines[name].cores
    return fewer, tuple(removed)


def _sentence(utilisation: float | None, more: int, fewer: int, replaced: Sequence[str], removed: Sequence[str]) -> str:
    said = "there are no cores" if utilisation is None else f"utilisation is {utilisation:.0%}"
    done = [
        text
        for number, text in (
            (more, f"{more} more asked for"),
            (fewer, f"{fewer} that were asked for not wanted any more"),
            (len(removed), f"{len(removed)} given back"),
            (len(replaced), f"{len(replaced)} to be replaced"),
        )
        if number
    ]
    return f"{said}: {', '.join(done) or 'nothing to change'}"
