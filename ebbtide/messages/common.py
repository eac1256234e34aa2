"""Bodies and field types that the others are made of: a body, a resource vector, a problem, a page.

Names carry units. A ``target`` is always the size to reach, never an amount; amounts stand only in ledgers and needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema, from_json

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.problem_codes import PROBLEMS, ProblemCode, code_of

NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"
Name = Annotated[str, Field(pattern=NAME_PATTERN, description="lower-case letters, digits and hyphens, 1 to 40")]
#: Nothing that libvirt would run a command for (``command=``, ``+ext``, ``+ssh``): a host is not to have another one's.
_LIBVIRT_UNIX: Final = r"unix:///system\?socket=/[A-Za-z0-9._/-]{1,200}"
_LIBVIRT_TLS: Final = r"tls://[A-Za-z0-9.-]{1,253}/system"
LibvirtUri = Annotated[str, Field(pattern=rf"^qemu\+({_LIBVIRT_UNIX}|{_LIBVIRT_TLS})$")]
#: No point first: it stands in paths, where ".." is another one.
REQUEST_ID_PATTERN = r"^[A-Za-z0-9_:-][A-Za-z0-9._:-]{0,79}$"
DOMAIN_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,127}$"
#: What people read in the place of a regular expression.
_PATTERN_WORDS: Final = {
    NAME_PATTERN: "must be 1 to 40 lower-case letters, digits and hyphens, with no hyphen first or last",
    REQUEST_ID_PATTERN: "must be 1 to 80 letters, digits and . _ : -, with no . first",
    DOMAIN_NAME_PATTERN: "must be 1 to 128 letters, digits and . _ + -, with a letter or digit first",
}
RequestId = Annotated[str, Field(pattern=REQUEST_ID_PATTERN, description="makes a repeated request harmless")]
Seconds = Annotated[
    float,
    Field(
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        strict=True,
        description="by when it is to have ended, seconds from now; what has not been done by then falls short",
    ),
]
Amount = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False, strict=True)]
#: The most that one VM or host has of anything; sums over `MOST_VMS` still are an `Amount`.
MOST: Final = 1e9
#: A report is no longer than 256 KiB, which hold fewer.
MOST_VMS: Final = 1000
#: No VM has more vCPUs; each is an element of its domain, whether it is plugged or not.
MOST_CORES: Final = 4096
#: The largest whole number that any JSON parser keeps exactly; databases hold it too.
LARGEST: Final = 2**53
StopSeconds = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False, strict=True)]
DomainName = Annotated[str, Field(pattern=DOMAIN_NAME_PATTERN, description="the domain's name in libvirt")]
DryRun = Annotated[bool, Field(strict=True, description="say what would be done and change nothing")]


#: A scheme, a host and a port: no path, query, fragment or credentials, which would go along with every call.
Address = Annotated[
    str,
    Field(
        pattern=r"^https?://(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?)"
        r"(:(6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3}))?$"
    ),
]


#: What the modes of a deflation are.
MODE_WORDS: Final = "ask: applications may say no; force: what they do not give is taken all the same"
#: Characters of a sentence of another daemon.
LONGEST: Final = 4000


def cleaned_text(text: str, most: int = LONGEST) -> str:
    """At most so many characters, all printable: lone surrogates and NUL cannot be stored, control characters and
    changes of direction make a terminal show what is not there. A long one is cut: no reason to refuse the rest.
    """
    text = text[:most]
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)


#: Beyond these a body's errors are only counted.
_MOST_ERRORS: Final = 1000
_T = TypeVar("_T")
#: Of one host: not more than it may have VMs, and the first bad one ends the reading.
Rows: TypeAlias = Annotated[tuple[_T, ...], FailFast(), Field(max_length=MOST_VMS)]


#: What a daemon says in words, cleaned wherever it comes in: a host may have been taken over.
Sentence = Annotated[str, AfterValidator(cleaned_text)]


#: What a word is read as that no enum of this version has, by its field, its enum and the word; None: as it was sent.
#: Bodies of a later version are validated with one as their context; without it an unknown word is an error.
WordReader = Callable[[str, Any, str], StrEnum | None]
#: Characters of a word of another daemon.
_LONGEST_WORD: Final = 64


def as_sent(field: str, kind: Any, word: str) -> None:
    """The `WordReader` of those who only show what they read."""


def is_known(word: StrEnum) -> bool:
    """Whether this version has a word, or a later one has sent it."""
    return word.value in type(word)._value2member_map_


class _OpenWord:
    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def read(value: Any, known: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
            try:
                return known(value)
            except ValidationError:
                if info.context is None or not isinstance(value, str):
                    raise
                word = cleaned_text(value, _LONGEST_WORD)
                return info.context(info.field_name, source, word) or _unknown_member(source, word)

        # An enum's own serializer warns of what it does not know.
        as_is = core_schema.simple_ser_schema("any")
        return core_schema.with_info_wrap_validator_function(read, handler(source), serialization=as_is)


def _unknown_member(kind: Any, word: str) -> str:
    """A member of an enum beside those that it has; of a `Literal` it is the word itself."""
    if not isinstance(kind, type):
        return word
    member: StrEnum = str.__new__(kind, word)
    member._name_ = member._value_ = word
    return member


#: An enum, or a `Literal` of words, in answers and reports: later versions have more of them.
Open: TypeAlias = Annotated[_T, _OpenWord()]


class Body(BaseModel):
    """Base of all bodies: unknown fields are refused, values cannot be changed after the check, numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class Vector(Body):
    """A resource vector; what is left out is 0."""

    cpu_cores: Amount = Field(0.0, description="cores, in steps of 0.01")
    memory_mib: Amount = Field(0.0, description="MiB")
    disk_mib_s: Amount = Field(0.0, description="MiB/s of its disk; 0: not limited, or not declared")
    network_mib_s: Amount = Field(0.0, description="MiB/s of its network; 0: not limited, or not declared")

    @classmethod
    def of(cls, vector: ResourceVector) -> Self:
        return cls(**{name: round(value, 6) for name, value in vector.as_dict().items()})

    def vector(self) -> ResourceVector:
        return ResourceVector(self.cpu_cores, self.memory_mib, self.disk_mib_s, self.network_mib_s)


def _of_one(size: Vector) -> Vector:
    for component, value in size.__dict__.items():
        if value > MOST:
            raise InvalidField(component, f"must be at most {MOST:g}")
    return size


#: What one VM or host has.
Size = Annotated[Vector, AfterValidator(_of_one)]


class PartialVector(Body):
    """Components to change; what is left out stays."""

    cpu_cores: Amount | None = Field(None, description="cores; left out: it is not concerned")
    memory_mib: Amount | None = Field(None, description="MiB; left out: it is not concerned")
    disk_mib_s: Amount | None = Field(None, description="MiB/s of its disk; left out: it is not concerned")
    network_mib_s: Amount | None = Field(None, description="MiB/s of its network; left out: it is not concerned")

    def onto(self, vector: Vector) -> Vector:
        """The vector with these components."""
        return vector.model_copy(update=self.model_dump(exclude_none=True))

    def size_of(self, vm: Allocation) -> ResourceVector:
        """The size of a VM with these components; what is left out keeps its size, as far as the VM may have it."""
        lowest = vm.nominal if vm.priority is Priority.FIXED else vm.minimum
        kept = vm.current.larger(lowest).smaller(vm.upper)
        return ResourceVector.of({**kept.as_dict(), **self.model_dump(exclude_none=True)})


def no_switch(value: Any, name: str = "") -> Any:
    """A value that is no truth value, which would be read as 0 or 1. Raises ValueError."""
    if isinstance(value, bool):
        raise ValueError(f"{name} must not be true or false".lstrip())
    return value


def _as_parts(value: Any) -> Any:
    return value.model_dump() if isinstance(value, Vector) else value


def _of_something(parts: PartialVector) -> PartialVector:
    if not parts.model_dump(exclude_none=True):
        raise PydanticCustomError("empty", "must name at least one component")
    return parts


#: What a target may be made from, too: a whole vector. One of nothing would hold a VM at the size that it has.
Target = Annotated[PartialVector, BeforeValidator(_as_parts), AfterValidator(_of_something)]


class FieldProblem(Body):
    """One field that is wrong."""

    field: str = Field(description="its path in the body, with points, or the parameter or header")
    code: Open[Literal["missing", "unknown", "invalid"]] = Field("invalid", description="what is the matter with it")
    detail: Sentence = Field(description="one sentence that says what is wrong")


class Problem(Body):
    """What every 4xx and 5xx answers: problem details (RFC 9457)."""

    type: str = Field(description="a URN that ends in the code")
    title: str = Field(description="the same for every problem of this code")
    status: int = Field(description="the HTTP status")
    detail: Sentence = Field(description="what is wrong, in a sentence or more")
    instance: str | None = Field(None, description="a URN that ends in the request's X-Request-Id")
    code: ProblemCode = Field(description="what it is about; later versions have more codes")
    field: str | None = Field(None, description="the first field that is wrong, where there is one")
    errors: tuple[FieldProblem, ...] = Field((), description="all fields that are wrong, 100 at the most")

    @classmethod
    def of(
        cls,
        status: int,
        detail: str,
        field: str | None = None,
        code: ProblemCode | None = None,
        errors: tuple[FieldProblem, ...] = (),
    ) -> Self:
        """A problem; ``code``: default by the status."""
        code = code or code_of(status)
        if field is not None and not errors:
            errors = (FieldProblem(field=field, detail=detail),)
        return cls(
            type=f"urn:ebbtide:problem:{code}",
            title=PROBLEMS[code][1],
            status=status,
            detail=detail,
            code=code,
            field=field,
            errors=errors,
        )


class EarlierProblem(Body):
    """The same in the words of version 0.1."""

    error: Sentence
    field: str | None = None


def problem_in(status: int, raw: bytes | str) -> Problem | None:
    """The problem in an answer of this version, of a later one, or of 0.1; None: it holds none."""
    with contextlib.suppress(ValidationError):
        earlier = EarlierProblem.model_validate_json(raw, extra="ignore")
        unknown = earlier.field is not None and earlier.error.endswith(_UNKNOWN)
        errors = (FieldProblem(field=earlier.field, code="unknown", detail=earlier.error),) if unknown else ()
        return Problem.of(status, earlier.error, earlier.field, errors=errors)
    try:
        found: Any = from_json(raw)
        if isinstance(found, dict) and found.get("code") not in list(ProblemCode):
            found["code"] = code_of(status)
        return Problem.model_validate(found, extra="ignore", strict=False, context=as_sent)
    except (ValidationError, ValueError):
        return None


#: Fields that are told of at once.
_MOST_TOLD: Final = 100
#: How pydantic ends the sentence for a field that it does not know.
_UNKNOWN: Final = ": extra inputs are not permitted"
_KINDS: Final[dict[str, Literal["missing", "unknown"]]] = {"missing": "missing", "extra_forbidden": "unknown"}


def problem_of(error: ValidationError | InvalidField) -> Problem:
    """400 with all fields that do not fit, and the sentences about the first of them."""
    if isinstance(error, InvalidField):
        return Problem.of(400, str(error), error.field)
    if (count := error.error_count()) > _MOST_ERRORS:
        # Each is written out before one can be looked at.
        return Problem.of(400, f"the body is wrong in {count} places")
    found = [_told(row) for row in error.errors(include_url=False)[:_MOST_TOLD]]
    # One value of a union is told of once for each of its kinds.
    first = list({told.field: told.detail for told in reversed(found)}.values())[::-1]
    more = f"; and {len(first) - _MOST_SAID} more" if len(first) > _MOST_SAID else ""
    said = "; ".join(first[:_MOST_SAID]) + more
    return Problem.of(400, said, found[0].field or None, errors=tuple(told for told in found if told.field))


#: Sentences about fields in one detail.
_MOST_SAID: Final = 3


def _told(row: Any) -> FieldProblem:
    cause = row.get("ctx", {}).get("error")
    path = ".".join(str(part) for part in row["loc"])
    if isinstance(cause, InvalidField):
        field = f"{path}.{cause.field}" if path else cause.field
        return FieldProblem(field=field, detail=f"{field} {cause.problem}")
    if row["type"] == "string_pattern_mismatch":
        words = _PATTERN_WORDS.get(row["ctx"]["pattern"], "has characters that are not allowed there, or is too long")
        return FieldProblem(field=path, detail=f"{path or 'the body'} {words}")
    message = row["msg"][:1].lower() + row["msg"][1:]
    return FieldProblem(field=path, code=_KINDS.get(row["type"], "invalid"), detail=f"{path or 'the body'}: {message}")


class Health(Body):
    """The server runs."""

    status: Literal["ok"] = Field("ok", description="always this word")
    version: str = Field("", description="of Ebbtide")


class Page(Body):
    """Base of all pages."""

    next: str | None = Field(None, description="`after` of the next page; null: this is the last")


class WatchedPage(Page):
    """Base of the manager's pages of what its events are about."""

    position: int = Field(
        0, description="the latest event before this was read: a stream from there (`since_id`) misses no change of it"
    )


class ChangingPage(WatchedPage):
    """Base of the pages of lists that can be asked for by what has changed."""

    changes: int = Field(0, description="`changed_since` of the next question, which then gets what is new since this")
    changed_since: int | None = Field(
        None, description="only what has changed since then is in it; null: it is the whole list, take it for all"
    )
    gone: tuple[str, ...] = Field((), description="with changed_since: which are in the list no more")
