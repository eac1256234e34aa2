"""Forests in a run: one from the beginning on, or grown anew now and then, of what is known by then."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebbtide.simulator.jobs.columns import Floats
from ebbtide.simulator.jobs.engine import Engine
from ebbtide.simulator.waiting import arrays as a
from ebbtide.simulator.waiting.learning import MODELS, Learned, correlation, learn


@dataclass(frozen=True, slots=True)
class Asked:
    """Jobs that were asked whether they wait, in the order of time.

    :param rows: shape (count, features); ``labels``: 1 for a wait of b or more; ``at_s``: when they were asked; s.
    :param stride: each stands for so many.
    """

    rows: Floats
    labels: Floats
    at_s: Floats
    stride: int = 1

    def between(self, from_s: float, to_s: float) -> Asked:
        """Those that were asked in [from_s, to_s)."""
        part = slice(*np.searchsorted(self.at_s, [from_s, to_s]))
        return replace(self, rows=self.rows[part], labels=self.labels[part], at_s=self.at_s[part])

    def learn(self, seed: int, models: tuple[str, ...] = MODELS, mixed: bool = True) -> Learned:
        """What they teach (`learning.learn`)."""
        return learn(self.rows, self.labels, seed, models, mixed, self.stride)


@dataclass(frozen=True, slots=True)
class Version:
    """A forest that decides from a time on, if it is believed; s."""

    from_s: float
    learned: Learned


def decides(engine: Engine, learned: Learned) -> None:
    """Let a forest decide from now on; one that is not believed says of no job that it is late."""
    state: a.Waiting = engine.policy_state
    state.knobs[a.KNOB.late] = a.LATE["forest" if learned.believed else "nobody"]
    engine.policy_state = state._replace(forest=learned.forest)


def grown_meanwhile(
    engine: Engine, asked: Asked, times_s: Sequence[float], known_after_s: float, seed: int
) -> Iterator[Version]:
    """Run on, and at each of these times grow a forest of the jobs of which it is known by then whether they waited.

    :param known_after_s: so long after a job was asked it is known: b.
    """
    for at_s in times_s:
        engine.advance(at_s)
        learned = asked.between(-math.inf, at_s - known_after_s).learn(seed, ("forest",), mixed=False)
        decides(engine, learned)
        yield Version(at_s, learned)


def ahead(versions: Sequence[Version], asked: Asked) -> float:
    """Matthews' coefficient of what each said of the jobs that were asked until the next one came."""
    said, true = [], []
    ends = [*(version.from_s for version in versions[1:]), math.inf]
    # A run that ends before the first one has none, and one end.
    for version, end_s in zip(versions, ends, strict=False):
        part = asked.between(version.from_s, end_s)
        if len(part.rows):
            said.append(version.learned.say(part.rows))
            true.append(part.labels)
    return correlation(np.concatenate(said), np.concatenate(true)) if said else math.nan


def table(versions: Sequence[Version]) -> dict[str, NDArray[Any]]:
    """Columns by name, a row a version."""
    learned = [version.learned for version in versions]
    return {
        "version": np.arange(1, len(versions) + 1),
        "from_s": np.array([version.from_s for version in versions]),
        "rows": np.array([one.rows for one in learned], np.int64),
        "late": np.array([one.late for one in learned], np.int64),
        "mcc": np.array([one.mcc["forest"] for one in learned]),
        "believed": np.array([one.believed for one in learned], bool),
        "sha256": np.array([one.digest for one in learned], np.str_),
    }
