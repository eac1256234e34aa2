"""What an earlier manager is told: its refusals are read, and only of fields that it does not know."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from ebbtide.messages.common import problem_of
from ebbtide.messages.hosts import HostReport
from hostagent.vm.earlier_manager import of_one_vm, unknown_field, without
from tests.manager.plan_events import report_of, spec_of, status_of


def refusal(body: str) -> str:
    """What a version answers that does not know all of a report."""
    with pytest.raises(ValidationError) as refused:
        HostReport.model_validate_json(body)
    return problem_of(refused.value).model_dump_json()


def test_a_refusal_names_the_field_and_the_report_goes_without_it() -> None:
    report = report_of("host-a", *(status_of(spec_of(name), "host-a") for name in ("one", "two")))
    body = json.loads(report.model_dump_json())
    body["vms"][1]["mood"] = "good"
    field = unknown_field(refusal(json.dumps(body)))
    assert field == ("vms", "*", "mood")
    assert of_one_vm({field, ("migration",)}) == {("vm", "mood")}
    sent = json.loads(without(report, {("vms", "*", "uuid"), ("migration",), ("vms", "*", "nobody", "knows")}))
    assert "migration" not in sent
    assert len(sent["vms"]) == 2
    assert all("uuid" not in vm and vm["name"] for vm in sent["vms"])
    assert without(report, ()) == report.model_dump_json()


def test_a_refusal_of_a_value_is_no_refusal_of_a_field() -> None:
    body = json.loads(report_of("host-a").model_dump_json())
    body["capacity"]["cpu_cores"] = -1
    assert unknown_field(refusal(json.dumps(body))) is None
    assert unknown_field("no JSON") is None
    assert unknown_field('{"error": "a: extra inputs are not permitted", "field": null}') is None
