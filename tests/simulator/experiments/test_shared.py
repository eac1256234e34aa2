"""Arrays that runs share."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from ebbtide.simulator.errors import ExperimentError
from ebbtide.simulator.experiments.shared import SharedArrays, cache_dir, packed, shared_arrays


def test_arrays_are_made_once_for_what_they_depend_on(cache: Path) -> None:
    made = []

    def make() -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
        made.append(1)
        return {"a": np.arange(3.0)}

    for _ in range(3):
        np.testing.assert_array_equal(shared_arrays(["x", 1], make)["a"], [0, 1, 2])
    assert len(made) == 1
    shared_arrays(["x", 2], make)
    assert len(made) == 2
    assert cache_dir() == cache / "simulator"
    assert not list(cache_dir().glob(".*"))


def test_they_travel_as_a_path_or_whole(cache: Path) -> None:
    arrays = shared_arrays("x", lambda: {"a": np.arange(100_000), "b": np.array(["é"])})
    thin = packed({"inner": [arrays]})
    assert len(thin) < 1000
    (found,) = pickle.loads(thin)["inner"]
    assert isinstance(found, SharedArrays)
    assert set(found) == {"a", "b"}
    assert found["a"].sum() == arrays["a"].sum()
    assert not found["a"].flags.writeable
    (whole,) = pickle.loads(packed({"inner": [arrays]}, whole=True))["inner"]
    assert isinstance(whole, dict)
    np.testing.assert_array_equal(whole["a"], arrays["a"])


def test_a_cache_that_has_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"cache .*none is not on this machine, or has gone"):
        SharedArrays(tmp_path / "none")["a"]
    (tmp_path / "file").touch()
    with pytest.raises(ExperimentError, match="cannot be written"):
        shared_arrays("x", lambda: {}, tmp_path / "file" / "below")
