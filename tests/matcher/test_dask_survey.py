"""What the Dask engine makes of what its scheduler shows."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dask.utils import key_split

from ebbtide.matcher.engines import dask, dask_inside
from ebbtide.matcher.engines.dask import KEY_PREFIX, Dask, _machine, _seen
from ebbtide.matcher.engines.records import Record
from ebbtide.matcher.engines.settings import EngineSettings
from ebbtide.matcher.match.attempts import attempt_name


def scheduler(*keys: tuple[str, float | None]) -> Any:
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
            processing_on=worker,
            state="processing",
            resource_restrictions={"core": cores} if cores is not None else None,
            exception_text="",
        )
        for key, cores in keys
    }
    return SimpleNamespace(workers={worker.address: worker}, tasks=tasks)


@pytest.mark.parametrize(("asked", "counted"), [((), 0), ((0.25,), 1), ((0.5, 0.5), 1), ((1.0, 0.25), 2)])
def test_what_others_run_counts_in_full_however_little_it_asks_for(asked: tuple[float, ...], counted: int) -> None:
    others = [(f"other-{number}", cores) for number, cores in enumerate(asked)]
    (worker,) = dask_inside.survey("ebb.", KEY_PREFIX, dask_scheduler=scheduler(*others))["workers"]
    assert _machine(worker).foreign_cores == counted


@pytest.mark.parametrize("label", ["ebb", "north", "north-1", "a-b"])
def test_keys_of_attempts_are_one_kind_for_the_scheduler_and_give_the_names_of_attempts(label: str) -> None:
    names = [attempt_name(label, *of) for of in (("train", "0a", 1), ("a-b", "ae05086432ca935f6eba409a8ecd4896", 2))]
    keys = [KEY_PREFIX + name for name in names]
    assert len({key_split(key) for key in keys}) == 1
    earlier = attempt_name(label, "train", "0b", 1)
    shown = scheduler(*((key, 1.0) for key in (*keys, earlier, "other-1", f"{KEY_PREFIX}{label}-2.train.0a.1")))
    found = dask_inside.survey(f"{label}.", KEY_PREFIX, dask_scheduler=shown)
    assert list(found["tasks"]) == [*names, earlier]
    assert found["workers"][0]["others"] == 2.0


@pytest.mark.parametrize(("asked", "held"), [(2.0, 2), (0.5, 1), (None, None)])
def test_an_attempt_on_a_worker_holds_the_cores_that_its_scheduler_gave_it_there(
    asked: float | None, held: int | None
) -> None:
    """Of one that is no task's nobody else knows them."""
    shown = scheduler((f"{KEY_PREFIX}ebb.since.0b.1", asked))
    found = dask_inside.survey("ebb.", KEY_PREFIX, dask_scheduler=shown)
    (seen,) = (_seen(task, Record()) for task in found["tasks"].values())
    assert (seen.machine, seen.cores) == ("n1", held)


async def test_an_attempt_is_dropped_by_its_key_and_by_that_of_earlier_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    async def done(*given: Any, **_: Any) -> None:
        asked.append(given)

    class Recorded(Dask):
        @contextlib.asynccontextmanager
        async def _connected(self) -> AsyncIterator[Any]:
            yield SimpleNamespace(unpublish_dataset=done, cancel=done)

    monkeypatch.setattr(dask, "_dask", SimpleNamespace(Future=lambda key, client: key))
    settings = EngineSettings(engine="dask", directory=tmp_path, dask_scheduler="tcp://127.0.0.1:1")
    await Recorded(settings).forget("ebb.train.0a.1")
    assert asked == [("ebb.train.0a.1",), (["ebbtide_attempt-ebb.train.0a.1", "ebb.train.0a.1"],)]
