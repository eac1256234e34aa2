"""Strategies of hypothesis: bodies that fit a JSON Schema, such with one part replaced, and garbage."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

#: Values that parsers and databases stumble over.
ODD: st.SearchStrategy[Any] = st.sampled_from(
    [
        None, True, 0, -1, 1, 2**31, 2**53, 2**53 + 1, 2**64, -(2**63), 10**400, 0.1, -0.0, 1e308, 5e-324, "", "\x00",
        "\ud800", "../..", "a" * 5000, "host-b", "low-b", "low-c", [], {}, [[]], {"": {}}, ["x"] * 300,
    ]
)  # fmt: skip
JUNK = ODD | st.text(max_size=30) | st.integers() | st.floats() | st.lists(ODD, max_size=3)
_MOST = 3


def fitting(schema: dict[str, Any], definitions: dict[str, Any] | None = None) -> st.SearchStrategy[Any]:
    """Values that fit a schema as pydantic writes it."""
    definitions = schema.get("$defs", {}) if definitions is None else definitions
    if "$ref" in schema:
        return fitting(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema:
        return st.one_of([fitting(one, definitions) for one in schema["anyOf"]])
    kind = schema.get("type")
    if kind == "object":
        properties = {name: fitting(one, definitions) for name, one in schema.get("properties", {}).items()}
        needed = {name: properties.pop(name) for name in schema.get("required", ())}
        return st.fixed_dictionaries(needed, optional=properties)
    if kind == "array":
        return st.lists(fitting(schema.get("items", {}), definitions), max_size=_MOST)
    if kind == "string":
        if "pattern" in schema:
            return st.from_regex(schema["pattern"].replace("$", r"\Z"))
        return st.text(max_size=min(schema.get("maxLength", 40), 40))
    if kind in ("integer", "number"):
        low, high = schema.get("minimum", -(10**6)), schema.get("maximum", 10**6)
        return st.integers(int(low), int(high)) if kind == "integer" else st.floats(low, high, allow_nan=False)
    return {"boolean": st.booleans(), "null": st.none()}.get(str(kind), ODD)


@st.composite
def spoilt(draw: st.DrawFn, bodies: st.SearchStrategy[Any]) -> Any:
    """A body with one part, anywhere, that is something else."""
    body = json.loads(json.dumps(draw(bodies)))
    at, inside = body, body
    while isinstance(inside, dict | list) and inside:
        at, key = inside, draw(st.sampled_from(list(inside) if isinstance(inside, dict) else range(len(inside))))
        inside = at[key]
        if draw(st.booleans()):
            break
    else:
        if not isinstance(at, dict | list) or not at:
            return draw(JUNK)
    at[key] = draw(JUNK)
    return body


def bytes_of(body: Any) -> bytes:
    """JSON as careless programs write it: NaN, lone surrogates."""
    return json.dumps(body).encode()
