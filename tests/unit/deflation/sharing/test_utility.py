"""Minimums by share and by the application's utility: the smallest size that is useful enough."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.resources import COMPONENTS, TOLERANCE, ResourceVector
from ebbtide.deflation.sharing.utility import check_curve, least_share, size_of_shares
from ebbtide.messages.common import Vector, problem_of
from ebbtide.messages.requests import VMRequest
from ebbtide.messages.vms import VMSpec
from tests.unit.deflation.strategies import runs, vectors

CURVE = [(0.25, 0.5), (0.5, 0.8), (1.0, 1.0)]


@st.composite
def curves(draw: st.DrawFn) -> list[tuple[float, float]]:
    shares = sorted(draw(st.sets(st.integers(0, 1000), min_size=1, max_size=8)))
    utilities = sorted(draw(st.lists(st.integers(0, 1000), min_size=len(shares), max_size=len(shares))))
    return [(share / 1000, utility / 1000) for share, utility in zip(shares, utilities, strict=True)]


def utility_at(points: list[tuple[float, float]], share: float) -> float:
    """By the definition: the line between the neighbours, level beyond the last point, nothing before the first."""
    if share < points[0][0]:
        return 0.0
    for (left, low), (right, high) in itertools.pairwise(points):
        if left <= share <= right:
            return low + (high - low) * (share - left) / (right - left)
    return points[-1][1]


@pytest.mark.parametrize(
    ("at_least", "share"), [(0.1, 0.25), (0.5, 0.25), (0.65, 0.375), (0.8, 0.5), (0.9, 0.75), (1.0, 1.0)]
)
def test_the_share_is_found_on_the_line_between_two_points(at_least: float, share: float) -> None:
    assert least_share(CURVE, at_least) == pytest.approx(share)


def test_a_utility_that_is_never_reached_is_refused_with_the_most_there_is() -> None:
    with pytest.raises(InvalidField, match=r"utility.cpu_cores never reaches at_least \(2\): its most is 1") as caught:
        least_share(CURVE, 2.0, "utility.cpu_cores")
    assert caught.value.field == "utility.cpu_cores"


@runs(300)
@given(curves(), st.integers(1, 1000))
def test_no_smaller_share_is_useful_enough(points: list[tuple[float, float]], thousandths: int) -> None:
    check_curve(points, "utility")
    at_least = thousandths / 1000
    if points[-1][1] < at_least:
        with pytest.raises(InvalidField):
            least_share(points, at_least)
        return
    share = least_share(points, at_least)
    assert 0 <= share <= 1
    assert utility_at(points, share) >= at_least - 1e-9
    if share > points[0][0]:
        # A step of a curve stands for a steep line, so a hair below it is still nearly there.
        assert utility_at(points, share - 1e-7) < at_least


@pytest.mark.parametrize(
    ("points", "sentence"),
    [
        ([], "at least one point"),
        ([(0.5, 0.5), (0.5, 0.6)], "rising shares"),
        ([(0.5, 0.5), (0.4, 0.6)], "rising shares"),
        ([(0.5, 0.5), (0.6, 0.4)], "must not fall"),
        ([(1.5, 0.5)], "within"),
        ([(0.5, -0.5)], "not negative"),
        ([(0.5, float("inf"))], "finite"),
    ],
)
def test_what_is_no_curve_is_refused(points: list[tuple[float, float]], sentence: str) -> None:
    with pytest.raises(InvalidField, match=sentence) as caught:
        check_curve(points, "utility.memory_mib")
    assert caught.value.field == "utility.memory_mib"


@runs(200)
@given(vectors, st.tuples(*[st.integers(0, 1000)] * 4))
def test_a_share_of_nominal_is_on_the_grid_and_never_less_than_the_share(
    nominal: ResourceVector, thousandths: tuple[int, ...]
) -> None:
    shares = ResourceVector(*(value / 1000 for value in thousandths))
    size = size_of_shares(nominal, shares)
    assert size.fits_in(nominal)
    for component in COMPONENTS:
        assert size[component] >= nominal[component] * shares[component] - 2 * TOLERANCE
    assert size_of_shares(nominal, ResourceVector(1, 1, 1, 1)) == nominal


# --- on the wire -----------------------------------------------------------------------------------------------------

SPEC: dict[str, Any] = {"name": "a", "nominal": {"cpu_cores": 3.0, "memory_mib": 1000.0}}


@pytest.mark.parametrize(
    ("fields", "minimum"),
    [
        ({}, (0.1, 192)),
        ({"minimum": {"cpu_cores": 1.0}}, (1.0, 192)),
        ({"minimum_share": 0.25}, (0.75, 250)),
        ({"minimum_share": {"memory_mib": 0.5}}, (0.1, 500)),
        ({"minimum_share": 1}, (3.0, 1000)),
        ({"utility": {"cpu_cores": CURVE, "at_least": 0.8}}, (1.5, 192)),
        ({"utility": {"cpu_cores": CURVE, "memory_mib": [[0.3, 0.9]], "at_least": 0.9}}, (2.25, 300)),
        ({"priority": "fixed", "minimum_share": 0.25}, (3.0, 1000)),
    ],
)
def test_a_minimum_may_be_a_size_a_share_or_a_wished_utility(
    fields: dict[str, Any], minimum: tuple[float, float]
) -> None:
    spec = VMSpec.model_validate({**SPEC, **fields})
    again = VMSpec.model_validate_json(spec.model_dump_json())
    assert again == spec
    assert again.allocation(again.nominal.vector()).minimum == ResourceVector(*minimum)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"minimum": {"cpu_cores": 1.0}, "minimum_share": 0.5}, "minimum_share"),
        ({"minimum": {"cpu_cores": 1.0}, "utility": {"cpu_cores": CURVE, "at_least": 0.5}}, "utility"),
        ({"minimum_share": 0.5, "utility": {"cpu_cores": CURVE, "at_least": 0.5}}, "utility"),
        ({"minimum_share": 1.5}, "minimum_share.cpu_cores"),
        ({"minimum_share": {"memory_mib": -0.1}}, "minimum_share.memory_mib"),
        ({"minimum_share": "half"}, "minimum_share"),
        ({"minimum_share": True}, "minimum_share"),
        ({"utility": {"cpu_cores": CURVE}}, "utility.at_least"),
        ({"utility": {"cpu_cores": CURVE, "at_least": 1.5}}, "utility.cpu_cores"),
        ({"utility": {"cpu_cores": [[0.5, 0.5], [0.4, 0.9]], "at_least": 0.5}}, "utility.cpu_cores"),
        ({"utility": {"cpu_cores": [[0.5]], "at_least": 0.5}}, "utility.cpu_cores.0.1"),
        ({"start": "small"}, "start"),
    ],
)
def test_contradictory_minimums_are_refused_by_their_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        VMSpec.model_validate({**SPEC, **fields})
    assert problem_of(caught.value).field == field


def test_a_fixed_vm_cannot_start_deflated() -> None:
    body = {"request_id": "r", "vm": {**SPEC, "priority": "fixed", "start": "deflated"}}
    with pytest.raises(ValidationError) as caught:
        VMRequest.model_validate(body)
    assert problem_of(caught.value).field == "vm.start"


def test_a_wished_utility_needs_a_curve_and_one_that_was_stored_without_is_still_read() -> None:
    body = {"request_id": "r", "vm": {**SPEC, "utility": {"at_least": 0.8, "cpu_cores": None}}}
    with pytest.raises(ValidationError) as caught:
        VMRequest.model_validate(body)
    assert problem_of(caught.value).field == "vm.utility"
    assert VMSpec.model_validate(body["vm"]).asked_minimum().is_zero()


@pytest.mark.parametrize(
    ("fields", "memory_mib"),
    [({}, 384), ({"boot_memory_mib": 600.0}, 600), ({"minimum_share": 0.5}, 500), ({"boot_memory_mib": 256.0}, 256)],
)
def test_a_vm_starts_with_no_less_than_it_boots_with(fields: dict[str, Any], memory_mib: float) -> None:
    assert VMSpec.model_validate({**SPEC, **fields}).least_start().memory_mib == memory_mib
    small = {**SPEC, "nominal": {"cpu_cores": 1.0, "memory_mib": 256.0}}
    assert VMSpec.model_validate(small).least_start().memory_mib == 256
    assert Vector.of(VMSpec.model_validate(SPEC).least_start()).cpu_cores == 0.1
