"""What other users of the guest can hold, and a service then has its hook all the same, or says who is in the way."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from app_adapters.asgi import HookApplication, hook_application
from app_adapters.hook import SEVERAL
from app_adapters.processes.inelastic import InelasticAdapter
from app_adapters.shared import SharedHookServer

SERVER = ("127.0.0.1", 47001)


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "run" / "token"
    path.parent.mkdir(mode=0o755)
    path.write_text("t")
    return path


async def asked(
    hook: HookApplication, path: str = "/healthz", server: tuple[str, int] = SERVER
) -> tuple[int, dict[str, Any]]:
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "server": server}
    await hook({**scope, "client": ("127.0.0.1", 5)}, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


# --- several processes that know of each other ------------------------------------------------------------------------


def test_the_lock_of_several_processes_is_their_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "m" / "h"  # the sockets' paths are to be short
    umask = os.umask(0)
    try:
        server = SharedHookServer(InelasticAdapter(), str(path)).start()
    finally:
        os.umask(umask)
    server.stop()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert Path(f"{path}.lock").stat().st_mode & 0o777 == 0o600


def test_a_lock_of_an_earlier_version_is_closed_to_others(tmp_path: Path) -> None:
    lock = tmp_path / "h.lock"
    lock.touch(0o644)
    SharedHookServer(InelasticAdapter(), str(tmp_path / "h")).start().stop()
    assert lock.stat().st_mode & 0o777 == 0o600


def test_a_lock_that_is_another_users_or_a_link_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "linked.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"linked\.lock"):
        SharedHookServer(InelasticAdapter(), str(tmp_path / "linked"))
    (tmp_path / "theirs.lock").touch()
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(OSError, match=r"theirs\.lock is another user's"):
        SharedHookServer(InelasticAdapter(), str(tmp_path / "theirs"))
    assert not (tmp_path / "elsewhere").exists()


# --- one process under ASGI -------------------------------------------------------------------------------------------


async def test_under_asgi_a_name_that_another_user_holds_keeps_no_service_from_its_hook(token_file: Path) -> None:
    hook = hook_application(InelasticAdapter(), str(token_file))
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind("\0ebbtide-hook:{}:{}".format(*SERVER))
        assert (await asked(hook))[0] == 200
    second = hook_application(InelasticAdapter(), str(token_file))
    assert await asked(second) == (503, {"error": SEVERAL})
    await hook.stop()
    assert (await asked(second))[0] == 200
    await second.stop()


@pytest.mark.parametrize("variable", ["RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"])
async def test_under_asgi_the_users_own_directory_is_taken_where_the_system_gives_one(
    token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    monkeypatch.setenv(variable, str(own))
    hook = hook_application(InelasticAdapter(), str(token_file))
    assert (await asked(hook))[0] == 200
    (lock,) = own.iterdir()
    assert lock.stat().st_mode & 0o777 == 0o600
    await hook.stop()


async def test_under_asgi_without_such_a_directory_the_answer_names_both_that_may_be_in_the_way(
    token_file: Path,
) -> None:
    token_file.parent.chmod(0o777)
    hook = hook_application(InelasticAdapter(), str(token_file))
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind("\0ebbtide-hook:{}:{}".format(*SERVER))
        status, answer = await asked(hook)
        assert status == 503
        assert "another user's" in answer["error"]
        assert SEVERAL in answer["error"]
    assert (await asked(hook))[0] == 200
    await hook.stop()


async def test_under_asgi_a_lock_that_cannot_be_had_says_so(token_file: Path) -> None:
    hook = hook_application(InelasticAdapter(), str(token_file))
    lock = token_file.parent / "ebbtide-hook%3A127.0.0.1%3A47001.lock"
    lock.symlink_to("elsewhere")
    status, answer = await asked(hook)
    assert status == 503
    assert answer["error"].startswith("whether several processes answer here cannot be told")
    lock.unlink()
    assert (await asked(hook))[0] == 200
    await hook.stop()
