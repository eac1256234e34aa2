"""Whom the hook under WSGI answers: this machine, and nobody behind a proxy."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from app_adapters.hook import foreign
from app_adapters.processes.inelastic import InelasticAdapter
from app_adapters.wsgi import hook_application

LOCAL = {"REMOTE_ADDR": "127.0.0.1"}


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"])
def test_this_machine_is_answered(peer: str) -> None:
    assert foreign(peer, ["host", "authorization"]) == ""


@pytest.mark.parametrize(
    "peer", ["", "10.0.0.1", "192.0.2.1", "::", "fe80::1", "::ffff:10.0.0.1", "localhost", "127.0.0.1.example.org"]
)
def test_other_peers_are_not(peer: str) -> None:
    assert "this machine only" in foreign(peer, [])


@pytest.mark.parametrize("header", ["HTTP_X_FORWARDED_FOR", "HTTP_FORWARDED", "HTTP_X_REAL_IP", "HTTP_VIA"])
@pytest.mark.parametrize("value", ["10.0.0.1", "127.0.0.1", ""])
def test_what_a_proxy_passed_on_is_refused_even_where_it_says_loopback(tmp_path: Path, header: str, value: str) -> None:
    status, body = ask(tmp_path, **{header: value})
    assert (status, "proxy" in body["error"]) == ("403 Forbidden", True)


def ask(tmp_path: Path, **environ: Any) -> tuple[str, dict[str, Any]]:
    (tmp_path / "token").write_text("t")
    hook = hook_application(InelasticAdapter(), str(tmp_path / "token"))
    said: list[str] = []
    base: dict[str, Any] = {"REQUEST_METHOD": "GET", "SCRIPT_NAME": "", "PATH_INFO": "/deflation/v1/capabilities"}
    base = {**base, **LOCAL, "HTTP_AUTHORIZATION": "Bearer t", "wsgi.input": io.BytesIO(b"")}
    (text,) = hook({**base, **environ}, lambda status, headers: said.append(status))
    return said[0], json.loads(text)


@pytest.mark.parametrize(("script", "path"), [("/api", "/deflation/v1/status"), ("/api/deflation", "/v1/status")])
def test_a_service_that_is_said_to_be_below_a_path_is_answered_for(tmp_path: Path, script: str, path: str) -> None:
    assert ask(tmp_path, SCRIPT_NAME=script, PATH_INFO=path)[0] == "200 OK"


def test_a_foreign_request_is_403_before_the_token_is_looked_at(tmp_path: Path) -> None:
    assert ask(tmp_path)[0] == "200 OK"
    status, body = ask(tmp_path, REMOTE_ADDR="10.0.0.1")
    assert (status, body["error"].split()[0]) == ("403 Forbidden", "10.0.0.1")


def test_where_it_is_mounted_is_part_of_the_path(tmp_path: Path) -> None:
    assert ask(tmp_path, SCRIPT_NAME="/deflation", PATH_INFO="/v1/capabilities")[0] == "200 OK"
    assert ask(tmp_path, SCRIPT_NAME="/other", PATH_INFO="/v1/capabilities")[0] == "404 Not Found"


def test_under_several_processes_it_says_why_it_cannot_work(tmp_path: Path) -> None:
    status, body = ask(tmp_path, **{"wsgi.multiprocess": True})
    assert status == "503 Service Unavailable"
    assert "processes" in body["error"]
    assert "app_adapters.shared.SharedHookServer" in body["error"]


@pytest.mark.parametrize(
    ("environ", "status"),
    [
        ({"CONTENT_LENGTH": "x"}, "411 Length Required"),
        ({"CONTENT_LENGTH": "-1"}, "411 Length Required"),
        ({"HTTP_TRANSFER_ENCODING": "chunked"}, "411 Length Required"),
        ({"CONTENT_LENGTH": "65537"}, "413 Request Entity Too Large"),
        ({"CONTENT_LENGTH": ""}, "200 OK"),
    ],
)
def test_bodies_need_a_length_that_is_not_too_long(tmp_path: Path, environ: dict[str, str], status: str) -> None:
    assert ask(tmp_path, **environ)[0] == status
