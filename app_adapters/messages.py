"""Bodies of the application hook, version 1.

Sizes and amounts are vectors: `memory_mib` is resident MiB, `cpu_cores` the cores that the application is set up for.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from app_adapters.errors import BadBody

COMPONENTS = ("memory_mib", "cpu_cores")
MODES = ("ask", "force")
DIRECTIONS = ("deflate", "reinflate")
#: What becomes of a VM that is preempted; or its notice is over.
WITHDRAWN = "withdrawn"
KINDS = ("stop", "suspend", "delete", WITHDRAWN)
DEADLINE_LIMIT_S = 86400.0


@dataclass
class SizeRange:
    """Sizes of one component that the application can have, in its unit."""

    current: float
    minimum: float
    maximum: float
    step: float


@dataclass
class Capabilities:
    """GET /deflation/v1/capabilities: what the application offers."""

    name: str
    version: str
    resources: dict[str, SizeRange]
    expected_s: float
    reversible: bool
    modes: list[str]


@dataclass
class TargetRequest:
    """POST /deflation/v1/targets: a size to reach."""

    request_id: str
    deadline_s: float
    mode: str
    direction: str
    target: dict[str, float]
    reason: str


@dataclass
class PromiseBody:
    """202: the amount that will be released, in about `expected_s` seconds."""

    request_id: str
    state: str
    promised: dict[str, float]
    expected_s: float
    reason: str


@dataclass
class RefusalBody:
    """409: the application keeps what it has; `floor` is the least it could do with, where it says so.

    A reinflation without `retry_after_s` is refused for good.
    """

    request_id: str
    state: str
    reason: str
    retry_after_s: float | None
    floor: dict[str, float]


@dataclass
class TargetStatus:
    """GET /deflation/v1/targets/ID. `state`: running, released or failed; `released` is measured."""

    request_id: str
    state: str
    released: dict[str, float]
    measured_by: str
    reason: str


@dataclass
class PreemptionNotice:
    """POST /deflation/v1/preemptions: the VM goes in so many seconds; null: it stays after all."""

    request_id: str
    seconds_left: float | None
    kind: str
    reason: str


def reject_constant(name: str) -> Any:
    """NaN and the infinities, which Python's JSON would let through. Raises: ValueError."""
    raise ValueError(f"{name} is not JSON")


def parse_target(text: bytes) -> TargetRequest:
    """A checked body of POST /deflation/v1/targets.

    Raises: BadBody, which names the field.
    """
    body, request_id = _object(text)
    deadline_s = _amount(body, "deadline_s")
    if not 0 < deadline_s <= DEADLINE_LIMIT_S:
        raise BadBody("deadline_s", f"must be more than 0 and at most {DEADLINE_LIMIT_S:g}")
    target = body.get("target")
    if not isinstance(target, dict) or not target or not set(target) <= set(COMPONENTS):
        raise BadBody("target", f"must be an object with {' or '.join(COMPONENTS)}, or both, and nothing else")
    return TargetRequest(
        request_id=request_id,
        deadline_s=deadline_s,
        mode=_choice(body, "mode", MODES),
        direction=_choice(body, "direction", DIRECTIONS),
        target={name: _amount(target, name, f"target.{name}") for name in target},
        reason=_reason(body),
    )


def parse_preemption(text: bytes) -> PreemptionNotice:
    """A checked body of POST /deflation/v1/preemptions.

    Raises: BadBody, which names the field.
    """
    body, request_id = _object(text)
    seconds_left = None if body.get("seconds_left") is None else _amount(body, "seconds_left")
    kind = _choice(body, "kind", KINDS)
    if (seconds_left is None) != (kind == WITHDRAWN):
        raise BadBody("seconds_left", f"is null where kind is {WITHDRAWN}, and nowhere else")
    return PreemptionNotice(request_id, seconds_left, kind, _reason(body))


def _object(text: bytes) -> tuple[dict[str, Any], str]:
    """A body and the request that it is about. Raises: BadBody."""
    try:
        body = json.loads(text.decode("utf-8"), parse_constant=reject_constant)
    except (ValueError, RecursionError) as error:
        raise BadBody("body", f"is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadBody("body", "must be an object")
    request_id = body.get("request_id")
    if not isinstance(request_id, str) or not 0 < len(request_id) <= 256 or not request_id.isprintable():
        raise BadBody("request_id", "must be a string of 1 to 256 printable characters")
    return body, request_id


def _reason(body: dict[str, Any]) -> str:
    reason = body.get("reason", "")
    if not isinstance(reason, str):
        raise BadBody("reason", "must be a string")
    return reason


def _amount(body: dict[str, Any], key: str, field: str = "") -> float:
    value = body.get(key)
    try:
        if not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value) and value >= 0:
            return float(value)
    except OverflowError:  # an integer beyond every float
        pass
    raise BadBody(field or key, "must be a finite number >= 0")


def _choice(body: dict[str, Any], field: str, choices: tuple[str, ...]) -> str:
    value = body.get(field)
    if not isinstance(value, str) or value not in choices:
        raise BadBody(field, f"must be one of {', '.join(choices)}")
    return value
