"""Options that several commands share, and how they print what they found."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import math
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from ebbtide.cli.commands import completion
from ebbtide.cli.managers import CONTEXT, CONTEXT_TYPED, MIXED, SOURCES, TLS_FILES, client_of
from ebbtide.cli.output import (
    Table,
    clear,
    name_of,
    names_of,
    plain,
    print_error,
    print_json,
    print_lines,
    print_yaml,
    shown,
    text_of,
    yaml_of,
)
from ebbtide.deflation.errors import InvalidField
from ebbtide.errors import EbbError

if TYPE_CHECKING:
    from ebbtide.client import ManagerClient

Result = TypeVar("Result")
Row = TypeVar("Row")

Limit = Annotated[int, typer.Option(min=1, help="How many at most, newest first.")]
VMName = Annotated[str, typer.Argument(metavar="NAME", help="The VM's name.", autocompletion=completion.vms)]
HostName = Annotated[str, typer.Argument(metavar="HOST", help="The host's name.", autocompletion=completion.hosts)]
SelectorText = Annotated[
    str | None,
    typer.Option(
        "--selector", "-l", metavar="SELECTOR", help='Only those with such labels: "env=prod,tier in (web,db),!old".'
    ),
]
LabelChanges = Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", help="Labels to set; KEY- takes one away.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it without being asked.")]
#: Seconds between two looks of --watch.
WATCH_S = 2.0
#: And between two looks for a manager that is away.
AWAY_LOOK_S = 0.5


class Output(StrEnum):
    """How something is printed."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


class WrongCall(EbbError):
    """The words of a command do not go together; ends it with 2."""


class Interrupted(EbbError):
    """The user waits no more."""


class OperationFailed(EbbError):
    """An operation ended, but not with what was asked for."""


def _plainly(output: Output) -> Output:
    if output in (Output.WIDE, Output.NAME):
        raise typer.BadParameter(f"{output} is for lists and `show` only; there are table, json and yaml")
    return output


def _with_source(context: typer.Context, parameter: typer.CallbackParam, value: Result) -> Result:
    source = context.get_parameter_source(str(parameter.name))
    SOURCES.set({**SOURCES.get(), str(parameter.name): source.name if source is not None else ""})
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Printing:
    """How a command prints; `taken_apart` makes the fields of this class and of those below options of commands."""

    output: Annotated[
        Output,
        typer.Option("--output", "-o", metavar="[table|json|yaml]", help="How it is printed.", callback=_plainly),
    ] = Output.TABLE

    @property
    def for_programs(self) -> bool:
        """Whether a program reads it."""
        return self.output not in (Output.TABLE, Output.WIDE)

    @property
    def wide(self) -> bool:
        return self.output is Output.WIDE

    def line(self, row: Any) -> str:
        """One row of those that a program reads as they come: a line of JSON, a document of YAML, a name."""
        match self.output:
            case Output.JSON:
                return text_of(row)
            case Output.YAML:
                return yaml_of(row)
            case _:
                return name_of(plain(row))

    def say(self, data: Any, table: Callable[[], object]) -> None:
        """Print one document, or what ``table`` prints."""
        match self.output:
            case Output.JSON:
                print_json(data)
            case Output.YAML:
                print_yaml(data)
            case Output.NAME:
                for name in names_of(data):
                    print(shown(name))
            case _:
                table()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asking(Printing):
    """A command that asks the manager."""

    manager: Annotated[
        str | None,
        typer.Option(
            "--manager",
            envvar="EBB_MANAGER",
            metavar="URL[,URL]",
            callback=_with_source,
            help="The manager's address, or several of which one leads; with --token-file; default: by `ebb context`.",
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            envvar="EBB_TOKEN_FILE",
            callback=_with_source,
            help="File with the manager's token; with --manager.",
        ),
    ] = None

    ca: Annotated[
        Path | None, typer.Option("--ca", metavar="FILE", help="CA of an https manager; also before the noun.")
    ] = None

    def ask(self, question: Callable[[ManagerClient], Awaitable[Result]]) -> Result:
        """Run one conversation with the manager to its end. Raises WrongCall where two managers are named."""
        from pydantic import ValidationError

        from ebbtide.messages.common import problem_of

        if self.manager is not None and CONTEXT_TYPED.get():
            raise WrongCall(
                f"--context {CONTEXT.get()} and EBB_MANAGER (or --manager) name two managers: unset EBB_MANAGER, or "
                "leave --context out"
            )
        if self.manager is not None and self.token_file is not None:
            sources = SOURCES.get()
            if {sources.get("manager"), sources.get("token_file")} == MIXED:
                # The token of one manager is never sent to another.
                typed, variable = "--manager", "EBB_TOKEN_FILE"
                if sources["manager"] == "ENVIRONMENT":
                    typed, variable = "--token-file", "EBB_MANAGER"
                raise WrongCall(f"{typed} and {variable} may be of two managers: give --manager with --token-file")
        if self.ca is not None:
            TLS_FILES.set((self.ca, *TLS_FILES.get()[1:]))

        async def conversation() -> Result:
            async with client_of(self.manager, self.token_file) as client:
                return await question(client)

        try:
            return asyncio.run(conversation())
        except ValidationError as error:  # of a body that was not sent: an answer's is told as the manager's fault
            raise EbbError(problem_of(error).detail) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Showing(Asking):
    """A command that shows something that has a name."""

    output: Annotated[Output, typer.Option("--output", "-o", help="How it is printed; wide: with more columns.")] = (
        Output.TABLE
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing(Showing):
    """A command that lists such things."""

    sort_by: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD", help="By a field of -o json, as nominal.memory_mib; with a - before it, largest first."
        ),
    ] = None
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Go on until interrupted: on a terminal all, else what has changed.")
    ] = False

    def list(
        self,
        key: str,
        question: Callable[[ManagerClient], Awaitable[Sequence[Row]]],
        table: Table[Row],
        chosen_by: Iterable[object] = (),
    ) -> None:
        """Print what is found, once or again and again.

        :param chosen_by: the filters; None: it is not given.
        """
        if any(value is not None for value in chosen_by):
            table = dataclasses.replace(table, empty="none matches")
        rows = ordered(self.ask(question), self.sort_by)
        if not self.watch:
            self.say({key: rows}, lambda: table.print(rows, wide=self.wide))
            return
        from ebbtide.client.errors import PASSING

        known: set[str] | None = None
        away = ""
        try:
            while True:
                known = self._changed(rows, known, table)
                time.sleep(WATCH_S)
                try:
                    rows = ordered(self.ask(question), self.sort_by)
                    if away and self._is_seen():
                        known = None  # what was said of it goes from the screen
                    away = ""
                except PASSING as error:
                    if str(error) != away:
                        away = str(error)
                        print_error(f"{away}; what is shown is what it said last")
        except (KeyboardInterrupt, BrokenPipeError):
            pass

    def _is_seen(self) -> bool:
        return not self.for_programs and sys.stdout.isatty()

    def _changed(self, rows: Sequence[Row], known: set[str] | None, table: Table[Row]) -> set[str]:
        """Print what is there now where somebody looks, else the rows that are new or differ.

        :param known: what was there at the last look; None: this is the first one.
        """
        texts = {text_of(row) for row in rows}
        changed = [row for row in rows if known is None or text_of(row) not in known]
        if self._is_seen():
            if texts != known:
                clear()
                table.print(rows, wide=self.wide)
        elif not self.for_programs:
            if changed or known is None:
                table.print(changed, wide=self.wide, headed=not known)
                print_lines(())
        else:
            print_lines(self.line(row) for row in changed)
        return texts


def is_away(error: BaseException | None) -> bool:
    """Whether no manager that leads has answered: it is started again, another one takes over, or it is too busy."""
    from ebbtide.client.errors import PASSING

    return isinstance(error, PASSING)


async def asked_again(
    tell: Callable[[str], object],
    question: Callable[..., Awaitable[Result]],
    *arguments: Any,
    for_s: float = math.inf,
    only_lost: bool = False,
) -> Result:
    """An answer of a manager that has answered before: while it is away, that is told once and it is asked again.

    :param for_s: for so long; 0: it is asked once.
    :param only_lost: it may not have answered before: only where it was sent what it has not answered.
    :raises EbbError: because of what `is_away` says, and it was so for all that time.
    """
    clock = asyncio.get_running_loop().time
    away_since: float | None = None
    while True:
        try:
            return await question(*arguments)
        except EbbError as error:
            if not is_away(error) or not for_s:
                raise
            if away_since is None:
                if only_lost and not getattr(error, "was_sent", False):
                    raise
                tell(f"{error}; it is asked again {'until it answers' if for_s == math.inf else f'for {for_s:g} s'}")
                away_since = clock()
            elif clock() - away_since > for_s:
                raise EbbError(f"{error}, and it was asked again for {for_s:g} s") from error
            await asyncio.sleep(AWAY_LOOK_S)


def taken_apart(run: Callable[..., Any]) -> Callable[..., Any]:
    """A command as Typer reads it: each parameter that is a bundle of options is replaced by these."""
    hints = get_type_hints(run, include_extras=True)
    bundles: dict[str, type[Printing]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(run).parameters.values():
        kind = hints[parameter.name]
        if isinstance(kind, type) and issubclass(kind, Printing):
            bundles[parameter.name] = kind
            options = get_type_hints(kind, include_extras=True)
            parameters += [
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=options[field.name]
                )
                for field in dataclasses.fields(kind)
            ]
        else:
            parameters.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))

    def call(**given: Any) -> Any:
        for name, kind in bundles.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
        return run(**given)

    call.__doc__ = run.__doc__
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def ordered(rows: Sequence[Row], by: str | None, others: Collection[str] = ()) -> list[Row]:
    """Rows by a field of their JSON, those without a value last.

    :param by: names with dots between them; a hyphen first: the largest first.
    :param others: fields that a row may have, and perhaps none has.
    """
    if by is None or not rows:
        return list(rows)
    path = by.removeprefix("-").split(".")
    is_field, keyed = path[0] in others and len(path) == 1, list[tuple[Any, Row]]()
    there = dict[str, None]()
    for row in rows:
        found = None
        try:
            found, is_field = _value_of(row, path), True
        except KeyError as missing:
            there.update(dict.fromkeys(missing.args[0]))
        if isinstance(found, dict | list):
            raise typer.BadParameter(f"{by!r} has several values: name one of them", param_hint="--sort-by")
        keyed.append((found, row))
    if not is_field:
        have = f"; there are {', '.join(there)}" if there else ""
        raise typer.BadParameter(f"{by!r} is no field of -o json{have}", param_hint="--sort-by")
    known = sorted((pair for pair in keyed if pair[0] is not None), key=lambda pair: pair[0], reverse=by[0] == "-")
    return [row for _, row in known] + [row for found, row in keyed if found is None]


def _value_of(row: object, path: Sequence[str]) -> Any:
    """:raises KeyError: it has no such field; with the names of those that are there."""
    found, typed = plain(row), row
    for at, name in enumerate(path):
        if found is None:
            break
        if isinstance(typed, Mapping) and typed is not row:
            # Labels of a model: any may be set, and their keys have dots, too.
            return found.get(".".join(path[at:]))
        if not isinstance(found, dict) or name not in found:
            raise KeyError(list(found) if isinstance(found, dict) else [])
        found, typed = found[name], getattr(typed, name, None)
    return found


def label_changes(words: Sequence[str]) -> dict[str, str | None]:
    """Changes of labels as they are typed. Raises WrongCall."""
    from ebbtide.messages.labels import changes_of

    try:
        return changes_of(list(words))
    except InvalidField as error:
        raise WrongCall(str(error)) from error


def label_words(labels: Mapping[str, str]) -> str:
    """Labels in a table."""
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items())) or "-"


def number(least: float, most: float | None = None) -> Callable[[str], float]:
    """A parser of options: a number within bounds, which infinity and NaN are not."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= (sys.float_info.max if most is None else most):
            bounds = f"of at least {least:g}" if most is None else f"from {least:g} to {most:g}"
            raise typer.BadParameter(f"must be a number {bounds}, but is {text!r}")
        return value

    return parse


def seconds(about: str, most: float | None = None) -> Any:
    """An option of so many seconds."""
    return typer.Option(parser=number(0, most), metavar="SECONDS", help=about)


DeadlineS = Annotated[float, seconds("What the deflations may take.", 86_400)]


def is_person_there() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin is not None and sys.stdin.isatty()


def confirm(what: str, yes: bool, *, instead: str = "give --yes") -> None:
    """Ask a person before something is destroyed, or taken without being asked for.

    :raises WrongCall: nobody can be asked.
    :raises Interrupted: by Ctrl-C.
    :raises EbbError: the answer is no.
    """
    if yes:
        return
    if not is_person_there():
        raise WrongCall(f"nobody can be asked whether to {what}: {instead}")
    try:
        agreed = typer.confirm(f"{what[0].upper()}{what[1:]}?", err=True)
    except typer.Abort as end:
        if not isinstance(end.__context__, EOFError):
            raise Interrupted("interrupted; nothing was changed") from None
        agreed = False
    if not agreed:
        raise EbbError("nothing was changed")
