from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given

from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.resources import COMPONENTS, ZERO, ResourceVector
from tests.unit.deflation.strategies import runs, vectors


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (math.nan, "finite"),
        (math.inf, "finite"),
        (-math.inf, "finite"),
        pytest.param(10**400, "finite", id="beyond-floats"),
        (-1, "negative"),
        (True, "number"),
        ("4", "number"),
        (None, "number"),
    ],
)
def test_a_bad_component_is_refused_by_its_name(component: str, value: Any, problem: str) -> None:
    with pytest.raises(InvalidField, match=problem) as caught:
        ResourceVector.of({component: value})
    assert caught.value.field == component


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(InvalidField, match="cores is no component") as caught:
        ResourceVector.of({"cores": 1})
    assert caught.value.field == "cores"


def test_components_are_reached_by_name_only() -> None:
    assert ResourceVector(cpu_cores=2)["cpu_cores"] == 2.0
    with pytest.raises(KeyError):
        ResourceVector()["fits_in"]


def test_whole_numbers_become_floats() -> None:
    assert all(isinstance(value, float) for value in ResourceVector(1, 2, 3, 4))


def test_a_vector_reads_as_a_sentence_part() -> None:
    assert str(ResourceVector(1.5, 300)) == "1.5 cores, 300 MiB"
    assert str(ZERO) == "nothing"


@runs()
@given(vectors, vectors)
def test_what_is_left_after_taking_never_goes_below_zero(a: ResourceVector, b: ResourceVector) -> None:
    rest = a.less(b)
    assert all(value == max(x - y, 0) for value, x, y in zip(rest, a, b, strict=True))
    assert a.smaller(b).fits_in(a)
    assert a.fits_in(a.larger(b))
    assert (a.less(b) + a.smaller(b)).less(a).is_zero()


@runs()
@given(vectors, vectors)
def test_fitting_and_missing_agree(a: ResourceVector, b: ResourceVector) -> None:
    assert a.fits_in(b) == a.less(b).is_zero()


@runs()
@given(vectors)
def test_a_vector_survives_its_dictionary(vector: ResourceVector) -> None:
    assert ResourceVector.of(vector.as_dict()) == vector
    assert ResourceVector(*vector) == vector
    assert 2 * vector == vector + vector == vector * 2


def test_a_scaled_vector_must_not_turn_negative() -> None:
    with pytest.raises(InvalidField, match="cpu_cores"):
        ResourceVector(cpu_cores=1) * -1


def test_sizes_of_a_tebibyte_and_what_rounding_leaves_are_written_as_people_read_them() -> None:
    assert str(ResourceVector(64.0, 1_048_576.0)) == "64 cores, 1048576 MiB"
    assert str(ResourceVector(0.25, 1e-9)) == "0.25 cores"
    assert str(ResourceVector(1e-9)) == "nothing"
