"""What guests say: the guest's own dataclasses against the JSON Schemas, and what is refused of an untrusted guest."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ebbtide.messages.guest import (
    MAX_TEXT,
    PROTOCOL,
    ApplicationPromise,
    ApplicationRelease,
    ColdFreed,
    CpusSet,
    GuestBody,
    GuestStatus,
    GuestTrace,
    Hello,
    PreemptionTold,
    PreemptionWithdrawn,
    PressureNotice,
    RequestNotice,
    cleaned,
)
from guestagent import messages as guest
from tests.unit.deflation.strategies import runs

STATUS = guest.StatusResult(
    boot_id="4b1d",
    uptime_s=12.5,
    cpus=guest.CpuStatus(present=[0, 1, 2], online=[0, 1], unpluggable=[1]),
    memory=guest.MemoryStatus(
        total_mib=980.5, available_mib=610.25, reserve_mib=49.0, floor_mib=419.25, unpluggable_mib=561.25, free_mib=200
    ),
    pressure=guest.Pressure(0.0, 0.0, 12.5, memory_some_total_us=901, memory_full_total_us=17),
    major_faults=14,
    swap_in_pages=3,
    swap_out_pages=4,
    applications=[guest.ApplicationSize(name="memcached", resident_mib=301.5)],
    cold_blocked="",
    notice="p-1",
)
SAMPLES: list[tuple[Any, type[GuestBody]]] = [
    (guest.HelloResult(PROTOCOL, "f00d", "0.1.0", "4b1d", ["cpu", "memory", "application"]), Hello),
    (STATUS, GuestStatus),
    (dataclasses.replace(STATUS, pressure=None, applications=[]), GuestStatus),
    (dataclasses.replace(STATUS, swap_in_pages=None, swap_out_pages=None), GuestStatus),
    (guest.PressureNotice("4b1d", STATUS.memory, STATUS.pressure, 14, 3, 4), PressureNotice),
    (guest.PressureNotice("4b1d", STATUS.memory, None, 14, None, None), PressureNotice),
    (guest.RequestNotice(0.5, 256.0, "a batch job starts"), RequestNotice),
    (guest.CpusSetResult([0, 1], []), CpusSet),
    (guest.ColdFreedResult(120.5, True, "the rest is in use"), ColdFreed),
    (guest.PreemptionResult(2, 1), PreemptionTold),
    (guest.WithdrawalResult(True), PreemptionWithdrawn),
    (guest.CpusSetResult([0, 1, 3], [guest.CpuFailure(3, "it is busy")]), CpusSet),
    (guest.DeflateResult("r-1", "promised", {"memory_mib": 120.0}, 2.5, "", None), ApplicationPromise),
    (guest.DeflateResult("r-1", "refused", {}, 0.0, "at its minimum", 30.0), ApplicationPromise),
    (guest.DeflateResult("r-1", "none", {}, 0.0, "no adapter is registered", None), ApplicationPromise),
    (guest.ReinflateResult("r-1", "promised", ""), ApplicationPromise),
    (guest.ApplicationStatusResult("r-1", "released", {"memory_mib": 119.5}, "RSS", ""), ApplicationRelease),
    (guest.ApplicationStatusResult("r-1", "unknown", {}, "", "never heard of it"), ApplicationRelease),
    (guest.CallTrace(0.25, [guest.HookCall("shop", "target", 0.1, 0.05, 202)]), GuestTrace),
    (guest.CallTrace(0.25, [guest.HookCall("shop", "target", 0.1, 0.05, None)]), GuestTrace),
]


@pytest.mark.parametrize(("sample", "model"), SAMPLES)
def test_what_the_guest_agent_says_fits_the_schema(sample: Any, model: type[GuestBody]) -> None:
    said = json.loads(json.dumps(dataclasses.asdict(sample)))
    schema = model.model_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(said)
    heard = json.loads(model.model_validate_json(json.dumps(said)).model_dump_json())
    for name, value in said.items():
        if isinstance(value, dict):
            assert value.items() <= heard[name].items()
        else:
            assert heard[name] == value


@pytest.mark.parametrize(("sample", "model"), SAMPLES)
def test_every_field_that_the_host_needs_is_one_of_the_guests(sample: Any, model: type[GuestBody]) -> None:
    said = {field.name for field in dataclasses.fields(sample)}
    assert {name for name, field in model.model_fields.items() if field.is_required()} <= said
    if not isinstance(sample, guest.ReinflateResult):
        assert set(model.model_fields) == said


def test_both_sides_speak_the_same_version() -> None:
    assert guest.PROTOCOL == PROTOCOL


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("memory.unpluggable_mib", -1),
        ("memory.unpluggable_mib", float("nan")),
        ("memory.unpluggable_mib", float("inf")),
        ("memory.unpluggable_mib", 1e12),
        ("memory.unpluggable_mib", None),
        ("cpus.online", []),
        ("cpus.online", [-1]),
        ("cpus.online", ["x"]),
        ("cpus.online", [0] * 4097),
        ("cpus.unpluggable", [5000]),
        ("pressure.memory_some_avg10", float("nan")),
        ("pressure.memory_some_avg10", 101),
        ("pressure.memory_some_total_us", -1),
        ("pressure.memory_full_total_us", 2**64),
        ("major_faults", -1),
        ("swap_in_pages", 1.5),
        ("boot_id", "x" * 1001),
        ("applications", [{"name": "a", "resident_mib": 1}] * 65),
        ("uptime_s", -1),
    ],
)
def test_what_no_honest_guest_says_is_refused(path: str, value: Any) -> None:
    body = dataclasses.asdict(STATUS)
    *parents, last = path.split(".")
    inner = body
    for parent in parents:
        inner = inner[parent]
    inner[last] = value
    with pytest.raises(ValidationError) as caught:
        GuestStatus.model_validate_json(json.dumps(body))
    assert ".".join(map(str, caught.value.errors()[0]["loc"])).startswith(path)


def test_a_newer_guest_may_say_more() -> None:
    body = dataclasses.asdict(STATUS) | {"temperature": 60}
    assert GuestStatus.model_validate(body).boot_id == "4b1d"


def test_a_long_story_is_cut_and_its_promise_kept() -> None:
    """Reasons of several hooks are joined in the guest; that is no ground for throwing the answer away."""
    said = dataclasses.asdict(guest.DeflateResult("r-1", "promised", {"memory_mib": 120.0}, 2.5, "x" * 5000, None))
    heard = ApplicationPromise.model_validate(cleaned(said))
    assert heard.promised.memory_mib == 120
    assert len(heard.reason) == MAX_TEXT
    with pytest.raises(ValidationError):
        ApplicationPromise.model_validate(said | {"reason": 5})


def test_an_older_guest_says_less() -> None:
    body = dataclasses.asdict(STATUS)
    for newer in ("swap_in_pages", "swap_out_pages", "cold_blocked", "notice"):
        del body[newer]
    del body["memory"]["free_mib"]
    for newer in ("memory_some_total_us", "memory_full_total_us"):
        del body["pressure"][newer]
    heard = GuestStatus.model_validate(body)
    assert heard.swap_in_pages is None
    assert heard.notice == ""
    assert heard.pressure is not None
    assert heard.pressure.memory_some_total_us is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("memory_mib", -1), ("memory_mib", float("inf")), ("cpu_cores", 5000), ("reason", "x" * 201), ("reason", 5)],
)
def test_a_request_that_no_honest_guest_makes_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        RequestNotice.model_validate({"memory_mib": 1.0, field: value})


def test_an_agent_that_names_no_capabilities_is_greeted() -> None:
    said = {"protocol": PROTOCOL, "nonce": "f00d", "agent": "1.0", "boot_id": "4b1d"}
    assert Hello.model_validate(said).capabilities == []


MODELS = [Hello, GuestStatus, PressureNotice, RequestNotice, CpusSet, ApplicationPromise, ApplicationRelease]
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=12,
)


@runs()
@given(json_values, st.sampled_from(MODELS))
def test_no_answer_of_a_guest_raises_anything_but_a_validation_error(value: Any, model: type[GuestBody]) -> None:
    with contextlib.suppress(ValidationError):
        model.model_validate(value)
