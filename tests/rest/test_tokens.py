"""Tokens files: what they say, and what is wrong with them, without a word of a secret."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from deflation.roles import Role
from ebb.main import app
from rest.errors import AccessError
from rest.tokens import Principals, principal, read_token, read_tokens

HASH = hashlib.sha256(b"secret-of-ci").hexdigest()


def written(directory: Path, text: str) -> Path:
    path = directory / "tokens.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_hashes_and_files_beside_the_tokens_file_stand_for_their_principals(tmp_path: Path) -> None:
    (tmp_path / "agent").write_text("secret-of-host-a\n")
    path = written(
        tmp_path,
        f'[[token]]\nname = "ci"\nrole = "operator"\nsha256 = "{HASH.upper()}"\n'
        '[[token]]\nname = "host-a"\nrole = "agent"\ntoken_file = "agent"\nhost = "host-a"\n',
    )
    principals = Principals(read_tokens(path))
    found = principals.of("secret-of-ci")
    assert found is not None
    assert (found.name, found.role, found.host) == ("ci", Role.OPERATOR, None)
    found = principals.of("secret-of-host-a")
    assert found is not None
    assert (found.name, found.role, found.host) == ("host-a", Role.AGENT, "host-a")
    for wrong in ("", "secret-of-c", "secret-of-ci ", HASH, "SECRET-OF-CI", "\udcff"):
        assert principals.of(wrong) is None


def test_the_empty_token_is_nobodys() -> None:
    assert Principals([principal("nobody", Role.ADMIN, "")]).of("") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("token = 3", "token"),
        ('[[token]]\nrole = "viewer"\nsha256 = "SECRET"', "token.0.name"),
        ('[[token]]\nname = "ci"\nrole = "root"\nsha256 = "SECRET"', "token.0.role"),
        ('[[token]]\nname = "ci"\nrole = "viewer"\nsha256 = "SECRET"', "token.0.sha256"),
        ('[[token]]\nname = "ci"\nrole = "viewer"', "either sha256 or token_file"),
        (
            f'[[token]]\nname = "ci"\nrole = "viewer"\nsha256 = "{HASH}"\ntoken_file = "x"',
            "either sha256 or token_file",
        ),
        (f'[[token]]\nname = "ci"\nrole = "viewer"\nsha256 = "{HASH}"\nhost = "a"', "host: is for the role agent only"),
        ('[[token]]\nname = "ci"\nrole = "viewer"\ntoken = "SECRET"', "token.0.token"),
        ('[[token]]\nname = "ci"\nrole = "viewer"\ntoken_file = "missing"', "cannot read the token file"),
        ('[[token]\nname = "SECRET"', "is no TOML"),
        (f'users = 1\n[[token]]\nname = "ci"\nrole = "viewer"\nsha256 = "{HASH}"', "users"),
    ],
)
def test_a_wrong_entry_is_named_and_not_shown(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(AccessError) as refused:
        read_tokens(written(tmp_path, text))
    assert said in str(refused.value)
    assert "SECRET" not in str(refused.value)
    assert HASH not in str(refused.value)


def test_two_entries_with_one_name_or_one_token_are_refused() -> None:
    for other in (principal("ci", Role.VIEWER, "b"), principal("other", Role.VIEWER, "a")):
        with pytest.raises(AccessError):
            Principals([principal("ci", Role.VIEWER, "a"), other])


def test_a_file_that_everybody_can_read_is_said_in_the_log(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("secret\n")
    path.chmod(0o604)
    with capture_logs() as logs:
        assert read_token(path) == "secret"
        path.chmod(0o640)
        read_token(path)
    assert [entry["file"] for entry in logs] == [str(path)]
    assert "secret" not in {str(value) for entry in logs for value in entry.values()}


def test_a_principal_shows_nothing_of_its_token() -> None:
    assert "digest" not in repr(principal("ci", Role.VIEWER, "secret"))


def test_a_new_token_is_good_for_its_entry(tmp_path: Path) -> None:
    words = ["token", "new", "--role", "agent", "--name", "host-a", "--host", "host-a"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0
    token = done.output.splitlines()[0].rsplit(" ", 1)[1]
    found = Principals(read_tokens(written(tmp_path, done.output.split("\n", 1)[1]))).of(token)
    assert found is not None
    assert (found.name, found.role, found.host) == ("host-a", Role.AGENT, "host-a")
    made = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert made["entry"]["sha256"] == hashlib.sha256(made["token"].encode()).hexdigest()
    assert made["token"] != token
