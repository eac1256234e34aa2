"""Options of a daemon: one model each, read from its command line, its environment and a TOML file, in this order.

Keys of the file and names of the environment are the options' own: ``--token-file`` is ``token_file`` in
``/etc/ebbtide/manager.toml`` and ``EBB_MANAGER_TOKEN_FILE``. What is wrong is named as it was given.
"""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Generic, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails, PydanticUndefined
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from ebbtide.messages.common import cleaned_text, no_switch
from ebbtide.rest.errors import OptionsError
from ebbtide.rest.rates import ConnectionLimits, Rates

_LIMITS = ConnectionLimits()


def settings_config(program: str) -> SettingsConfigDict:
    """How pydantic-settings reads the options of a program (``ebb-manager``)."""
    return SettingsConfigDict(
        env_prefix=f"{program.replace('-', '_').upper()}_",
        extra="forbid",
        frozen=True,
        # Words of an option are texts: "3" is a number there, as in the environment. In a file it is one as well.
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_enforce_required=False,
    )


def _words(value: Any) -> Any:
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value


#: An option that may be given again; in the environment with commas, in the file as an array.
Texts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words)]
Paths = Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_words)]


class DaemonOptions(BaseSettings):
    """Options that both daemons have: who may call, and how much."""

    #: The program, and its file.
    program: ClassVar[str]
    file: ClassVar[Path]

    tokens_file: Path | None = Field(None, description="TOML: more tokens, with roles; see `ebb token new --help`")
    tls_certificate: Path | None = Field(None, description="PEM, with its chain: serve HTTPS")
    tls_key: Path | None = Field(None, description="PEM, the key of --tls-certificate")
    client_ca: Path | None = Field(None, description="PEM: mutual TLS between manager and agents, signed by it")
    requests_per_s: float = Field(Rates().people.per_s, description="requests of one token a second")
    burst: float = Field(Rates().people.burst, description="requests of one token at once")
    reports_per_s: float = Field(Rates().agents.per_s, description="reports of one host agent a second")
    connections: int = Field(_LIMITS.in_all, description="connections that are open at a time")
    connections_per_address: int = Field(_LIMITS.per_address, description="of those, from one address")
    idle_timeout_s: float = Field(_LIMITS.idle_s, description="seconds for the head of a request")
    body_timeout_s: float = Field(10.0, description="seconds for the body of a request")
    metrics_port: Annotated[int, Field(ge=0, le=65_535)] | None = Field(
        None,
        description="answer GET /metrics on this port of 127.0.0.1, too, without a token; 0 takes a free one; "
        "default: only where all is served, with a token of the role metrics",
    )
    tracing: bool = Field(
        False,
        description="send OpenTelemetry spans of operations, where OTEL_EXPORTER_OTLP_ENDPOINT says (needs the extra "
        "otel; docs/reference/tracing.md)",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="the least that is logged")
    log_json: bool = Field(False, description="log lines as JSON, not as key=value")

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch(cls, value: Any, info: ValidationInfo) -> Any:
        """`false` for a number means "off" to who writes it, and would be 0."""
        return value if cls.model_fields[str(info.field_name)].annotation is bool else no_switch(value)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What `read_options` has put together, and nothing else."""
        return (init_settings,)


#: A file name in it may be long.
LONGEST_SENTENCE: Final = 500

O = TypeVar("O", bound=DaemonOptions)  # noqa: E741


@dataclass(frozen=True)
class Given(Generic[O]):
    """The options, and where each of them that was given comes from.

    :param origins: by name of the field: ``--listen``, ``EBB_MANAGER_LISTEN`` or ``manager.toml:3: listen``.
    """

    options: O
    origins: Mapping[str, str] = field(default_factory=dict)
    #: Reads them again, from the same places. Raises OptionsError.
    again: Callable[[], Given[O]] | None = None

    def said(self, sentence: str) -> str:
        """A sentence on options, which begins with where the first of them that was given stands.

        One that names none is about the file that it names.
        """
        named = [word.replace("-", "_") for word in re.findall(r"--([a-z-]+)", sentence)]
        origins = [self.origins[name] for name in named if name in self.origins]
        if not origins:
            values = {name: getattr(self.options, name) for name in self.origins}
            origins = [self.origins[name] for name in _whose_value_is_in(sentence, values)[:1]]
        sentence = cleaned_text(sentence, LONGEST_SENTENCE)
        origin = next((origin for origin in origins if not origin.startswith("--")), None)
        return sentence if origin is None else f"{origin}: {sentence}"


def _whose_value_is_in(sentence: str, values: Mapping[str, Any]) -> list[str]:
    """The options whose address is in a sentence as the error of one that is taken has it; else those whose path or
    URL is, the longest first. Numbers and words are there by chance.
    """

    def has(form: str) -> bool:
        return re.search(rf"(?<!\w){re.escape(form)}(?!\w)", sentence) is not None

    texts = {name: f"127.0.0.1:{value}" if name == "metrics_port" else str(value) for name, value in values.items()}
    places = {name: text.rpartition(":") for name, text in texts.items()}
    if taken := [name for name, (host, _, port) in places.items() if has(f"('{host.strip('[]')}', {port}")]:
        return taken
    whole = [name for name, text in texts.items() if isinstance(values[name], Path) or set(text) & set("/:")]
    # A short one, like ".", counts where an error has what it is of: quoted, or ahead of a colon.
    of_it = {name: rf"(?<![^\s'\"]){re.escape(texts[name])}(?=[:'\"])" for name in whole}
    found = [name for name in whole if (len(texts[name]) > 3 and has(texts[name])) or re.search(of_it[name], sentence)]
    return sorted(found, key=lambda name: len(texts[name]), reverse=True)


def given_by(model: type[O], values: Mapping[str, Any], origins: Mapping[str, str]) -> Given[O]:
    """The options that these values make.

    :raises OptionsError: one sentence a line, each of which begins with where its option stands.
    """
    # By exactly these names: pydantic-settings would take Listen for listen.
    known = {name: value for name, value in values.items() if name in model.model_fields}
    wrong = [f"{origins[name]}: there is no such option" for name in values if name not in known]
    try:
        options = model(**known)
    except ValidationError as error:
        raise OptionsError("\n".join([*_sentences(error.errors(), origins), *wrong])) from None
    if wrong:
        raise OptionsError("\n".join(wrong))
    return Given(options, origins)


def _sentences(errors: Sequence[ErrorDetails], origins: Mapping[str, str]) -> Iterator[str]:
    for error in errors:
        name = str(error["loc"][0]) if error["loc"] else ""
        if error["type"] == "missing":
            yield f"--{name.replace('_', '-')} is missing"
            continue
        origin = origins.get(name, name)
        said = error["msg"].removeprefix("Value error, ")
        yield f"{origin}: {said[0].lower()}{said[1:]}, but is {repr(error['input'])[:80]}"


def read_options(model: type[O], arguments: Sequence[str] | None, description: str, epilog: str) -> Given[O]:
    """Read a daemon's options. ``--help``, ``--version`` and a wrong call end the process, as with argparse.

    :param arguments: None: those of this process.
    :raises OptionsError: what a file, the environment or the command line says cannot be.
    """
    parser, cli = parser_of(model, description, epilog)
    named = vars(parser.parse_args(arguments))
    path: Path | None = named.pop("config")
    return collect(model, path, cli(parsed_args=named)())


def collect(model: type[O], path: Path | None, words: Mapping[str, Any]) -> Given[O]:
    """A daemon's options by its file, the environment and its command line.

    :param path: None: the file that the environment names, or the usual one if it is there.
    :param words: what the command line says.
    :raises OptionsError: what one of them says cannot be.
    """
    prefix, asked_for = str(model.model_config["env_prefix"]), path
    if path is None and (asked := os.environ.get(f"{prefix}CONFIG")):
        path = Path(asked)
    if path is None and model.file.exists():
        path = model.file
    in_file, lines = read_file(path) if path is not None else ({}, {})
    in_environment = EnvSettingsSource(model)()
    origins = (
        {name: f"{path}:{lines[name]}: {name}" for name in in_file}
        | {name: f"{prefix}{name.upper()}" for name in in_environment}
        | {name: f"--{name.replace('_', '-')}" for name in words}
    )
    given = given_by(model, {**in_file, **in_environment, **words}, origins)
    return replace(given, again=partial(collect, model, asked_for, words))


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The values of a TOML file, and the line of each.

    :raises OptionsError: it cannot be read, or is no TOML.
    """
    try:
        text = path.read_bytes().decode()
        values = tomllib.loads(text)
    except OSError as error:
        raise OptionsError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        number = 1 + error.object.count(b"\n", 0, error.start)
        raise OptionsError(f"{path}:{number}: this is not UTF-8") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        found = re.search(r"line (\d+)", str(error))
        line = found[1] if found is not None else str(len(text.splitlines()) or 1)
        raise OptionsError(f"{path}:{line}: {re.sub(r' *[(]at .*[)]$', '', str(error))}") from None
    lines = {name: _line_of(name, text) for name in values}
    for name, value in values.items():
        if _has_null(value):
            raise OptionsError(f"{path}:{lines[name]}: {name}: no option holds a null character")
    return values, lines


def _has_null(value: object) -> bool:
    """No path and no program's argument can have one; the calls that take them say so each in its own way."""
    match value:
        case str():
            return "\0" in value
        case list():
            return any(map(_has_null, value))
        case dict():
            return any(map(_has_null, [*value, *value.values()]))
    return False


def _line_of(name: str, text: str) -> int:
    """The first line that begins with a key, or with a table of this name."""
    word = re.escape(name)
    key = re.compile(rf"""\s*(?:\[+\s*)?["']?{word}["']?\s*(?:[=.\]]|$)""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if key.match(line)), 1)


def parser_of(model: type[O], description: str, epilog: str) -> tuple[argparse.ArgumentParser, CliSettingsSource[Any]]:
    """The command line of a daemon."""
    parser = argparse.ArgumentParser(
        prog=model.program,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=version("ebbtide"))
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"TOML with these options; default: {model.file}")
    cli: CliSettingsSource[Any] = CliSettingsSource(model, root_parser=parser)
    for action in parser._actions:
        if action.metavar and action.dest in model.model_fields:
            action.metavar = metavar_of(model, action.dest)
        if action.help:
            action.help = re.sub(r" ?\((?:default: (?:None|\(\)|False)|required)\)$", "", action.help)
    return parser, cli


def metavar_of(model: type[DaemonOptions], name: str) -> str:
    """What stands for an option's value: FILE, N, or what its model says."""
    described = model.model_fields[name]
    extra = described.json_schema_extra
    if isinstance(extra, dict) and "metavar" in extra:
        return str(extra["metavar"])
    said = str(described.annotation)
    if "Path" in said and (name.endswith("_dir") or "tuple" in said):
        return "DIR"
    for word, metavar in (("Literal", ""), ("Path", "FILE"), ("float", "N"), ("int", "N"), ("bool", "")):
        if word in said:
            choices = re.findall(r"'([^']+)'", said)
            return metavar or "{" + ",".join(choices) + "}"
    return name.upper()


def example_of(model: type[DaemonOptions]) -> str:
    """A file with every option at its default, commented out; those without one are to be looked at."""
    lines = [f"# Options of {model.program}; `{model.program} --help` has them, too."]
    for name, described in model.model_fields.items():
        extra = described.json_schema_extra
        usual = extra.get("example", "...") if isinstance(extra, dict) else "..."
        default = _toml(usual if described.default in (None, PydanticUndefined) else described.default)
        needed = "Needed: " if described.is_required() else ""
        lines += ["", f"# {needed}{described.description or name}", f"{'' if needed else '#'}{name} = {default}"]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(one) for one in value) + "]"
    return f'"{value}"'
