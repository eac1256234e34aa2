"""`ebb context`: which manager the commands ask."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from ebbtide.cli.commands import completion
from ebbtide.cli.commands.options import Output, Printing, ordered
from ebbtide.cli.contexts import LAB, Context, Contexts, changing, path, read, write
from ebbtide.cli.managers import check_protected
from ebbtide.cli.output import Table

Name = Annotated[str, typer.Argument(metavar="NAME", help="The context's name.", autocompletion=completion.contexts)]
Row = dict[str, Any]
THE_LAB = "the lab of this machine"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local(Printing):
    """A list, or one, of what is on this machine."""

    output: Annotated[Output, typer.Option("--output", "-o", help="How it is printed; wide: with more columns.")] = (
        Output.TABLE
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalList(Local):
    """A list of what is on this machine."""

    sort_by: Annotated[str | None, typer.Option(metavar="FIELD", help="By a field of -o json.")] = None


def add(
    name: Name,
    manager: Annotated[str, typer.Option(metavar="URL[,URL]", help="Its address, or several of which one leads.")],
    token_file: Annotated[Path, typer.Option(metavar="FILE", help="The file with our token.")],
    ca: Annotated[Path | None, typer.Option(metavar="FILE", help="CA of an https manager.")] = None,
    certificate: Annotated[Path | None, typer.Option(metavar="FILE", help="Our certificate, if it asks.")] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="The key of --certificate.")] = None,
    use: Annotated[bool, typer.Option("--use", help="Use it from now on; the first one is anyway.")] = False,
    *,
    to: Printing,
) -> None:
    """Name a manager, or name it anew. The token stays in its file; nothing is asked."""
    # Not by the client's own check: it would be said in the words of --manager. Files are found from everywhere.
    files = {"ca": ca, "certificate": certificate, "key": key}
    whole = {field: file.expanduser().absolute() for field, file in files.items() if file is not None}
    context = Context(manager, token_file.expanduser().absolute(), **whole)
    with changing():
        contexts = read()
        made = contexts.with_context(name, context)
        if use or not contexts.contexts:
            made = made.using(name)
        check_protected(manager)
        write(made)
    used = " and used" if made.current == name else f"; `ebb context use {name}` uses it"
    to.say(_row(made, name), lambda: print(f"{name} is written to {path()}{used}"))


def use(name: Name, *, to: Printing) -> None:
    """Ask this manager from now on, where neither --context, nor --manager nor a variable says another."""
    with changing():
        contexts = read().using(name)
        write(contexts)
    row = _row(contexts, name)
    to.say(row, lambda: print(f"{name} is used: {row['manager'] or THE_LAB}"))


def show(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Default: the one in use.", autocompletion=completion.contexts),
    ] = None,
    *,
    to: Local,
) -> None:
    """Show one context."""
    contexts = read()
    row = _row(contexts, name or contexts.current)
    to.say(row, lambda: CONTEXTS.print([row], wide=to.wide))


def list_contexts(*, to: LocalList) -> None:
    """List the contexts; the one in use is marked. The lab of this machine is always there."""
    contexts = read()
    may_have = [field.name for field in dataclasses.fields(Context)]
    rows = ordered([_row(contexts, name) for name in (LAB, *contexts.contexts)], to.sort_by, may_have)
    to.say({"contexts": rows}, lambda: CONTEXTS.print(rows, wide=to.wide))


def remove(name: Name, *, to: Printing) -> None:
    """Remove a context; the files that it names stay."""
    with changing():
        contexts = read().without(name)
        write(contexts)
    left = list(contexts.contexts)
    to.say({"removed": name, "contexts": left}, lambda: print(f"{name} is removed"))


def _row(contexts: Contexts, name: str) -> Row:
    row = {"name": name, "current": contexts.current == name}
    if name == LAB:
        return {**row, "manager": None, "token_file": None}
    return {**row, **contexts.named(name).as_dict()}


CONTEXTS: Table[Row] = Table(
    {
        "": lambda row: "*" if row["current"] else "",
        "context": lambda row: row["name"],
        "manager": lambda row: row["manager"] or THE_LAB,
        "token file": lambda row: row["token_file"] or "-",
    },
    {
        "ca": lambda row: row.get("ca", "-"),
        "certificate": lambda row: row.get("certificate", "-"),
        "key": lambda row: row.get("key", "-"),
    },
    "",
)
