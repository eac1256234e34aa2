"""Rule of compatibility within v1: what of an earlier OpenAPI document a later one would break.

What clients send may become wider and what they are answered may grow; nothing that they rely on goes. Words of an enum
may come: a client takes one that it does not know as it comes (docs/reference/rest.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
#: Limits of what is sent: which way each is wider.
_LOWER, _UPPER = ("minimum", "exclusiveMinimum", "minLength", "minItems"), ("maximum", "maxLength", "maxItems")


def broken(before: Schema, now: Schema) -> list[str]:
    """What breaks clients that were made for the document before; empty: nothing."""
    return sorted(set(_broken(before, now)))


def _broken(before: Schema, now: Schema) -> Iterator[str]:
    for path, methods in before["paths"].items():
        for method, earlier in methods.items():
            where = f"{method.upper()} {path}"
            later = now["paths"].get(path, {}).get(method)
            if later is None:
                yield f"{where} is gone"
                continue
            yield from _parameters(where, earlier, later)
            yield from _bodies(where, before, earlier, now, later)
            for status, answer in earlier["responses"].items():
                given = later["responses"].get(status)
                if given is None:
                    yield f"{where}: {status} is gone"
                    continue
                for name in answer.get("headers", {}).keys() - given.get("headers", {}).keys():
                    yield f"{where}: {status}: the header {name} is gone"
                for kind, content in answer.get("content", {}).items():
                    if kind not in given.get("content", {}):
                        yield f"{where}: {status} is no {kind} any more"
                        continue
                    compared = Compared(before, now, asked=False)
                    yield from compared.schemas(
                        f"{where}: {status}", content["schema"], given["content"][kind]["schema"]
                    )


def _parameters(where: str, earlier: Schema, later: Schema) -> Iterator[str]:
    known = {(one["in"], one["name"]): one for one in earlier.get("parameters", ())}
    given = {(one["in"], one["name"]): one for one in later.get("parameters", ())}
    for key, one in given.items():
        if one["required"] and not known.get(key, {"required": False})["required"]:
            yield f"{where}: {key[1]} is required now"
    for key, one in known.items():
        if key not in given:
            yield f"{where}: {key[1]} is gone"
        else:
            yield from Compared({}, {}, asked=True).schemas(f"{where}: {key[1]}", one["schema"], given[key]["schema"])
            if one["schema"].get("default") != given[key]["schema"].get("default"):
                yield f"{where}: {key[1]} has another default"


def _bodies(where: str, before: Schema, earlier: Schema, now: Schema, later: Schema) -> Iterator[str]:
    sent, taken = earlier.get("requestBody"), later.get("requestBody")
    if sent is None:
        if taken is not None and taken["required"]:
            yield f"{where} needs a body now"
        return
    for kind, content in sent["content"].items():
        if taken is None or kind not in taken["content"]:
            yield f"{where} takes no {kind} any more"
        else:
            compared = Compared(before, now, asked=True)
            yield from compared.schemas(f"{where}: body", content["schema"], taken["content"][kind]["schema"])


class Compared:
    """Schemas of two documents.

    :param asked: of what clients send; else of what they are answered.
    """

    def __init__(self, before: Schema, now: Schema, asked: bool) -> None:
        self._before = before
        self._now = now
        self._asked = asked
        self._seen: set[tuple[str, str]] = set()

    def schemas(self, where: str, earlier: Schema, later: Schema) -> Iterator[str]:
        """What breaks."""
        pair = str(earlier.get("$ref", "")), str(later.get("$ref", ""))
        if all(pair):
            if pair in self._seen:
                return
            self._seen.add(pair)
            where = pair[0].rpartition("/")[2]
        earlier, later = _resolved(self._before, earlier), _resolved(self._now, later)
        yield from self._kinds(where, earlier, later)
        yield from self._words(where, earlier, later)
        if self._asked:
            yield from _limits(where, earlier, later)
        yield from self._properties(where, earlier, later)
        if "items" in earlier and "items" in later:
            yield from self.schemas(f"{where}[]", earlier["items"], later["items"])
        for one, other in zip(_forms(self._before, earlier), _forms(self._now, later), strict=False):
            yield from self.schemas(where, one, other)

    def _kinds(self, where: str, earlier: Schema, later: Schema) -> Iterator[str]:
        """The types of values: those sent may become more, those answered fewer."""
        was, now = _types(self._before, earlier), _types(self._now, later)
        if lost := (was - now if self._asked else now - was):
            yield f"{where}: {'no longer' if self._asked else 'now'} {', '.join(sorted(lost))}"

    def _words(self, where: str, earlier: Schema, later: Schema) -> Iterator[str]:
        was, now = earlier.get("enum"), later.get("enum")
        if self._asked and now is not None and (was is None or set(was) - set(now)):
            yield f"{where}: takes fewer words"
        if not self._asked and was is not None and now is not None and set(was) - set(now):
            yield f"{where}: words are gone: {', '.join(sorted(set(was) - set(now)))}"

    def _properties(self, where: str, earlier: Schema, later: Schema) -> Iterator[str]:
        was, now = earlier.get("properties", {}), later.get("properties", {})
        needed, given = set(earlier.get("required", ())), set(later.get("required", ()))
        for name in was.keys() - now.keys():
            yield f"{where}.{name} is gone"
        for name in sorted(given - needed if self._asked else needed - given):
            yield f"{where}.{name} is {'required now' if self._asked else 'no longer always there'}"
        for name in was.keys() & now.keys():
            yield from self.schemas(f"{where}.{name}", was[name], now[name])
            if self._asked and was[name].get("default") != now[name].get("default"):
                yield f"{where}.{name} has another default"


def _limits(where: str, earlier: Schema, later: Schema) -> Iterator[str]:
    for name in _LOWER:
        if name in later and (name not in earlier or later[name] > earlier[name]):
            yield f"{where}: {name} is higher"
    for name in _UPPER:
        if name in later and (name not in earlier or later[name] < earlier[name]):
            yield f"{where}: {name} is lower"
    if "pattern" in later and later["pattern"] != earlier.get("pattern"):
        yield f"{where}: another pattern"


def _resolved(document: Schema, schema: Schema) -> Schema:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def _forms(document: Schema, schema: Schema) -> list[Schema]:
    """The alternatives of a schema but for null."""
    return [form for form in schema.get("anyOf", ()) if _resolved(document, form).get("type") != "null"]


def _types(document: Schema, schema: Schema) -> set[str]:
    if "anyOf" in schema:
        return {kind for form in schema["anyOf"] for kind in _types(document, _resolved(document, form))}
    kind = schema.get("type")
    # Every whole number is a number.
    return {"any"} if kind is None else {kind}
