"""A saved engine goes on as what it was, or not at all: other options of its policy are other engines, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbtide.simulator import archives
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.intervals.policy import Options as IntervalOptions
from ebbtide.simulator.intervals.policy import policy as intervals
from ebbtide.simulator.jobs.engine import Engine, Machines
from ebbtide.simulator.jobs.policy import Policy
from ebbtide.simulator.jobs.settings import Settings
from ebbtide.simulator.matching.policy import policy as matching
from ebbtide.simulator.matching.schemes import SCHEMES
from ebbtide.simulator.waiting.policy import Options as WaitingOptions
from ebbtide.simulator.waiting.policy import elastic
from ebbtide.simulator.waiting.policy import policy as waiting
from tests.simulator.jobs import scenes

JOBS = [scenes.job(at_s, 1, 5.0 + at_s % 7) for at_s in range(40)]
FIXED = Machines(2, 4)


def scheme(name: str) -> Policy:
    """The matcher, as one of those that are compared."""
    return matching(SCHEMES[name].predicting, SCHEMES[name].matching)


def heeding(**options: Any) -> Policy:
    given = {"heuristics": "ias", "stable": 1, "every_s": 60.0, "big_core_s": 900.0, "long_s": 600.0}
    return intervals(IntervalOptions(**{**given, "aggressiveness": 0.6, "ended": np.zeros((1, 8)), **options}))


def shrinking(chosen: Policy | str, **more: Any) -> Engine:
    """On machines that come and go."""
    moves = [(0.0, "a", 4.0), (0.0, "b", 4.0), (20.0, "b", 1.0)]
    settings = Settings(memory=False, **more)
    return Engine(scenes.batches(JOBS), None, scenes.changes(moves), policy=chosen, settings=settings, compile=False)


def knowing(**options: Any) -> Engine:
    """Interval-aware."""
    return shrinking(heeding(**options), by_length=True)


def renting(**options: Any) -> Engine:
    chosen = waiting(WaitingOptions(**options), FIXED)
    return Engine(scenes.batches(JOBS), FIXED, policy=chosen, elastic=elastic(FIXED), compile=False)


@pytest.mark.parametrize(
    ("ours", "theirs", "differs"),
    [
        (
            lambda: shrinking(scheme("landmark")),
            lambda: shrinking(scheme("paper")),
            "switches",
        ),
        (
            lambda: shrinking(scheme("landmark")),
            lambda: shrinking(scheme("landmark-spare")),
            "numbers",
        ),
        (lambda: knowing(), lambda: knowing(heuristics="h4"), "facts"),
        (lambda: knowing(), lambda: knowing(aggressiveness=0.1), "numbers"),
        (lambda: shrinking("best-fit"), lambda: shrinking("first-fit"), "facts"),
        (lambda: renting(), lambda: renting(tries=True), "knobs"),
        (lambda: renting(), lambda: renting(wait_below_s=60.0), "numbers"),
    ],
)
def test_an_engine_does_not_go_on_as_one_of_another_scheme(
    ours: Callable[[], Engine], theirs: Callable[[], Engine], differs: str, tmp_path: Path
) -> None:
    path = tmp_path / "saved.npz"
    first = ours()
    first.advance(12.0)
    first.save(path)
    other = theirs()
    with pytest.raises(InvalidParameter, match=rf"^policy has other options here than when .*saved\.npz.*{differs}"):
        other.load(path)
    # What cannot be loaded has changed nothing.
    assert other.run().metrics == pytest.approx(theirs().run().metrics, nan_ok=True)
    again = ours()
    again.load(path)
    assert again.run().metrics == pytest.approx(ours().run().metrics, nan_ok=True)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"machines": Machines(3, 4)}, "machines"),
        ({"machines": Machines(2, 8)}, "machines"),
        ({"machines": Machines(2, 4, 1024)}, "machines"),
        ({"elastic": 2}, "elastic"),
        ({"most_cores": 3}, "most_cores"),
        ({"most_mib": 512}, "most_mib"),
    ],
)
def test_an_engine_does_not_go_on_with_other_machines(more: dict[str, Any], field: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.npz"

    def engine(**given: Any) -> Engine:
        told: dict[str, Any] = {"machines": FIXED, "compile": False} | given
        return Engine(scenes.batches(JOBS), **told)

    first = engine()
    first.advance(12.0)
    first.save(path)
    with pytest.raises(InvalidParameter, match=rf"^{field} is .* here, and was .* when .*saved\.npz was saved"):
        engine(**more).load(path)


def test_who_wants_rows_is_said_by_the_engine_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "saved.npz"

    def engine(**sinks: Any) -> Engine:
        return Engine(scenes.batches(JOBS), FIXED, compile=False, **sinks)

    rows: list[Any] = []
    first = engine()
    first.advance(12.0)
    before = first.results().jobs_done
    first.save(path)
    second = engine(done=rows.append, attempts=rows.append)
    second.load(path)
    assert second.run().jobs_done == 40
    assert sum(len(part) for part in rows) == 2 * (40 - before)
    second = engine(done=rows.append)
    second.advance(12.0)
    second.save(path)
    third = engine()
    third.load(path)
    count = len(rows)
    assert third.run().jobs_done == 40
    assert len(rows) == count


def test_a_file_that_is_damaged_or_something_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "saved.npz"
    first = shrinking("best-fit")
    first.advance(12.0)
    first.save(path)
    whole = path.read_bytes()
    for content in (b"", b"PK", b"text", whole[: len(whole) // 2], whole[:-3]):
        path.write_bytes(content)
        with pytest.raises(InvalidParameter, match=r"path .*saved\.npz is no saved engine"):
            shrinking("best-fit").load(path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(InvalidParameter, match="is no saved engine"):
        shrinking("best-fit").load(tmp_path / "one.npy")
    for facts in ("[]", "{}", "null"):
        archives.write(path, {"facts": np.array(facts)})
        with pytest.raises(InvalidParameter):
            shrinking("best-fit").load(path)


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "saved.npz"
    archives.write(path, {"a": np.arange(3)})

    def full(file: Any, **arrays: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        archives.write(path, {"a": np.arange(4)})
    assert archives.read(path)["a"].tolist() == [0, 1, 2]
    assert [one.name for one in tmp_path.iterdir()] == ["saved.npz"]
