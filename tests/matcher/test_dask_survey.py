"""What the Dask engine makes of what its scheduler shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.matcher.engines import dask_inside
from ebbtide.matcher.engines.dask import _machine


def scheduler(*keys: tuple[str, float]) -> Any:
    """With one worker that is at work on keys which ask for so many cores."""
    worker = SimpleNamespace(
        name="n1",
        address="tcp://127.0.0.1:1",
        nthreads=4,
        resources={"core": 4},
        status=SimpleNamespace(name="running"),
        extra={},
    )
    tasks = {
        key: SimpleNamespace(
            processing_on=worker, state="processing", resource_restrictions={"core": cores}, exception_text=""
        )
        for key, cores in keys
    }
    return SimpleNamespace(workers={worker.address: worker}, tasks=tasks)


@pytest.mark.parametrize(("asked", "counted"), [((), 0), ((0.25,), 1), ((0.5, 0.5), 1), ((1.0, 0.25), 2)])
def test_what_others_run_counts_in_full_however_little_it_asks_for(asked: tuple[float, ...], counted: int) -> None:
    others = [(f"other-{number}", cores) for number, cores in enumerate(asked)]
    (worker,) = dask_inside.survey("ebb.", dask_scheduler=scheduler(*others))["workers"]
    assert _machine(worker).foreign_cores == counted
