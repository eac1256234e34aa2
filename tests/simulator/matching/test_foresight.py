"""What could be known of a pool: other draws of the same VMs, and picks of machines by who knows what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ebbtide.matcher.match.rounds import LIVE_PREDICTION
from ebbtide.matcher.predict.landmarks import FREE, SIZES, STEPS, size_class, step_s
from ebbtide.simulator.generators.harvest import Packing
from ebbtide.simulator.matching.foresight import METRICS, foresight
from ebbtide.simulator.matching.futures import kept
from ebbtide.simulator.matching.pools import Pool, PoolSettings, pool
from ebbtide.simulator.matching.running import WARM_UP_S, run
from ebbtide.simulator.matching.workload import Workload
from tests.simulator.matching.test_running import DAY_S, made, vms


def by_server(*series: list[tuple[float, int]]) -> Pool:
    """Servers with so many cores from so many seconds on."""
    rows = sorted((at_s, number, cores) for number, one in enumerate(series) for at_s, cores in one)
    columns = list(zip(*rows, strict=True))
    machine, at_s, cores = np.array(columns[1]), np.array(columns[0], float), np.array(columns[2])
    return Pool(machine, at_s, cores, len(series), 2.0 * DAY_S, 0.0)


def look(found: Pool, *others: Pool, **changes: Any) -> dict[str, float]:
    return foresight(found, others, LIVE_PREDICTION, (3600.0,), (0.0,), compile=False, **changes)


def total(found: Pool, at_s: float) -> int:
    """Cores of all machines at a time."""
    last = {int(m): int(c) for m, t, c in zip(found.machine, found.at_s, found.cores, strict=True) if t <= at_s}
    return sum(last.values())


def test_another_draw_has_the_same_vms_elsewhere() -> None:
    settings = PoolSettings(
        Packing.RANDOM,
        40,
        0.5,
        cpu_cores=64.0,
        least_cpu_cores=0.0,
        grid_s=0.0,
        machines=40,
        from_s=DAY_S / 2,
        until_s=DAY_S,
    )
    plain, same, other = (pool(vms(), settings, 5, draw=draw) for draw in (0, 0, 3))
    assert plain.cores.tolist() == same.cores.tolist()
    assert plain.rejected_share == other.rejected_share == 0.0
    assert plain.machine.tolist() != other.machine.tolist()
    for at_s in np.linspace(0.51, 0.99, 9) * DAY_S:
        assert total(plain, at_s) == total(other, at_s)


def test_who_knows_what_becomes_of_servers_of_a_size_picks_that_size() -> None:
    """Large servers keep their cores; small ones have just lost none yet, but of other draws' small ones all do."""
    calm, doomed = [(0.0, 20)], [(0.0, 4), (1.5 * DAY_S + 1800.0, 1)]
    others = by_server(*([calm] * 50), *([doomed] * 50))
    at = {"warm_up_s": 1.5 * DAY_S, "every_s": DAY_S}
    found = look(by_server(calm, doomed, doomed, doomed), others, **at)
    assert found["picked_random"] == 0.25
    assert found["picked_known"] == found["picked_best"] == 1.0
    assert found["picks_known_brier"] == 0.0
    assert found["picked_predicted"] == 0.25, "nothing has ever happened: all are alike to a predictor"


def test_servers_of_about_as_many_cores_count_where_few_have_just_as_many() -> None:
    calm, doomed = [(0.0, 10)], [(0.0, 11), (1.5 * DAY_S + 60.0, 3)]
    others = by_server(*([calm] * 10), *([doomed] * 30))
    found = look(by_server(calm), others, warm_up_s=1.5 * DAY_S, every_s=DAY_S)
    assert found["picks_known_brier"] == pytest.approx(0.75**2)


def test_servers_without_the_cores_in_question_say_nothing() -> None:
    """Empty ones lose nothing, and are no more like a machine of two cores than those of three."""
    doomed, empty = [(0.0, 3), (1.5 * DAY_S + 60.0, 1)], [(0.0, 0)]
    others = by_server(*([empty] * 50), *([doomed] * 50))
    found = look(by_server([(0.0, 2)]), others, warm_up_s=1.5 * DAY_S, every_s=DAY_S)
    assert found["picks_known_brier"] == 1.0, "all that could be known said that it would lose its cores"
    assert look(by_server([(0.0, 2)]), by_server(empty), warm_up_s=1.5 * DAY_S, every_s=DAY_S) == {}


@pytest.mark.parametrize("compile", [False, True])
def test_who_knows_the_vms_to_come_knows_of_servers_of_a_size_how_long_they_keep_room(compile: bool) -> None:
    """Half of the large ones lose three cores within the hour, all small ones all that they have; three have 30."""
    calm, falling, doomed = [(0.0, 20)], [(0.0, 20), (1000.0, 17)], [(0.0, 4), (100.0, 0)]
    pool = by_server(*([calm] * 40), *([falling] * 40), *([doomed] * 60), *([[(0.0, 30)]] * 3))
    shares = kept([pool], 0.0, 1800.0, 3600.0, compile).reshape(2, SIZES + 1, len(FREE), STEPS + 1)
    hour = next(step for step in range(STEPS) if step_s(step) > 2000.0)
    now, later = shares[:, :, :, hour]
    assert (shares[..., 0] == 1.0).all()
    assert now[int(size_class(20.0)), : len(FREE)].tolist() == [0.5] * 3 + [1.0] * (len(FREE) - 3)
    assert now[int(size_class(4.0)), FREE.index(0)] == 0.0
    assert now[int(size_class(4.0)), FREE.index(4)] == 1.0, "too few have as many: all that do"
    assert now[int(size_class(30.0)), FREE.index(0)] == pytest.approx(43 / 143)
    assert now[SIZES, FREE.index(0)] == pytest.approx(43 / 143)
    # The doomed ones have gone by then.
    assert later[SIZES, FREE.index(0)] == pytest.approx(43 / 83)


def test_who_knows_the_vms_to_come_starts_nothing_where_all_servers_of_a_size_will_shrink() -> None:
    """Also before any machine has shrunk for the first time."""
    calm, doomed = [(0.0, 20)], [(0.0, 4)]
    for hour in range(12):
        doomed += [(WARM_UP_S + 3600.0 * hour + 1800.0, 0), (WARM_UP_S + 3600.0 * hour + 2400.0, 4)]
    found, others = by_server(*([doomed] * 9), calm), by_server(*([calm] * 50), *([doomed] * 50))
    short = Workload(load=0.05, jobs=8, least_tasks=2, most_tasks=4, most_task_s=3600.0, cores=(1,))
    schemes = ("known", "capacity-random")
    kills = [run(found, short, name, 2, compile=False, others=[others]).results.kills for name in schemes]
    assert kills[0] == 0 < kills[1]


def test_picks_by_prediction_hold_more_often_than_any_and_never_more_often_than_the_best() -> None:
    found = look(made(machines=12, days=3.0), made(machines=20, seed=9, days=3.0))
    assert found.keys() == set(METRICS)
    assert found["picked_random"] + 0.05 < found["picked_predicted"] <= found["picked_best"]
    assert found["picked_known"] <= found["picked_best"]


def test_a_pool_that_is_too_short_to_learn_of_gives_no_figures() -> None:
    assert look(by_server([(0.0, 4)]), by_server([(0.0, 4)]), warm_up_s=2 * DAY_S) == {}
