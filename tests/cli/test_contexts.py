"""Contexts: what is written, which manager a command asks, and what a file that is wrong is told."""

from __future__ import annotations

import contextvars
import fcntl
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from ebbtide.cli import contexts, main, managers
from ebbtide.cli.commands.options import WrongCall
from ebbtide.cli.contexts import Context
from ebbtide.cli.main import app
from ebbtide.cli.schemas import schema_of
from ebbtide.errors import EbbError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("EBB_STATE_DIR", str(tmp_path / "no-lab"))
    for variable in ("EBB_MANAGER", "EBB_TOKEN_FILE", "EBB_CONTEXT"):
        monkeypatch.delenv(variable, raising=False)
    for name in ("a", "b"):
        (tmp_path / f"{name}.token").write_text(f"token-of-{name}")
    return tmp_path


def context(*words: str, fails: bool = False) -> Any:
    result = CliRunner().invoke(app, ["context", *words, "-o", "json"])
    if fails:
        assert isinstance(result.exception, EbbError)
        return result.exception
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    jsonschema.validate(document, schema_of(f"context {words[0]}"))
    return document


def two(home: Path) -> None:
    for name, port in (("a", 1), ("b", 2)):
        context("add", name, "--manager", f"http://127.0.0.1:{port}", "--token-file", str(home / f"{name}.token"))


def asked(*words: str) -> str:
    """The address that a command of those words asks, as its error tells."""
    # In a context of its own: what was named is not to be there for the next test.
    return str(contextvars.copy_context().run(CliRunner().invoke, app, [*words, "health"]).exception)


def test_the_first_context_is_used_and_use_changes_that(home: Path) -> None:
    two(home)
    assert [(row["name"], row["current"]) for row in context("list")["contexts"]] == [
        ("lab", False), ("a", True), ("b", False),
    ]  # fmt: skip
    assert "127.0.0.1:1" in asked()
    assert context("use", "b")["current"]
    assert "127.0.0.1:2" in asked()
    assert "127.0.0.1:1" in asked("--context", "a")
    assert context("show")["name"] == "b"
    assert context("remove", "b") == {"removed": "b", "contexts": ["a"]}
    assert context("show") == {"name": "lab", "current": True, "manager": None, "token_file": None}
    assert "ebb context add" in asked()


def test_the_lab_is_a_context_that_can_be_used_and_neither_made_nor_removed(home: Path) -> None:
    two(home)
    assert "ebb lab up" in asked("--context", "lab")
    context("use", "lab")
    assert "ebb lab up" in asked()
    assert "127.0.0.1:2" in asked("--context", "b")
    made = ["--manager", "http://x", "--token-file", "t"]
    assert "always there" in str(context("add", "lab", *made, fails=True))
    assert "stays" in str(context("remove", "lab", fails=True))


def test_options_and_variables_come_before_a_context(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two(home)
    monkeypatch.setenv("EBB_CONTEXT", "b")
    assert "127.0.0.1:2" in asked()
    monkeypatch.setenv("EBB_MANAGER", "http://127.0.0.1:3")
    monkeypatch.setenv("EBB_TOKEN_FILE", str(home / "a.token"))
    assert "127.0.0.1:3" in asked()


@pytest.mark.parametrize("by_option", [False, True])
def test_a_context_that_is_typed_beside_another_manager_is_a_wrong_call(
    home: Path, monkeypatch: pytest.MonkeyPatch, by_option: bool
) -> None:
    two(home)
    named = {"manager": "http://127.0.0.1:3", "token-file": str(home / "a.token")}
    options = [f"--{name}={value}" for name, value in named.items()] if by_option else []
    if not by_option:
        monkeypatch.setenv("EBB_MANAGER", named["manager"])
        monkeypatch.setenv("EBB_TOKEN_FILE", named["token-file"])
    found = contextvars.copy_context().run(CliRunner().invoke, app, ["--context", "b", "health", *options])
    assert isinstance(found.exception, WrongCall)
    assert main.exit_code_of(found.exception) == 2
    assert "--context b and EBB_MANAGER (or --manager) name two managers" in str(found.exception)


def test_the_file_is_its_owners_and_holds_no_token(home: Path) -> None:
    two(home)
    file = home / "ebbtide" / "contexts.toml"
    assert file.stat().st_mode & 0o777 == 0o600
    assert "token-of" not in file.read_text()
    assert f"{home}/a.token" in file.read_text()


def test_what_is_written_is_read_again(home: Path) -> None:
    odd = Context('http://x/"\\é', home / "with space", ca=home / "ca.pem", certificate=home / "c", key=home / "k")
    contexts.write(contexts.Contexts().with_context("a.b", odd).using("a.b"))
    assert contexts.read().named("a.b") == odd
    assert contexts.read().current == "a.b"


def test_contexts_are_listed_by_a_file_that_not_every_one_names(home: Path) -> None:
    def names() -> list[str]:
        return [row["name"] for row in context("list", "--sort-by", "ca")["contexts"]]

    assert names() == ["lab"]
    contexts.write(contexts.Contexts().with_context("a", Context("http://x", home / "t", ca=home / "ca.pem")))
    assert names() == ["a", "lab"]


def test_the_files_of_tls_go_with_their_context_only(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Context("https://127.0.0.1:1", home / "a.token", ca=home / "ca.pem")
    contexts.write(contexts.Contexts().with_context("a", made).using("a"))
    with pytest.raises(EbbError, match=r"ca\.pem"):
        managers.client_of(None, None)
    assert managers.client_of("https://127.0.0.1:1", home / "a.token").url == "https://127.0.0.1:1"


@pytest.mark.parametrize("url", ["http://192.0.2.1:7100", "https://192.0.2.1,http://manager:7100"])
def test_no_token_goes_over_plain_http_to_another_machine(home: Path, url: str) -> None:
    token, said = home / "a.token", "would get the token over plain HTTP: give https://"
    with pytest.raises(EbbError, match=said):
        managers.client_of(url, token)
    assert said in str(context("add", "a", "--manager", url, "--token-file", str(token), fails=True))
    contexts.write(contexts.Contexts().with_context("a", Context(url, token)).using("a"))
    assert said in asked()


@pytest.mark.parametrize("url", ["http://[::1]:1", "http://localhost:1,http://127.0.0.2:1", "https://192.0.2.1:1"])
def test_a_token_goes_to_this_machine_or_over_tls(home: Path, url: str) -> None:
    context("add", "a", "--manager", url, "--token-file", str(home / "a.token"))
    assert managers.client_of(None, None).url == url.split(",")[0]


@pytest.mark.parametrize("words", [["use", "c"], ["show", "c"], ["remove", "c"]])
def test_a_context_that_is_missing_ends_with_3(home: Path, words: list[str]) -> None:
    two(home)
    error = context(*words, fails=True)
    assert main.exit_code_of(error) == 3
    assert "there are: lab, a, b" in str(error)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("current = ", "is no TOML"),
        ('current = "c"', "current: there is no context 'c'"),
        ("context = 1", "context must be a table"),
        ("[context]\na = 1", "context.a must be a table"),
        ('[context.a]\nmanager = "http://x"', "context.a.token_file is missing"),
        ("[context.a]\nmanager = 7", "context.a.manager must be text"),
        ('[context.a]\ntoken = "secret"', "context.a.token is unknown"),
        ('[contexts.prod]\nmanager = "http://x"', "contexts is unknown; there are context, current"),
        ('curent = "prod"', "curent is unknown"),
        ('current = ["a"]', "current must be text"),
        (
            '[context.a]\nmanager = "http://x"\ntoken_file = "~no-such-user/x"',
            "context.a.token_file is ~no-such-user/x",
        ),
        (f"current = {'1' * 5000}", "is no TOML"),
        (f"current = {'[' * 5000}", "is no TOML"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_its_field(home: Path, text: str, said: str) -> None:
    file = home / "ebbtide" / "contexts.toml"
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(EbbError) as caught:
        contexts.read()
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_file_that_others_can_write_is_refused(home: Path) -> None:
    two(home)
    (home / "ebbtide" / "contexts.toml").chmod(0o620)
    with pytest.raises(EbbError, match="can be written by others"):
        contexts.read()


@pytest.mark.parametrize("name", ["", "a b", "../a", "-a", "x" * 41])
def test_a_name_that_is_none_is_refused(home: Path, name: str) -> None:
    with pytest.raises(EbbError, match="is no name of a context"):
        contexts.Contexts().with_context(name, Context("http://x", home / "a.token"))


@pytest.mark.parametrize("typed", ["--manager", "--token-file"])
def test_the_token_of_one_manager_is_not_sent_to_another_that_is_typed(
    home: Path, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    monkeypatch.setenv("EBB_MANAGER", "http://127.0.0.1:1")
    monkeypatch.setenv("EBB_TOKEN_FILE", str(home / "a.token"))
    values = {"--manager": "http://127.0.0.1:2", "--token-file": str(home / "b.token")}

    def run(*words: str) -> Any:
        return contextvars.copy_context().run(CliRunner().invoke, app, ["host", "list", *words]).exception

    mixed = run(typed, values[typed])
    assert isinstance(mixed, WrongCall)
    assert typed in str(mixed)
    both = run(*(word for option in values.items() for word in option))
    assert "no manager answers at http://127.0.0.1:2" in str(both)


def test_no_other_command_changes_the_contexts_meanwhile(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two(home)
    locks = []

    def write(made: contexts.Contexts) -> None:
        lock = contexts.path().with_name(f".{contexts.path().name}.lock")
        with lock.open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locks.append(lock)

    monkeypatch.setattr("ebbtide.cli.commands.contexts.write", write)
    for words in (("use", "b"), ("remove", "b"), ("add", "c", "--manager", "http://127.0.0.1:3", "--token-file", "t")):
        context(*words)
    assert len(locks) == 3
