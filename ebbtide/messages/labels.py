"""Labels of VMs and hosts, and selectors over them: the syntax and the limits of Kubernetes. Pure.

A key is a name of 1 to 63 letters, digits and ``- _ .``, a letter or digit first and last, with a DNS name and a slash
before it where it is somebody's own (``example.org/team``). A value is empty or such a name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

from pydantic import AfterValidator, Field

from ebbtide.deflation.errors import InvalidField
from ebbtide.messages.common import Body

#: Of one thing.
MOST_LABELS: Final = 64
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_PREFIX: Final = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*")
_KEY_WORDS: Final = (
    "must be 1 to 63 letters, digits and - _ . with a letter or digit first and last, after a DNS name and a slash "
    "where it has a prefix"
)
_VALUE_WORDS: Final = "must be empty, or up to 63 letters, digits and - _ . with a letter or digit first and last"
LABEL_WORDS: Final = "key=value pairs to choose by; keys and values as in Kubernetes"


def check_key(key: str, field: str) -> str:
    """:raises InvalidField: it can be no key."""
    prefix, slash, name = key.rpartition("/")
    if not _NAME.fullmatch(name) or (slash and not _PREFIX.fullmatch(prefix)):
        raise InvalidField(field, _KEY_WORDS)
    return key


def check_value(value: str, field: str) -> str:
    """:raises InvalidField: it can be no value."""
    if value and not _NAME.fullmatch(value):
        raise InvalidField(field, _VALUE_WORDS)
    return value


_Checked = TypeVar("_Checked", bound=Mapping[str, str | None])


def _checked(labels: _Checked) -> _Checked:
    for key, value in labels.items():
        # What can be no key is not repeated as a field's name.
        check_key(key, key if key.isprintable() and len(key) <= 320 else "a key")
        check_value(value or "", key)
    return labels


Labels = Annotated[dict[str, str], Field(max_length=MOST_LABELS), AfterValidator(_checked)]


class LabelsRequest(Body):
    """PATCH …/labels of the manager: labels to set and to take away; what is left out stays. Harmless when repeated."""

    labels: Annotated[dict[str, str | None], Field(max_length=2 * MOST_LABELS), AfterValidator(_checked)] = Field(
        description="a value sets the label, null takes it away"
    )

    def onto(self, labels: Mapping[str, str]) -> dict[str, str]:
        """The labels with these changes, by key.

        :raises InvalidField: there are too many.
        """
        merged = {**labels, **self.labels}
        kept = {key: value for key, value in sorted(merged.items()) if value is not None}
        if len(kept) > MOST_LABELS:
            raise InvalidField("labels", f"would be {len(kept)}: {MOST_LABELS} are the most")
        return kept


@dataclass(frozen=True, slots=True)
class Requirement:
    """One condition of a selector.

    :param values: None: any, the key need only be there.
    :param negated: it must not be so. A thing without the key has none of the values.
    """

    key: str
    values: frozenset[str] | None
    negated: bool = False

    def matches(self, labels: Mapping[str, str]) -> bool:
        has = self.key in labels and (self.values is None or labels[self.key] in self.values)
        return has is not self.negated


Selector = tuple[Requirement, ...]

_SET: Final = re.compile(r"(?P<key>\S+)\s+(?P<word>in|notin)\s*\((?P<values>[^()]*)\)")
_EQUAL: Final = re.compile(r"(?P<key>[^=!\s]+)\s*(?P<word>==|=|!=)\s*(?P<value>[^=!\s]*)")


def selector_of(text: str, field: str = "selector") -> Selector:
    """A selector: conditions with commas between them, all of which must be so.

    ``env=prod``, ``env!=prod``, ``env in (prod,test)``, ``env notin (prod)``, ``env``, ``!env``.

    :raises InvalidField: it is none.
    """
    found = []
    for part in re.split(r",(?![^(]*\))", text):
        part = part.strip()
        if (match := _SET.fullmatch(part)) is not None:
            values = [value.strip() for value in match["values"].split(",")]
        elif (match := _EQUAL.fullmatch(part)) is not None:
            values = [match["value"]]
        else:
            key = part.removeprefix("!").strip()
            found.append(Requirement(check_key(key, field), None, part.startswith("!")))
            continue
        checked = frozenset(check_value(value, field) for value in values)
        found.append(Requirement(check_key(match["key"], field), checked, match["word"] in ("notin", "!=")))
    return tuple(found)


def matches(selector: Selector, labels: Mapping[str, str]) -> bool:
    """Whether a thing with these labels is chosen."""
    return all(requirement.matches(labels) for requirement in selector)


def changes_of(words: list[str], field: str = "LABEL") -> dict[str, str | None]:
    """Changes as they are typed: ``key=value`` sets one, ``key-`` takes it away.

    :raises InvalidField: one is neither, or names a key once more.
    """
    found: dict[str, str | None] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals and not word.endswith("-"):
            raise InvalidField(field, f"{word!r} must be like key=value, or key- to take it away")
        if (key := check_key(key if equals else word[:-1], field)) in found:
            raise InvalidField(field, f"{key} is named twice")
        found[key] = check_value(value, field) if equals else None
    return found
