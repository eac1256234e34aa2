"""Runs side by side, by examples worked by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ebbtide.simulator.errors import ExperimentError
from ebbtide.simulator.experiments.comparison import compare
from ebbtide.simulator.experiments.results import Results


def results(name: str, rows: list[tuple[Any, ...]], settings: dict[str, Any] | None = None, **more: Any) -> Results:
    """Results with the columns policy, seed and y."""
    columns = {
        "policy": np.array([row[0] for row in rows]),
        "seed": np.array([row[1] for row in rows]),
        "y": np.array([row[2] for row in rows], np.float64),
    }
    meta = {"name": name, "axes": ["policy"], "metrics": ["y"], "settings": settings or {}, **more}
    return Results(columns, meta)


BEFORE = results("before", [("a", 1, 10.0), ("a", 2, 20.0), ("a", 3, 30.0), ("b", 1, 5.0), ("b", 2, 7.0)])


def test_differences_are_of_pairs_of_seeds() -> None:
    after = results("after", [("a", 3, 33.0), ("a", 1, 11.0), ("a", 2, 22.0), ("b", 1, 5.0), ("b", 2, 7.0)])
    found = compare(BEFORE, after)
    first, second = found.differences
    # Differences 1, 2, 3: mean 2, deviation 1, t of two degrees 4.302653. Unpaired it would be lost in 10 ... 30.
    assert (first.case, first.metric, first.difference.mean, first.difference.count) == ({"policy": "a"}, "y", 2.0, 3)
    assert first.difference.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-5)
    assert (first.baseline.mean, first.found.mean, first.relative) == (20.0, 22.0, 0.1)
    assert not first.clear
    assert (second.difference.low, second.difference.mean, second.difference.high, second.clear) == (0, 0, 0, False)
    assert found.notes == ()
    again = results("after", [("a", 1, 11.0), ("a", 2, 21.0), ("a", 3, 31.1)])
    assert compare(BEFORE, again).differences[0].clear


def test_only_seeds_that_both_have_are_compared_and_the_others_are_told_of() -> None:
    after = results("after", [("a", 2, 21.0), ("a", 4, 99.0), ("c", 1, 1.0)], {"servers": 3})
    found = compare(BEFORE, after)
    (only,) = found.differences
    assert (only.baseline.mean, only.found.mean, only.difference.mean, only.difference.count) == (20, 21, 1, 1)
    assert math.isnan(only.difference.low)
    assert not only.clear
    assert found.notes == (
        "settings.servers is None in before and 3 in after",
        "1 cases are in before only, the first at policy=b",
        "1 cases are in after only, the first at policy=c",
        "3 runs of before or after have a seed that the other has not",
    )


def test_what_a_policy_stands_for_and_how_an_input_is_read_is_told_where_it_differs() -> None:
    rows = [("a", 1, 1.0)]
    trace = {"path": "t", "bytes": 1, "sha256": "0"}

    def read(name: str, share: float, form: str | None) -> Results:
        inputs = {"jobs": trace | {"format": form, "options": {}, "order": None}}
        return results(name, rows, policies={"a": {"policy": "x", "share": share}}, inputs=inputs)

    assert compare(read("one", 0.5, "swf"), read("other", 0.6, None)).notes == (
        "policies.a is {'policy': 'x', 'share': 0.5} in one and {'policy': 'x', 'share': 0.6} in other",
        "inputs.jobs.format is swf in one and None in other",
    )
    # Older results do not say, which is no difference.
    older = results("older", rows, inputs={"jobs": trace})
    assert compare(older, read("one", 0.5, "swf")).notes == ()


def test_a_run_that_failed_is_in_no_pair() -> None:
    after = results("after", [("a", 1, math.nan), ("a", 2, 22.0), ("a", 3, 32.0)])
    found = compare(BEFORE, after)
    (only,) = found.differences
    assert (only.difference.mean, only.difference.count, only.baseline.mean) == (2.0, 2, 25.0)
    said = "pairs have no number in after, and are left out where they have none"
    assert found.notes == ("1 cases are in before only, the first at policy=b", f"1 {said}")


@pytest.mark.filterwarnings("error")
def test_infinite_figures_are_in_no_pair() -> None:
    before = results("before", [("a", 1, math.inf), ("a", 2, 20.0), ("a", 3, 30.0), ("a", 4, math.inf)])
    after = results("after", [("a", 1, math.inf), ("a", 2, 21.0), ("a", 3, 32.0), ("a", 4, 1.0)])
    found = compare(before, after)
    (only,) = found.differences
    assert (only.difference.mean, only.difference.count) == (1.5, 2)
    assert [note.partition(",")[0] for note in found.notes] == [
        "2 pairs have no number in before",
        "1 pairs have no number in after",
    ]


def test_where_seeds_draw_nothing_there_is_no_interval() -> None:
    before, after = (
        results(name, [*(("a", seed, value) for seed in (1, 2, 3)), ("b", 1, 1.0), ("b", 2, more)])
        for name, value, more in (("before", 1.0, 1.0), ("after", 2.0, 3.0))
    )
    found = compare(before, after)
    first, second = found.differences
    assert (first.difference.mean, first.clear, math.isnan(first.difference.low)) == (1.0, False, True)
    # One side draws.
    assert not math.isnan(second.difference.low)
    assert found.notes == ("seeds draw nothing here: no interval (1 cases of after, all metrics of which are equal)",)


def test_a_metric_that_does_not_vary_has_its_interval_where_another_does() -> None:
    def drawn(name: str, value: float) -> Results:
        found = results(name, [("a", seed, float(seed)) for seed in (1, 2, 3)])
        return Results({**found.columns, "z": np.full(3, value)}, {**found.meta, "metrics": ["y", "z"]})

    found = compare(drawn("before", 1.0), drawn("after", 2.0), metrics=["z"])
    assert (found.differences[0].clear, found.notes) == (True, ())


def test_values_of_an_axis_are_compared_within_a_run() -> None:
    found = compare(BEFORE, axis="policy", baseline="b")
    (only,) = found.differences
    assert (found.baseline, found.others, only.case) == ("b", ("a",), {})
    assert (only.difference.mean, only.difference.count) == (9.0, 2)
    assert compare(BEFORE, axis="policy").baseline == "a"


def test_json_has_null_for_what_is_no_number() -> None:
    after = results("after", [("a", 1, 0.0)])
    (only,) = compare(results("before", [("a", 1, 0.0)]), after).as_json()["differences"]
    assert only == {
        "case": {"policy": "a"},
        "metric": "y",
        "other": "after",
        "baseline": 0.0,
        "found": 0.0,
        "difference": 0.0,
        "low": None,
        "high": None,
        "relative": None,
        "seeds": 1,
        "clear": False,
    }


def test_what_cannot_be_compared_is_refused() -> None:
    other = results("other", [("x", 1, 1.0)])
    for words, more, sentence in (
        ((BEFORE,), {}, "needs two runs, or one and an axis"),
        ((BEFORE, other), {}, "finds no case with a seed in common"),
        ((BEFORE, other), {"axis": "policy"}, "along an axis needs a single run"),
        ((BEFORE,), {"axis": "x"}, "axis 'x' is none; there are policy"),
        ((BEFORE,), {"axis": "policy", "baseline": "z"}, "baseline 'z' is no value of policy; it has a, b"),
        ((other,), {"axis": "policy"}, "has one value only"),
        ((BEFORE, BEFORE), {"metrics": ["z"]}, "z is no metric of all; they have y"),
        ((BEFORE, BEFORE), {"baseline": "a"}, "is a value of an axis"),
        ((BEFORE, results("o", [("a", 1, 1.0)], axes=[])), {}, "before varies policy, and o has no such axis"),
        ((BEFORE, results("o", [("a", 1, 1.0)], metrics=["z"])), {}, "have none in common"),
    ):
        with pytest.raises(ExperimentError, match=sentence):
            compare(*words, **more)
