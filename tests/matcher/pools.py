"""Pools of machines whose cores change by a known law."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ebbtide.matcher.predict.changes import Change

Law = Callable[[np.random.Generator], float]


def renewal_pool(
    machines: int, law: Law, until_s: float, seed: int = 0, cores: int = 20, start_s: float = 0.0
) -> Iterator[Change]:
    """Changes in the order of their times: each machine swings by one core at intervals drawn from one law."""
    generator = np.random.default_rng(seed)
    found: list[Change] = []
    for number in range(machines):
        at, now = start_s, cores
        found.append(Change(f"m{number}", at, 0.0, cores))
        while (at := at + law(generator)) < until_s:
            after = now - 1 if generator.random() < 0.5 and now > 1 else now + 1
            found.append(Change(f"m{number}", at, now, after))
            now = after
    return iter(sorted(found, key=lambda change: change.at))
