"""What every pool of workers that serves HTTP must do: shrink and grow while every request is answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.adapters.rest import Rest
from tests.adapters.web_load import WebLoad
from tests.adapters.web_servers import Gunicorn, Nginx

Record = Callable[[str, object], None]


def cores(rest: Rest, request_id: str, direction: str, size: float, **more: object) -> dict[str, Any]:
    """Ask for cores, and wait for the end."""
    status, answer = rest.target(request_id, direction, 0, **{"target": {"cpu_cores": size}, **more})
    assert status == 202, answer
    return rest.finished(request_id)


def to_one_worker_and_back(
    pool: Gunicorn | Nginx,
    rest: Rest,
    load: WebLoad,
    least_mib: float,
    within_mib: float,
    alone: Callable[[], object],
    whole: Callable[[], object],
) -> tuple[dict[str, Any], float]:
    """Of four workers three go and come back.

    :param least_mib: more than this comes free.
    :param within_mib: so far what is said of memory may be off.
    :param alone: looks at the one that is left.
    :param whole: waits until all workers serve.
    :returns: the promise, and what really came free, MiB.
    """
    load.more()
    sizes = rest.capabilities()["resources"]
    assert sizes["cpu_cores"] == {"current": 4, "minimum": 1, "maximum": 4, "step": 1}
    before_mib = pool.pss_mib()
    assert sizes["memory_mib"]["current"] == pytest.approx(before_mib, rel=0.1, abs=within_mib - 1)

    status, answer = rest.target("down", "deflate", 0, target={"cpu_cores": 1.0})
    assert (status, answer["promised"]["cpu_cores"]) == (202, 3)
    done = rest.finished("down")
    assert done["state"] == "released", done
    freed_mib = before_mib - pool.pss_mib()
    assert len(pool.workers()) == 1
    alone()
    assert freed_mib > least_mib
    assert done["released"]["memory_mib"] == pytest.approx(freed_mib, rel=0.1, abs=within_mib)
    assert done["released"]["cpu_cores"] == 3
    load.more()

    done = cores(rest, "up", "reinflate", 4.0)
    assert (done["state"], done["released"]) == ("released", {"cpu_cores": 0, "memory_mib": 0})
    assert len(pool.workers()) == 4
    whole()
    load.more()
    return answer, freed_mib


def ten_cycles(
    pool: Gunicorn | Nginx, rest: Rest, load: WebLoad, within_mib: float, whole: Callable[[], object]
) -> None:
    """Workers and memory are as they were after the first."""
    first_mib = 0.0
    for i in range(10):
        cores(rest, f"down{i}", "deflate", 2.0)
        assert len(pool.workers()) == 2
        cores(rest, f"up{i}", "reinflate", 4.0)
        assert len(pool.workers()) == 4
        whole()
        load.more(10)
        first_mib = first_mib or pool.pss_mib()
    assert pool.pss_mib() < first_mib * 1.1 + within_mib


def answered(load: WebLoad, what: str, record: Record) -> None:
    """Every request has had its answer, in time."""
    record("p99_ms", round(load.p99_ms(), 1))
    record("answers", load.count())
    print(f"{what}: {load.count()} answers, p99 {load.p99_ms():.1f} ms, closed while kept {load.closed_while_kept}")
    assert load.errors == []
    assert load.p99_ms() < 5000
