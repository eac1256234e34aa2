"""Drop-in files, which may come from anybody in the guest, and calls that do not come back."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from app_adapters.aio import AsyncHookServer
from app_adapters.server import HookServer
from ebbtide.messages.guest import GuestStatus
from guestagent.errors import DropInError, HookError, HookTimeout
from guestagent.hooks import DropIn, Hook, in_parallel, read_drop_in, read_drop_ins
from tests.guestagent.elastic import Elastic
from tests.guestagent.harness import TOKEN, Bench, Host

UID = os.getuid()


def drop_in(path: Path, body: object, mode: int = 0o644) -> str:
    path.write_text(body if isinstance(body, str) else json.dumps(body))
    path.chmod(mode)
    return str(path)


def test_a_drop_in_names_an_adapter(tmp_path: Path) -> None:
    path = drop_in(tmp_path / "a.json", {"name": "memcached", "url": "http://127.0.0.1:7070"})
    assert read_drop_in(path, UID) == DropIn("memcached", "127.0.0.1", 7070)
    path = drop_in(tmp_path / "b.json", {"name": "six", "url": "http://[::1]:7070/"})
    assert read_drop_in(path, UID) == DropIn("six", "::1", 7070)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_url_of_a_hook_is_one_that_a_drop_in_may_have_on_either_loopback(tmp_path: Path, host: str) -> None:
    try:
        server = HookServer(Elastic(100.0), token_file="none", host=host, port=0)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    port = server.address[1]
    server.stop()
    for url in (server.url, AsyncHookServer(Elastic(100.0), token_file="none", host=host, port=port).url):
        assert read_drop_in(drop_in(tmp_path / "c.json", {"name": "here", "url": url}), UID).port == port


def test_a_drop_in_names_a_socket_and_who_listens_there(tmp_path: Path) -> None:
    body = {"name": "memcached", "url": "unix:/run/ebbtide/hooks/memcached.sock"}
    found = read_drop_in(drop_in(tmp_path / "a.json", body), UID)
    assert found == DropIn("memcached", path="/run/ebbtide/hooks/memcached.sock", uid=UID)
    found = read_drop_in(drop_in(tmp_path / "b.json", {**body, "user": "nobody"}), UID)
    assert found.uid == pwd.getpwnam("nobody").pw_uid
    with pytest.raises(DropInError, match="user: there is no such user"):
        read_drop_in(drop_in(tmp_path / "c.json", {**body, "user": "no-such-user"}), UID)


@pytest.mark.parametrize("url", ["unix:/run/ours/hook.sock", "http://127.0.0.1:7070"])
def test_the_user_of_a_hook_has_each_token_of_the_host_and_nobody_else_has(guest: Bench, url: str) -> None:
    me = pwd.getpwuid(UID).pw_name
    path = drop_in(guest.adapters_dir / "app.json", {"name": "app", "url": url, "user": me})
    copy, host = guest.run_dir / "tokens" / me, guest.host()
    for token in ("A", "B"):
        host.hello(token=token)
        host.result("application.capabilities")
        info = copy.stat()
        assert (copy.read_text(), info.st_mode & 0o777, info.st_uid) == (token, 0o400, UID)
        assert copy.parent.stat().st_mode & 0o777 == 0o755
    Path(path).unlink()
    host.result("application.capabilities")
    assert list(copy.parent.iterdir()) == []


@pytest.mark.service  # only root can be another user
def test_the_copy_of_the_token_is_the_users_and_follows_no_link(guest: Bench, tmp_path: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    drop_in(guest.adapters_dir / "app.json", {"name": "app", "url": "unix:/run/a.sock", "user": "nobody"})
    directory, other = guest.run_dir / "tokens", tmp_path / "other"
    directory.mkdir(parents=True)
    other.write_text("untouched")
    for name in ("nobody", "nobody.new"):
        (directory / name).symlink_to(other)
    host = guest.host()
    host.hello()
    host.result("application.capabilities")
    assert other.read_text() == "untouched"
    copy = directory / "nobody"
    assert (copy.is_symlink(), copy.read_text(), copy.stat().st_uid) == (False, TOKEN, nobody.pw_uid)


class Overheard:
    """A process of another user on an adapter's socket: what it is told before the other end hangs up."""

    def __init__(self, path: Path) -> None:
        self.heard = b""
        # The listener's credentials are those at listen(2): a child that gives up root's.
        ours, theirs = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setuid(65534)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(path))
            listener.listen(1)
            os.write(theirs, b"ready")
            connection, _ = listener.accept()
            os.write(theirs, connection.recv(4096))
            os._exit(0)
        os.close(theirs)
        assert os.read(ours, 5) == b"ready"
        self._ours = ours

    def end(self) -> None:
        os.waitpid(self.pid, 0)
        self.heard = os.read(self._ours, 4096)
        os.close(self._ours)


@pytest.mark.service  # only root can be another user
def test_another_users_process_on_a_stopped_adapters_socket_never_sees_the_token() -> None:
    with tempfile.TemporaryDirectory(prefix="ebb") as directory:
        os.chmod(directory, 0o777)
        path = Path(directory) / "memcached.sock"
        thief = Overheard(path)
        hook = Hook(DropIn("memcached", path=str(path), uid=0), lambda: "secret-of-this-vm")
        with pytest.raises(HookError, match=f"a process of user 65534 listens on {path}, not one of user 0"):
            hook.capabilities()
        thief.end()
        assert thief.heard == b""


def test_a_hook_on_a_socket_is_asked_like_any_other(guest: Bench, host: Host) -> None:
    with tempfile.TemporaryDirectory(prefix="ebb") as directory:
        path = Path(directory) / "hooks" / "cache.sock"
        path.parent.mkdir()
        with socket.socket(socket.AF_UNIX) as old:
            old.bind(str(path))  # of an adapter that was killed
        server = HookServer(Elastic(300), token_file=str(guest.run_dir / "token"), path=str(path)).start()
        try:
            assert path.stat().st_mode & 0o777 == 0o600
            assert server.url == f"unix:{path}"
            guest.register_url("cache", server.url)
            (offer,) = host.result("application.capabilities")["adapters"]
            assert (offer["name"], offer["resources"]["memory_mib"]["current"]) == ("cache", 300)
        finally:
            server.stop()
        assert not path.exists()
        assert host.result("application.capabilities")["adapters"] == []


async def test_the_asyncio_server_serves_on_a_socket_too() -> None:
    with tempfile.TemporaryDirectory(prefix="ebb") as directory:
        path, token = Path(directory) / "a.sock", Path(directory) / "token"
        token.write_text("t")
        async with AsyncHookServer(Elastic(300), token_file=str(token), path=str(path)):
            hook = Hook(DropIn("a", path=str(path), uid=UID), lambda: "t")
            offer = await asyncio.to_thread(hook.capabilities)
            assert offer.resources["memory_mib"].current == 300
        assert not path.exists()


@pytest.mark.parametrize(
    "url",
    [
        "unix:relative.sock",
        "unix:/run/../tmp/x.sock",
        "unix:/run/with space",
        "unix:/" + "x" * 120,
        "http://10.0.0.1:80",
        "https://127.0.0.1:80",
        "http://127.0.0.1",
        "http://127.0.0.1:0",
        "http://127.0.0.1:70000",
        "http://127.0.0.1:80/path",
        "http://127.0.0.1:80@10.0.0.1:80",
        "http://127.0.0.1.example.org:80",
        "file:///etc/passwd",
        7070,
        None,
    ],
)
def test_only_loopback_urls_are_taken(tmp_path: Path, url: object) -> None:
    with pytest.raises(DropInError, match="url"):
        read_drop_in(drop_in(tmp_path / "a.json", {"name": "a", "url": url}), UID)


@pytest.mark.parametrize("name", ["", "../x", "A", "a b", "x" * 64, 1, None])
def test_only_plain_names_are_taken(tmp_path: Path, name: object) -> None:
    with pytest.raises(DropInError, match="name"):
        read_drop_in(drop_in(tmp_path / "a.json", {"name": name, "url": "http://127.0.0.1:1"}), UID)


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_may_write_is_left_out(tmp_path: Path, mode: int) -> None:
    with pytest.raises(DropInError, match="writable by no other user"):
        read_drop_in(drop_in(tmp_path / "a.json", {"name": "a", "url": "http://127.0.0.1:1"}, mode), UID)


def test_a_file_of_another_user_is_left_out(tmp_path: Path) -> None:
    path = drop_in(tmp_path / "a.json", {"name": "a", "url": "http://127.0.0.1:1"})
    with pytest.raises(DropInError, match="belong to root"):
        read_drop_in(path, UID + 1)


def test_links_and_what_is_no_file_are_left_out(tmp_path: Path) -> None:
    target = drop_in(tmp_path / "a.json", {"name": "a", "url": "http://127.0.0.1:1"})
    os.symlink(target, tmp_path / "link.json")
    os.mkfifo(tmp_path / "pipe.json")
    for name in ("link.json", "pipe.json", "absent.json"):
        with pytest.raises(DropInError, match=name):
            read_drop_in(str(tmp_path / name), UID)


@pytest.mark.parametrize("body", ["", "[]", "{", "[" * 50000, '{"name": NaN}'])
def test_a_file_that_is_no_object_is_left_out(tmp_path: Path, body: str) -> None:
    with pytest.raises(DropInError):
        read_drop_in(drop_in(tmp_path / "a.json", body), UID)


def test_a_bad_file_does_not_hide_the_good_ones_and_a_name_counts_once(tmp_path: Path) -> None:
    drop_in(tmp_path / "a.json", {"name": "good", "url": "http://127.0.0.1:1"})
    drop_in(tmp_path / "b.json", "broken")
    drop_in(tmp_path / "c.json", {"name": "good", "url": "http://127.0.0.1:2"})
    drop_in(tmp_path / "readme.txt", "not looked at")
    found, problems = read_drop_ins(str(tmp_path), UID)
    assert found == {f"{tmp_path}/a.json": DropIn("good", "127.0.0.1", 1)}
    assert [Path(path).name for path in problems] == ["b.json", "c.json"]


def test_no_more_adapters_are_asked_than_the_host_takes_an_answer_of(tmp_path: Path) -> None:
    for number in range(66):
        drop_in(tmp_path / f"{number:02}.json", {"name": f"a-{number:02}", "url": "http://127.0.0.1:1"})
    found, problems = read_drop_ins(str(tmp_path), UID)
    assert [one.name for one in found.values()] == [f"a-{number:02}" for number in range(64)]
    assert list(problems.values()) == [f"{tmp_path}/{number}.json: 64 adapters are the most" for number in (64, 65)]
    status = GuestStatus.model_json_schema()
    assert status["properties"]["applications"]["maxItems"] == 64


def test_a_directory_that_others_may_write_is_left_out_as_a_whole(tmp_path: Path) -> None:
    drop_in(tmp_path / "a.json", {"name": "a", "url": "http://127.0.0.1:1"})
    tmp_path.chmod(0o777)
    found, problems = read_drop_ins(str(tmp_path), UID)
    assert found == {}
    assert "writable by no other user" in problems[str(tmp_path)]
    assert read_drop_ins(str(tmp_path / "absent"), UID) == ({}, {})


def test_a_call_that_hangs_does_not_hold_up_the_others() -> None:
    release = threading.Event()

    def hang() -> str:
        release.wait(20)
        return "late"

    def fail() -> str:
        raise HookError("no")

    def stumble() -> str:
        raise KeyError("odd")

    results = in_parallel({"hung": hang, "good": lambda: "now", "bad": fail, "odd": stumble}, 0.2)
    release.set()
    assert results["good"] == "now"
    assert isinstance(results["hung"], HookTimeout)
    assert isinstance(results["bad"], HookError)
    assert "KeyError" in str(results["odd"])
