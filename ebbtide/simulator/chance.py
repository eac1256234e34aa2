"""Chance for compiled loops out of a run's seed."""

from __future__ import annotations

import numpy as np

from ebbtide.simulator.nodes.draws import Ints, state_of


def draws_of(seed: int) -> Ints:
    """The state of `simulator.nodes.draws` that a seed begins with."""
    one, other = np.random.SeedSequence(seed).generate_state(2).tolist()
    return state_of(one, other)
