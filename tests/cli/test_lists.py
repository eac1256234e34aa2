"""Lists: their order, what --watch prints, names, and how bundles of options become options of a command."""

from __future__ import annotations

import contextvars
import inspect
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
import yaml

from ebbtide.cli import managers
from ebbtide.cli.commands import completion, options
from ebbtide.cli.commands.options import Asking, Interrupted, Listing, Output, ordered, taken_apart
from ebbtide.cli.output import Table, names_of, print_table
from ebbtide.client import ClientError, ManagerBusy, ManagerUnreachable
from ebbtide.errors import EbbError
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import HostStatus

ROWS: list[dict[str, Any]] = [
    {"name": "b", "size": {"mib": 2.0}, "at": None},
    {"name": "a", "size": {"mib": 10.0}, "at": 7},
    {"name": "c", "size": {"mib": 1.0}, "at": 3},
]
NAMES: Table[Any] = Table({"name": lambda row: row["name"]}, {"at": lambda row: row["at"]}, "nothing")


@pytest.mark.parametrize(
    ("by", "names"),
    [(None, "bac"), ("name", "abc"), ("-name", "cba"), ("size.mib", "cba"), ("at", "cab"), ("-at", "acb")],
)
def test_rows_stand_in_the_order_of_a_field_and_those_without_a_value_last(by: str | None, names: str) -> None:
    assert "".join(row["name"] for row in ordered(ROWS, by)) == names


@pytest.mark.parametrize(
    ("by", "said"), [("colour", "there are name, size, at"), ("size.gib", "there are mib"), ("size", "several values")]
)
def test_a_field_that_is_none_is_a_wrong_call_and_the_fields_are_named(by: str, said: str) -> None:
    with pytest.raises(typer.BadParameter, match=said):
        ordered(ROWS, by)


def labelled(name: str, **labels: str) -> HostStatus:
    size = Vector(cpu_cores=1.0)
    return HostStatus(
        id=name, url="http://x", state="ready", seen_at=1.0, capacity=size, free=size, deflatable=size, vms=(),
        accelerator="kvm", labels={word.replace("__", "."): value for word, value in labels.items()},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("by", "names"), [("labels.env", "cab"), ("-labels.env", "acb"), ("labels.a.org", "bca"), ("labels.none", "bac")]
)
def test_rows_that_lack_a_label_stand_last_and_one_that_none_has_is_no_wrong_call(by: str, names: str) -> None:
    rows = [labelled("b", a__org="x"), labelled("a", env="test"), labelled("c", env="prod", a__org="y")]
    assert "".join(row.id for row in ordered(rows, by)) == names


def test_a_row_that_lacks_a_field_stands_last_and_one_that_none_has_must_be_known() -> None:
    rows = [{"name": "lab"}, {"name": "b", "ca": "y"}, {"name": "a", "ca": "x"}]
    assert [row["name"] for row in ordered(rows, "ca")] == ["a", "b", "lab"]
    assert ordered(rows, "key", others=["ca", "key"]) == rows
    with pytest.raises(typer.BadParameter, match="'key' is no field of -o json; there are name, ca"):
        ordered(rows, "key")


def test_names_are_those_of_a_lists_rows_or_a_things_own() -> None:
    assert names_of({"vms": ROWS}) == ["b", "a", "c"]
    assert names_of({"request_id": "x", "vms": ROWS}) == ["x"]
    assert names_of({"events": [{"id": 7}]}) == ["7"]
    assert names_of({"vms": []}) == []


class Looks(Listing):
    """A list that is looked at some times, then Ctrl-C."""

    left: Iterator[Sequence[Any] | BaseException]

    def ask(self, question: Any) -> Any:
        found = next(self.left, KeyboardInterrupt())
        if isinstance(found, BaseException):
            raise found
        return found


def test_an_empty_list_is_said_to_be_of_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for chosen_by in ((), (None,), (None, "x")):
        to = Looks()
        object.__setattr__(to, "left", iter([[]]))
        to.list("rows", lambda client: client.vms(), NAMES, chosen_by)
    assert capsys.readouterr().out == "nothing\nnothing\nnone matches\n"


def watched(monkeypatch: pytest.MonkeyPatch, output: Output, *looks: Sequence[Any] | Exception) -> None:
    monkeypatch.setattr(options, "WATCH_S", 0.0)
    to = Looks(output=output, watch=True)
    object.__setattr__(to, "left", iter(looks))
    to.list("rows", lambda client: client.vms(), NAMES)


def test_a_program_gets_each_row_that_is_new_or_differs_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = {**ROWS[1], "at": 8}
    looks: tuple[Sequence[Any], ...] = (ROWS[:2], ROWS[:2], [ROWS[0], changed], [ROWS[0]], [])
    watched(monkeypatch, Output.JSON, *looks)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [*ROWS[:2], changed]
    watched(monkeypatch, Output.YAML, *looks)
    assert list(yaml.safe_load_all(capsys.readouterr().out)) == [*ROWS[:2], changed]
    watched(monkeypatch, Output.NAME, *looks)
    assert capsys.readouterr().out.split() == ["b", "a", "a"]
    watched(monkeypatch, Output.TABLE, *looks)
    assert capsys.readouterr().out.split() == ["name", "b", "a", "a"]


def test_an_empty_list_is_said_once_and_not_at_each_look(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched(monkeypatch, Output.TABLE, [], [], ROWS[:1], [], [])
    assert capsys.readouterr().out.split() == ["nothing", "name", "b"]


@pytest.mark.parametrize("away", [ManagerUnreachable("no manager answers"), ManagerBusy(429, "no manager answers")])
def test_a_manager_that_is_away_for_a_while_ends_no_watch(
    away: ClientError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched(monkeypatch, Output.NAME, ROWS[:1], away, away, ROWS[:2])
    said = capsys.readouterr()
    assert (said.out.split(), said.err.count("no manager answers")) == (["b", "a"], 1)
    with pytest.raises(type(away)):  # at the first look it is an error
        watched(monkeypatch, Output.NAME, away)


def test_a_terminal_gets_the_whole_list_whenever_it_has_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(options, "clear", lambda: print("CLEAR"))
    watched(monkeypatch, Output.WIDE, ROWS[:1], ROWS[:1], ROWS[:2], ROWS[1:2])
    assert [part.split() for part in capsys.readouterr().out.split("CLEAR")[1:]] == [
        ["name", "at", "b", "None"], ["name", "at", "b", "None", "a", "7"], ["name", "at", "a", "7"],
    ]  # fmt: skip


def test_a_bundle_becomes_its_options_and_comes_back_as_one() -> None:
    seen = []

    def run(name: Annotated[str, typer.Argument()], *, to: Asking) -> None:
        seen.append((name, to))

    made = taken_apart(run)
    assert list(inspect.signature(made).parameters) == ["name", "output", "manager", "token_file", "ca"]
    made(name="web", output=Output.YAML, manager="m", token_file=None, ca=None)
    assert seen == [("web", Asking(output=Output.YAML, manager="m"))]


def test_completion_is_silent_where_nobody_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    command: Any = typer.main.get_command(typer.Typer(callback=lambda: None, invoke_without_command=True))
    context = command.make_context("ebb", [])
    context.params = {"manager": "http://127.0.0.1:9", "token_file": str(token)}
    assert completion.vms(context, "") == completion.hosts(context, "") == completion.tasks(context, "") == []
    assert capsys.readouterr() == ("", "")


def test_completion_trusts_the_ca_that_commands_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def client_of(*words: Any) -> Any:
        seen.append(managers.TLS_FILES.get())
        raise OSError

    monkeypatch.setattr(managers, "client_of", client_of)
    command: Any = typer.main.get_command(typer.Typer(callback=lambda: None, invoke_without_command=True))
    context = command.make_context("ebb", [])
    context.params = {"ca": "ca.pem", "certificate": None, "key": "key.pem"}
    assert contextvars.copy_context().run(completion.vms, context, "") == []
    assert seen == [(Path("ca.pem"), None, Path("key.pem"))]


def test_a_row_of_wide_characters_stays_one_line_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "sentence"), [("web", "\N{CJK UNIFIED IDEOGRAPH-6C34}" * 300)], "none")
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(("key", "error", "said"), [
    (KeyboardInterrupt, Interrupted, "interrupted; nothing was changed"), (EOFError, EbbError, "nothing was changed"),
])  # fmt: skip
def test_ctrl_c_at_a_question_is_an_interruption_and_changes_nothing(
    key: type[BaseException], error: type[EbbError], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
            raise key

    monkeypatch.setattr("sys.stdin", Terminal())
    with pytest.raises(EbbError) as caught:
        options.confirm("delete web with its disk", yes=False)
    assert (type(caught.value), str(caught.value)) == (error, said)
