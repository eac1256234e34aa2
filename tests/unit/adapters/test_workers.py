"""How many workers a size stands for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app_adapters.web.workers import Pool, workers_for

SIZES = st.fixed_dictionaries({}, optional={"cpu_cores": st.floats(0, 1e6), "memory_mib": st.floats(0, 1e9)}).filter(
    bool
)


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    nominal = draw(st.integers(1, 500))
    workers = draw(st.integers(0, nominal * 2))
    worker_mib = draw(st.just(0.0) | st.floats(0.004, 5000))  # the kernel counts pages
    return Pool(
        workers=workers,
        serving=draw(st.integers(0, workers)),
        nominal=nominal,
        minimum=draw(st.integers(1, nominal)),
        full_cores=draw(st.floats(0.1, 256)),
        total_mib=workers * worker_mib + draw(st.floats(0, 5000)),
        worker_mib=worker_mib,
    )


def pool(workers: int = 4, minimum: int = 1, worker_mib: float = 50.0, shared_mib: float = 20.0) -> Pool:
    return Pool(workers, workers, 4, minimum, 2.0, shared_mib + workers * worker_mib, worker_mib)


@pytest.mark.parametrize(
    ("target", "count"),
    [
        ({"cpu_cores": 2.0}, 4),
        ({"cpu_cores": 1.0}, 2),
        ({"cpu_cores": 1.2}, 2),
        ({"cpu_cores": 1.25}, 3),
        ({"cpu_cores": 0.0}, 1),
        ({"cpu_cores": 8.0}, 4),
        ({"memory_mib": 220.0}, 4),
        ({"memory_mib": 219.0}, 3),
        ({"memory_mib": 120.0}, 2),
        ({"memory_mib": 5.0}, 1),
        ({"cpu_cores": 2.0, "memory_mib": 70.0}, 1),
        ({"cpu_cores": 1.0, "memory_mib": 500.0}, 2),
    ],
)
def test_a_size_stands_for_workers(target: dict[str, float], count: int) -> None:
    assert workers_for(target, pool()) == count


def test_the_minimum_is_kept() -> None:
    assert workers_for({"cpu_cores": 0.0, "memory_mib": 0.0}, pool(minimum=3)) == 3


def test_workers_that_hold_nothing_alone_go_only_where_the_target_is_missed() -> None:
    assert workers_for({"memory_mib": 20.0}, pool(worker_mib=0.0)) == 4
    assert workers_for({"memory_mib": 19.0}, pool(worker_mib=0.0)) == 1


def test_what_is_shared_does_not_come_free_with_a_worker() -> None:
    preloaded = pool(worker_mib=5.0, shared_mib=300.0)
    assert preloaded.memory_mib(1) == 305.0
    assert workers_for({"memory_mib": 310.0}, preloaded) == 2


@given(pools(), SIZES)
def test_the_count_lies_between_minimum_and_nominal(pool: Pool, target: dict[str, float]) -> None:
    assert pool.minimum <= workers_for(target, pool) <= pool.nominal


@given(pools(), SIZES, SIZES)
def test_a_smaller_target_never_means_more_workers(
    pool: Pool, target: dict[str, float], other: dict[str, float]
) -> None:
    both = {name: min(target.get(name, 1e9), other.get(name, 1e9)) for name in {*target, *other}}
    assert workers_for(both, pool) <= min(workers_for(target, pool), workers_for(other, pool))


@given(pools(), st.floats(0, 1e9))
def test_a_memory_target_is_met_or_the_minimum_is_left(pool: Pool, target_mib: float) -> None:
    count = workers_for({"memory_mib": target_mib}, pool)
    assert pool.memory_mib(count) <= target_mib * (1 + 1e-6) + 1e-3 or count == pool.minimum


@given(pools())
def test_the_largest_sizes_stand_for_all_workers(pool: Pool) -> None:
    assert workers_for({"memory_mib": pool.largest_mib(), "cpu_cores": pool.full_cores}, pool) == pool.nominal


@given(pools(), st.data())
def test_the_cores_of_a_number_of_workers_stand_for_that_number(pool: Pool, data: st.DataObject) -> None:
    count = data.draw(st.integers(pool.minimum, pool.nominal))
    assert workers_for({"cpu_cores": pool.cores(count)}, pool) == count
