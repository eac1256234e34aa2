"""What a name or a sentence of somebody else must not do: become another path, or reach the terminal's controls."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.cli.managers import client_of
from ebbtide.cli.output import print_error, shown
from ebbtide.client import ManagerClient
from ebbtide.client.connection import Managers, check_path
from ebbtide.errors import EbbError


@pytest.mark.parametrize("name", ["web#old", "../hosts/x", "web?", "a/b/..", ".", "..", "", "we b", "web%2Fx", "wéb"])
def test_a_name_that_is_none_is_refused_before_anything_is_sent(name: str) -> None:
    with pytest.raises(EbbError, match="an invalid name"):
        check_path(f"/v1/vms/{name}")


@pytest.mark.parametrize(
    "path", ["/v1/vms/web", "/v1/hosts/host-a/operations/ebb-1.2:x", "/v1/events/stream", "/healthz"]
)
def test_the_managers_own_paths_pass(path: str) -> None:
    check_path(path)


async def test_a_deletion_by_such_a_name_reaches_nobody() -> None:
    async with ManagerClient("http://127.0.0.1:1", "token") as client:
        with pytest.raises(EbbError, match="an invalid name"):
            await client.delete("web#old")


def test_the_token_of_one_manager_goes_to_no_other(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    for manager, file in (("http://127.0.0.1:1", None), (None, token)):
        with pytest.raises(EbbError, match="need each other"):
            client_of(manager, file)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"two\nlines", b""])
def test_a_token_file_that_holds_no_word_is_named(tmp_path: Path, content: bytes) -> None:
    token = tmp_path / "token"
    token.write_bytes(content)
    with pytest.raises(EbbError, match=str(token)):
        client_of("http://127.0.0.1:1", token)


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(EbbError) as caught:
        Managers("http://127.0.0.1:1,http://me:hidden@127.0.0.1:2")
    assert "hidden" not in str(caught.value)


def test_a_sentence_does_not_reach_the_terminals_controls(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown("a\x1b]0;b\x07\u202ec\nd") == "a\ufffd]0;b\ufffd\ufffdc\nd"
    print_error("\x1b[31mred")
    assert "\x1b" not in capsys.readouterr().err
