"""EASY and strict order on one machine, against the textbook written out with lists."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from ebbtide.simulator.jobs.engine import Machines
from tests.simulator.jobs import scenes
from tests.simulator.jobs.scenes import Job


def textbook(jobs: list[Job], cores: int, easy: bool, requested: bool) -> dict[int, tuple[float, float]]:
    """Begin and end of each job of one task: Mu'alem and Feitelson (2001), the extra nodes and the shadow time."""
    running: list[tuple[float, float, int]] = []  # (end, expected end, job)
    waiting: list[int] = []
    spans: dict[int, tuple[float, float]] = {}
    coming = list(range(len(jobs)))

    def estimate(i: int) -> float:
        stated = jobs[i].requested_s
        return stated if requested and np.isfinite(stated) and stated > 0 else jobs[i].runtimes_s[0]

    def begin(i: int) -> None:
        waiting.remove(i)
        end = now + jobs[i].runtimes_s[0]
        running.append((end, now + estimate(i), i))
        spans[i] = (now, end)

    def free() -> float:
        return cores - sum(jobs[i].cores for _, _, i in running)

    while coming or running:
        now = min([jobs[i].at_s for i in coming[:1]] + [end for end, _, _ in running])
        running = [r for r in running if r[0] > now]
        while coming and jobs[coming[0]].at_s == now:
            waiting.append(coming.pop(0))
        while waiting and jobs[waiting[0]].cores <= free():
            begin(waiting[0])
        if not easy or not waiting:
            continue
        head = waiting[0]
        there, shadow, extra = free(), np.inf, 0.0
        for expected in sorted({max(r[1], now) for r in running}):
            there += sum(jobs[r[2]].cores for r in running if max(r[1], now) == expected)
            if there >= jobs[head].cores:
                shadow, extra = expected, there - jobs[head].cores
                break
        for i in waiting[1:]:
            if jobs[i].cores > free():
                continue
            if now + estimate(i) <= shadow:
                begin(i)
            elif jobs[i].cores <= extra:
                extra -= jobs[i].cores
                begin(i)
    return spans


@pytest.mark.parametrize(("easy", "requested"), [(False, False), (True, False), (True, True)])
def test_every_job_begins_when_the_textbook_says(easy: bool, requested: bool) -> None:
    overtaken = 0
    for seed in range(4):
        rng = np.random.default_rng(seed)
        times = np.sort(rng.choice([1.0, 0.5, 0.37]) * rng.integers(0, 200, 70))
        jobs = [
            Job(
                float(at_s),
                float(rng.integers(1, 13)),
                (float(rng.choice([1.0, 4.0, rng.exponential(8) + 0.01])),),
                requested_s=float(rng.choice([np.nan, 5.0, 20.0])),
            )
            for at_s in times
        ]
        told = scenes.run(
            jobs,
            Machines(1, 12),
            discipline="easy" if easy else "strict",
            estimates="requested" if requested else "exact",
            validate=False,
        )
        expected = textbook(jobs, 12, easy, requested)
        assert told.spans == expected
        starts = [expected[i][0] for i in range(len(jobs))]
        overtaken += sum(b < a for a, b in pairwise(starts))
    assert (overtaken > 15) == easy
