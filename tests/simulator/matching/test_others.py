"""Others' demand for what on-demand VMs leave: what is left of a server, never less than nothing."""

from __future__ import annotations

import numpy as np
import pytest

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.matching.others import Others, left_by

DAY_S = 86_400.0
SERVERS = 40


def steady(cores: int = 32, until_s: float = 2 * DAY_S) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Servers that on-demand VMs leave the same all the time."""
    machine = np.tile(np.arange(SERVERS), 2)
    return machine, np.repeat([0.0, until_s], SERVERS), np.full(2 * SERVERS, cores)


def mean_left(machine: np.ndarray, at_s: np.ndarray, cores: np.ndarray, until_s: float) -> float:
    area = 0.0
    for server in range(SERVERS):
        mine = machine == server
        area += float((cores[mine] * np.diff(np.append(at_s[mine], until_s))).sum())
    return area / until_s


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_they_hold_about_the_share_that_they_want_from_the_beginning_on(share: float) -> None:
    machine, at_s, cores = left_by(*steady(), Others(share), np.random.default_rng(1))
    assert (np.diff(at_s) >= 0).all()
    assert mean_left(machine, at_s, cores, 2 * DAY_S) == pytest.approx((1 - share) * 32 * SERVERS, rel=0.05)
    begin = [cores[(machine == server) & (at_s == 0.0)][-1] for server in range(SERVERS)]
    assert sum(begin) == pytest.approx((1 - share) * 32 * SERVERS, rel=0.15)


def test_on_demand_vms_take_from_theirs_and_from_the_rest_in_proportion_and_theirs_do_not_come_back() -> None:
    machine = np.repeat([0, 0], 2).astype(np.int64)
    for seed in range(50):
        found = left_by(
            machine,
            np.array([0.0, 10.0, 20.0, 30.0]),
            np.array([64, 16, 64, 64]),
            Others(0.5, 1e9),
            np.random.default_rng(seed),
        )
        before, shrunk, grown = (int(found[2][found[1] == at_s][-1]) for at_s in (0.0, 10.0, 20.0))
        held = 64 - before
        assert 0 <= shrunk <= 16
        # Whole VMs of theirs go: at most one of eight cores more than their part.
        assert held // 4 - 8 < 16 - shrunk <= held // 4
        assert 64 - grown == 16 - shrunk


def test_what_is_left_is_never_below_nothing_nor_above_what_on_demand_vms_leave() -> None:
    generator = np.random.default_rng(2)
    at_s = np.concatenate([np.zeros(SERVERS), np.sort(generator.uniform(0, DAY_S, 2000))])
    machine = np.concatenate([np.arange(SERVERS), generator.integers(0, SERVERS, 2000)])
    cores = generator.integers(0, 48, len(machine))
    found = left_by(machine, at_s, cores, Others(0.7, 1800.0), np.random.default_rng(3))
    assert (found[2] >= 0).all()
    for server in range(SERVERS):
        mine, theirs = machine == server, found[0] == server
        places = np.searchsorted(at_s[mine], found[1][theirs], side="right") - 1
        assert (found[2][theirs] <= cores[mine][places]).all()
    again = left_by(machine, at_s, cores, Others(0.7, 1800.0), np.random.default_rng(3))
    assert all((one == other).all() for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize(("given", "field"), [({"share": 1.0}, "others_share"), ({"life_s": 0.0}, "others_life_h")])
def test_a_demand_that_makes_no_sense_is_refused_by_its_field(given: dict[str, float], field: str) -> None:
    with pytest.raises(InvalidParameter, match=field):
        Others(**given)
