from __future__ import annotations

import json
import math
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ebbtide import messages
from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.cascade import Cascade
from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.commands import CreateCommand, ReclaimCommand, ReinflateCommand, TargetCommand
from ebbtide.messages.common import Body, Vector, problem_of
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.operations import LedgerRow, Operation, OperationState, VMOutcome
from ebbtide.messages.requests import VMRequest
from ebbtide.messages.vms import VMSpec, VMState, VMStatus
from tests.unit.deflation.model_vm import ModelVM, run
from tests.unit.deflation.strategies import allocations, runs, vectors

SPEC: dict[str, Any] = {"name": "low-1", "nominal": {"cpu_cores": 3, "memory_mib": 1024}}


def changed(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(body))
    *parents, last = path.split(".")
    inner = copy
    for parent in parents:
        inner = inner.setdefault(parent, {})
    inner[last] = value
    return copy


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("vm.name", "Low_1", "vm.name"),
        ("vm.name", "low-", "vm.name"),
        ("vm.name", "a" * 41, "vm.name"),
        ("vm.name", "low\n", "vm.name"),
        ("vm.name", "../low", "vm.name"),
        ("vm.priority", "high", "vm.priority"),
        ("vm.nominal.cpu_cores", -1, "vm.nominal.cpu_cores"),
        ("vm.nominal.cpu_cores", math.nan, "vm.nominal.cpu_cores"),
        ("vm.nominal.cpu_cores", math.inf, "vm.nominal.cpu_cores"),
        ("vm.nominal.cpu_cores", "3", "vm.nominal.cpu_cores"),
        ("vm.nominal.cpu_cores", True, "vm.nominal.cpu_cores"),
        ("vm.nominal.cpu_cores", None, "vm.nominal.cpu_cores"),
        ("vm.nominal.cpu_cores", 0.05, "vm.nominal.cpu_cores"),
        ("vm.nominal.memory_mib", 100, "vm.nominal.memory_mib"),
        ("vm.nominal.memory_mib", 1e13, "vm.nominal.memory_mib"),
        ("vm.nominal.cores", 3, "vm.nominal.cores"),
        ("vm.nominal", [3, 1024], "vm.nominal"),
        ("vm.minimum.cpu_cores", 3.5, "vm.minimum.cpu_cores"),
        ("vm.ceiling", {"cpu_cores": 4, "memory_mib": 2048}, "vm.ceiling"),
        ("vm.priority", "harvest", "vm.ceiling"),
        ("vm.boot_memory_mib", 1025, "vm.boot_memory_mib"),
        ("vm.template", "../lab", "vm.template"),
        ("vm.colour", "red", "vm.colour"),
        ("request_id", "", "request_id"),
        ("request_id", "a b", "request_id"),
        ("policy", "worst-fit", "policy"),
        ("deadline_s", -1, "deadline_s"),
        ("deadline_s", math.nan, "deadline_s"),
        ("deadline_s", 1e6, "deadline_s"),
    ],
)
def test_a_bad_request_is_answered_with_its_field(path: str, value: Any, field: str) -> None:
    body = changed({"request_id": "r-1", "vm": SPEC}, path, value)
    with pytest.raises(ValidationError) as caught:
        VMRequest.model_validate_json(json.dumps(body))
    problem = problem_of(caught.value)
    assert problem.field == field
    assert field in problem.detail


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"low"', "{}", '{"request_id": "r"}'])
def test_a_body_that_is_none_is_answered_with_a_sentence(text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        VMRequest.model_validate_json(text)
    problem = problem_of(caught.value)
    assert problem.detail
    assert "\n" not in problem.detail


def test_a_body_that_is_wrong_all_over_takes_no_time_to_be_refused() -> None:
    """Writing thousands of errors out would hold everything else up."""
    rows: dict[str, Any] = {"vms": [{}] * 900, "core_changes": [{}] * 900}
    with pytest.raises(ValidationError) as caught:
        HostReport.model_validate_json(json.dumps(rows))
    assert caught.value.error_count() < 50
    with pytest.raises(ValidationError) as caught:
        HostReport.model_validate_json(json.dumps({f"f{number}": 0 for number in range(2000)}))
    problem = problem_of(caught.value)
    assert (problem.field, problem.detail.split(" in ")[0]) == (None, "the body is wrong")


def test_an_error_of_the_core_keeps_its_field() -> None:
    problem = problem_of(InvalidField("target.cpu_cores", "must be within [1, 4], but is 5"))
    assert problem.field == "target.cpu_cores"
    assert problem.detail == "target.cpu_cores must be within [1, 4], but is 5"


@pytest.mark.parametrize("generation", [0, -1, 1.5, "x", None])
def test_a_generation_counts_from_one(generation: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        TargetCommand.model_validate({"request_id": "r", "generation": generation, "target": {"cpu_cores": 1.0}})
    assert problem_of(caught.value).field == "generation"


def test_bodies_cannot_be_changed_after_the_check() -> None:
    spec = VMSpec.model_validate(SPEC)
    with pytest.raises(ValidationError):
        spec.name = "Other"  # type: ignore[misc]


@runs()
@given(vectors)
def test_a_vector_survives_the_wire(vector: ResourceVector) -> None:
    body = Vector.of(vector)
    assert Vector.model_validate_json(body.model_dump_json()).vector() == vector


@runs()
@given(allocations(), st.floats(0, 1e-3))
def test_a_vm_that_its_host_holds_valid_is_valid_for_the_manager(row: Allocation, off_grid: float) -> None:
    """A size that is not on the grid must not be rounded above what the VM may have."""
    nominal = row.nominal + ResourceVector(off_grid, off_grid)
    ceiling = nominal.larger(row.ceiling) if row.ceiling is not None else None
    here = Allocation(row.name, row.priority, nominal, row.minimum, ceiling or nominal, ceiling, row.overhead_mib)
    status = VMStatus(
        name="vm",
        host="host-a",
        domain="ebb-host-a.vm",
        state=VMState.RUNNING,
        priority=here.priority,
        nominal=Vector(**nominal.as_dict()),
        minimum=Vector.of(here.minimum),
        ceiling=Vector(**ceiling.as_dict()) if ceiling is not None else None,
        current=Vector.of(here.current),
        overhead_mib=here.overhead_mib,
        generation=1,
        guest_connected=True,
        boot_memory_mib=512,
    )
    there = VMStatus.model_validate_json(status.model_dump_json()).allocation()
    assert there.upper == here.upper
    assert list(there.current) == pytest.approx(list(here.current), abs=1e-6)


def test_a_fixed_vm_has_its_nominal_size_as_minimum() -> None:
    spec = VMSpec.model_validate(SPEC | {"priority": "fixed"})
    row = spec.allocation(spec.nominal.vector(), 320)
    assert row.minimum == row.nominal
    assert row.deflatable == ZERO
    assert VMSpec.model_validate(SPEC).allocation(ZERO).minimum == ResourceVector(0.1, 192)


def test_an_outcome_becomes_an_operation_and_comes_back() -> None:
    vm = ModelVM()
    outcome, _ = run(Cascade(vm.bound, ResourceVector(2.5, 700), 60.0), vm)
    body = VMOutcome.of("low-1", 3, outcome)
    assert body.before.cpu_cores == 4
    assert {(row.layer, row.resource) for row in body.ledger} >= {("guest", "cpu_cores"), ("hypervisor", "cpu_cores")}
    operation = Operation(
        request_id="r-1",
        kind="reclaim",
        state=OperationState.DONE,
        sentence=outcome.sentence,
        vms=(body,),
        started_at=0.0,
    )
    assert Operation.model_validate_json(operation.model_dump_json()) == operation
    assert LedgerRow.of(outcome.ledger[0]) == body.ledger[0]


@pytest.mark.parametrize(
    "body",
    [
        CreateCommand(request_id="r", vm=VMSpec.model_validate(SPEC)),
        TargetCommand(request_id="r", epoch=2, generation=1, target=Vector(cpu_cores=1.0)),
        ReclaimCommand(request_id="r", need=Vector(memory_mib=300.0)),
        ReinflateCommand(request_id="r"),
        ReinflateCommand(request_id="r", room=Vector()),
        VMRequest(request_id="r", vm=VMSpec.model_validate(SPEC)),
    ],
)
def test_commands_survive_the_wire(body: Body) -> None:
    assert type(body).model_validate_json(body.model_dump_json()) == body


def test_every_body_refuses_what_it_does_not_know() -> None:
    modules = [import_module(f"{messages.__name__}.{found.name}") for found in iter_modules(messages.__path__)]
    values = [value for module in modules for value in vars(module).values()]
    bodies = [value for value in values if isinstance(value, type) and issubclass(value, Body)]
    assert len(bodies) > 60
    assert all(body.model_config.get("extra") == "forbid" and body.model_config.get("frozen") for body in bodies)


def test_a_bound_outcome_is_rounded_but_not_lost() -> None:
    bound = Bound(3, 0.83333, 411.99609375, 212)
    assert Vector.of(bound.size).vector() == ResourceVector(2.5, 623.996094)


def test_priorities_are_words_on_the_wire() -> None:
    assert json.loads(VMSpec.model_validate(SPEC).model_dump_json())["priority"] == Priority.DEFLATABLE.value
