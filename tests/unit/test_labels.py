"""Labels and selectors as values: syntax, limits, and what a selector chooses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ebbtide.deflation.errors import InvalidField
from ebbtide.messages.common import Vector, problem_of
from ebbtide.messages.labels import LabelsRequest, changes_of, matches, selector_of
from ebbtide.messages.vms import VMSpec

LABELS = {"env": "prod", "tier": "web", "example.org/team": "a"}


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("env=prod", True), ("env==prod", True), ("env=test", False), ("env != prod", False), ("env!=test", True),
        ("none!=x", True), ("env in (test, prod)", True), ("env in (test)", False), ("env notin (test)", True),
        ("env notin (prod,test)", False), ("none notin (x)", True), ("env", True), ("none", False), ("!none", True),
        ("!env", False), ("env=prod,tier=web", True), ("env=prod,tier in (db,mail),!none", False),
        ("example.org/team=a", True), ("env=", False), (" env = prod , tier ", True),
    ],
)  # fmt: skip
def test_a_selector_chooses_what_kubernetes_would(text: str, chosen: bool) -> None:
    assert matches(selector_of(text), LABELS) is chosen


@pytest.mark.parametrize(
    "text",
    ["", ",", "=prod", "env=a b", "env in ()x", "env in prod", "env>3", "-env", "a/b/c=d", "env=" + "x" * 64, "!"],
)
def test_what_is_no_selector_is_refused_with_the_name_of_the_parameter(text: str) -> None:
    with pytest.raises(InvalidField) as error:
        selector_of(text)
    assert error.value.field == "selector"


KEYS = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,5}[A-Za-z0-9])?", fullmatch=True)


@given(st.dictionaries(KEYS, KEYS, max_size=5), KEYS, KEYS)
def test_each_condition_is_the_opposite_of_its_negation(labels: dict[str, str], key: str, value: str) -> None:
    for yes, no in ((f"{key}={value}", f"{key}!={value}"), (f"{key} in ({value})", f"{key} notin ({value})"),
                    (key, f"!{key}")):  # fmt: skip
        assert matches(selector_of(yes), labels) is not matches(selector_of(no), labels)


@given(st.dictionaries(KEYS, KEYS, max_size=5), st.dictionaries(KEYS, st.none() | KEYS, max_size=5))
def test_the_same_changes_twice_come_to_the_same(labels: dict[str, str], changes: dict[str, str | None]) -> None:
    request = LabelsRequest(labels=changes)
    once = request.onto(labels)
    assert request.onto(once) == once
    assert all(once.get(key) == value for key, value in changes.items())
    assert {key: once.get(key) for key in labels if key not in changes} == {
        key: value for key, value in labels.items() if key not in changes
    }


@pytest.mark.parametrize(
    ("labels", "field"),
    [
        ({"a b": "x"}, "labels.a b"), ({"env": "a b"}, "labels.env"), ({"": "x"}, "labels."),
        ({"Example.org/x": "y"}, "labels.Example.org/x"), ({"k" * 64: "y"}, f"labels.{'k' * 64}"),
        ({f"k{n}": "" for n in range(65)}, "labels"),
    ],
)  # fmt: skip
def test_a_label_that_can_be_none_is_named_with_its_field(labels: dict[str, str], field: str) -> None:
    with pytest.raises(ValidationError) as error:
        VMSpec(name="web", nominal=Vector(cpu_cores=1.0, memory_mib=512.0), labels=labels)
    assert problem_of(error.value).field == field


def test_too_many_labels_together_are_refused() -> None:
    with pytest.raises(InvalidField, match="labels would be 65: 64 are the most"):
        LabelsRequest(labels={"one": "more"}).onto({f"k{n}": "" for n in range(64)})


def test_changes_are_typed_as_with_kubectl() -> None:
    assert changes_of(["env=prod", "old-", "empty=", "a-b=c"]) == {"env": "prod", "old": None, "empty": "", "a-b": "c"}
    with pytest.raises(InvalidField, match="'env' must be like key=value"):
        changes_of(["env"])
    for again in (["a=1", "a-"], ["a=b", "a=c"], ["a-", "a=1"]):
        with pytest.raises(InvalidField, match="a is named twice"):
            changes_of(again)


def test_a_spec_without_labels_says_nothing_of_them_to_an_earlier_agent() -> None:
    spec = VMSpec(name="web", nominal=Vector(cpu_cores=1.0, memory_mib=512.0))
    assert "labels" not in spec.model_dump_json()
