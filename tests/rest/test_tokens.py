"""Tokens files: what they say, and what is wrong with them, without a word of a secret."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbtide.cli.main import app
from ebbtide.lab.state import write_private
from ebbtide.rest.credentials import command_token, report_token
from ebbtide.rest.errors import AccessError
from ebbtide.rest.roles import Role
from ebbtide.rest.tokens import Principals, principal, read_revoked, read_token, read_tokens

HASH = hashlib.sha256(b"secret-of-ci").hexdigest()


def written(directory: Path, text: str) -> Path:
    path = directory / "tokens.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_hashes_and_files_beside_the_tokens_file_stand_for_their_principals(tmp_path: Path) -> None:
    write_private(tmp_path / "agent", "secret-of-host-a\n")
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
        (f'[[token]]\nname = "a"\nrole = "agent"\nsha256 = "{HASH}"', "the role agent only, which needs one"),
        (f'[[token]]\nname = "m"\nrole = "manager"\nsha256 = "{HASH}"', "--token-file only"),
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


def test_the_tokens_of_a_revoked_host_count_no_more(tmp_path: Path) -> None:
    entry = f'[[token]]\nname = "spare"\nrole = "agent"\nsha256 = "{HASH}"\nhost = "host-a"\n'
    path = written(tmp_path, f'{entry}[[revoked]]\nhost = "host-a"\n')
    principals = Principals(read_tokens(path), "k", read_revoked(path))
    assert principals.of("secret-of-ci") is None
    assert principals.of(report_token("k", "host-a")) is None
    assert principals.of(report_token("k", "host-b")) is not None
    with pytest.raises(AccessError, match=r"revoked\.0\.host"):
        read_revoked(written(tmp_path, "[[revoked]]\nhost = 1\n"))


def test_two_entries_with_one_name_or_one_token_are_refused() -> None:
    for other in (principal("ci", Role.VIEWER, "b"), principal("other", Role.VIEWER, "a")):
        with pytest.raises(AccessError):
            Principals([principal("ci", Role.VIEWER, "a"), other])


def test_a_file_that_everybody_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_private(path, "secret\n")
    for mode in (0o604, 0o602, 0o601):
        path.chmod(mode)
        with pytest.raises(AccessError, match="can be read by every user of this machine: chmod o-rwx"):
            read_token(path)
    path.chmod(0o640)
    assert read_token(path) == "secret"


def test_each_host_and_direction_has_a_token_of_its_own() -> None:
    hosts = ["host-a", "host-b", "host", "a"]
    made = [make(key, host) for make in (report_token, command_token) for key in ("k", "l") for host in hosts]
    assert len(set(made)) == len(made)
    principals = Principals([principal("ci", Role.ADMIN, "secret")], "k")
    for host in hosts:
        found = principals.of(report_token("k", host))
        assert found is not None
        assert (found.role, found.host) == (Role.AGENT, host)
    token = report_token("k", "host-a")
    for wrong in (
        command_token("k", "host-a"), report_token("l", "host-a"), token.replace("host-a", "host-b"), token + "x",
        "host-a.", "host-a", ".", "", "\udcff.\udcff", "k",
    ):  # fmt: skip
        assert principals.of(wrong) is None, wrong


def test_an_invitation_is_two_files_for_one_host(tmp_path: Path) -> None:
    words = ["host", "tokens", "host-b", "--key-file", str(tmp_path / "hosts.key"), "--directory", str(tmp_path)]
    for _ in range(2):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        key = read_token(tmp_path / "hosts.key")
        assert read_token(tmp_path / "host-b.command-token") == command_token(key, "host-b")
        assert read_token(tmp_path / "host-b.report-token") == report_token(key, "host-b")
    assert key not in done.output
    assert CliRunner().invoke(app, ["host", "tokens", "Host", *words[3:]]).exit_code == 1


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
    made = json.loads(CliRunner().invoke(app, [*words, "-o", "json"]).output)
    assert made["entry"]["sha256"] == hashlib.sha256(made["token"].encode()).hexdigest()
    assert made["token"] != token
