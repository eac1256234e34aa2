"""The parts of the guest image that need no guest: caching, modules, scripts, labd and the link to it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import socket
import stat
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ebbtide.lab import image, rootfs
from ebbtide.lab.cluster import free_ports
from ebbtide.lab.errors import ChannelOperationFailed, ImageError, LinkError, MissingTool
from ebbtide.lab.guest import labd
from ebbtide.lab.guest_link import LabLink, channel_path, value_digest
from ebbtide.lab.image import build_image
from hostagent.mechanisms import initramfs


def test_modules_are_loaded_after_what_they_depend_on() -> None:
    dependencies = "k/virtio_pci.ko: k/virtio.ko k/virtio_ring.ko\nk/virtio.ko: k/virtio_ring.ko\nk/virtio_ring.ko:\n"
    order = rootfs.load_order(dependencies, "", ["virtio_pci"])
    assert order == ["k/virtio_ring.ko", "k/virtio.ko", "k/virtio_pci.ko"]


def test_a_module_that_is_built_in_is_not_loaded() -> None:
    assert rootfs.load_order("k/a.ko: k/b-c.ko\n", "k/b-c.ko\n", ["a", "b_c"]) == ["k/a.ko"]


def test_a_module_that_the_kernel_lacks_is_named() -> None:
    with pytest.raises(ImageError, match="virtio_mem"):
        rootfs.load_order("", "", ["virtio_mem"])


def test_the_variable_overrides_the_mirror_of_the_host() -> None:
    assert (
        rootfs.debian_mirror({"EBB_DEBIAN_MIRROR": "http://mirror.example/debian/"}) == "http://mirror.example/debian"
    )


def test_a_missing_tool_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(MissingTool, match="apt-get install busybox-static"):
        build_image(tmp_path)


def test_a_package_that_runs_in_the_guest_must_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(image, "GUEST_PACKAGES", ("no_such_package",))
    with pytest.raises(ImageError, match="no_such_package"):
        build_image(tmp_path)


def test_a_failed_build_leaves_only_the_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(tree: Path, mirror: str, report: Callable[[str, float], None]) -> None:
        (tree / "half").mkdir()
        raise ImageError("the mirror is down")

    monkeypatch.setattr(rootfs, "make_rootfs", fail)
    with pytest.raises(ImageError, match="mirror is down"):
        build_image(tmp_path / "cache", mirror="http://mirror.example/debian")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


def test_under_a_strict_umask_qemu_can_read_an_image_and_the_guests_users_their_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: dict[str, int] = {}
    (busybox := tmp_path / "busybox").touch()

    def make_rootfs(tree: Path, mirror: str, report: Callable[[str, float], None]) -> None:
        (tree / "ebbtide").mkdir()
        for name, text in (("order", ""), ("version", "6.1\n"), ("vmlinuz", "kernel")):
            (tree / "ebbtide" / name).write_text(text)
        tree.chmod(0o700)  # as an archive of before has it

    def run(argv: list[str | Path]) -> str:
        match [str(word) for word in argv]:
            case ["tar", _, _, _, made, *_] | ["qemu-img", "convert", *_, made]:
                Path(made).touch()
            case ["mke2fs", *_, tree, _, _]:
                for path in (Path(tree), Path(tree) / "opt", Path(tree) / "opt/ebbtide/guestagent"):
                    found[path.name] = stat.S_IMODE(path.stat().st_mode)
        return ""

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(rootfs, "make_rootfs", make_rootfs)
    monkeypatch.setattr(image, "run", run)
    monkeypatch.setattr(image, "tool", lambda name, _: str(busybox) if name == "busybox" else name)
    os.umask(0o077)  # set back after each test
    built = build_image(tmp_path / "var" / "cache" / "image", mirror="http://mirror.example/debian")
    assert set(found.values()) == {0o755}
    for path in (built.base.parent, *list(built.base.parents)[1:4]):
        assert stat.S_IMODE(path.stat().st_mode) == 0o755, path
    assert {stat.S_IMODE(path.stat().st_mode) for path in built.base.parent.iterdir()} == {0o644}


def test_a_changed_guest_file_changes_the_image_but_not_the_root_file_system(tmp_path: Path) -> None:
    busybox, source = tmp_path / "busybox", tmp_path / "agent.py"
    busybox.touch()
    source.write_text("one")
    first = image._image_key(image._rootfs_key(), {"opt/agent.py": source}, busybox)
    assert image._image_key(image._rootfs_key(), {"opt/agent.py": source}, busybox) == first
    source.write_text("two")
    assert image._image_key(image._rootfs_key(), {"opt/agent.py": source}, busybox) != first


def test_an_archive_is_what_cpio_reads(tmp_path: Path) -> None:
    data = initramfs.archive(
        [
            initramfs.directory("bin"),
            initramfs.file("bin/tool", b"#!/bin/sh\n", 0o755),
            initramfs.link("bin/other", "tool"),
        ]
    )
    done = subprocess.run(
        ["busybox", "cpio", "-i"], input=data, cwd=tmp_path, capture_output=True, check=False, timeout=20
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "bin/other").read_bytes() == b"#!/bin/sh\n"
    assert stat.S_IMODE((tmp_path / "bin/tool").stat().st_mode) == 0o755


def test_busybox_has_all_that_the_scripts_of_the_guest_call() -> None:
    applets = set(subprocess.run(["busybox", "--list"], capture_output=True, text=True, check=True).stdout.split())
    for name in ("init", "initrd-init", "shutdown", "power-button"):
        script = image.GUEST_FILES / name
        assert subprocess.run(["busybox", "sh", "-n", script], check=False).returncode == 0
        assert set(re.findall(r"busybox ([a-z]\w*)", script.read_text())) <= applets


@pytest.fixture(scope="module")
def memcached() -> Iterator[None]:
    (port,) = free_ports(1)
    process = subprocess.Popen(["memcached", "-u", "nobody", "-l", "127.0.0.1", "-p", str(port), "-U", "0", "-m", "64"])
    try:
        deadline_s = time.monotonic() + 20
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < deadline_s
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(labd, "MEMCACHED", ("127.0.0.1", port))
            yield
    finally:
        process.terminate()
        process.wait(20)


@asynccontextmanager
async def guest(path: Path, lines_before: bytes = b"") -> AsyncIterator[None]:
    """labd's answers behind a Unix socket, as QEMU would show them."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(lines_before)
        while line := await reader.readline():
            reply = labd.answer(line)
            if reply is not None:
                writer.write(reply)
        writer.close()

    server = await asyncio.start_unix_server(talk, path, limit=1 << 20)
    async with server:
        yield


@pytest.mark.usefixtures("memcached")
async def test_the_link_fills_a_real_memcached_and_reads_it_back(tmp_path: Path) -> None:
    async with guest(tmp_path / "s"), await LabLink.connect(tmp_path / "s") as link:
        filled = await link.call("memcached.fill", prefix="k", count=300, value_bytes=1000, start=5)
        assert filled["stored"] == 300
        found = (await link.call("memcached.get", keys=["k5", "k304", "k305"]))["found"]
        assert found == {"k5": value_digest("k5", 1000), "k304": value_digest("k304", 1000)}
        assert (await link.call("memcached.stats", args=""))["curr_items"] == "300"
        assert (await link.call("rss", name="memcached"))["rss_mib"] > 0


async def test_leftovers_of_an_earlier_conversation_are_dropped(tmp_path: Path) -> None:
    leftovers = b'half of a line"}\n{"id": 1, "ok": true, "result": {"nonce": "other"}}\n[]\n'
    async with guest(tmp_path / "s", leftovers), await LabLink.connect(tmp_path / "s", 20) as link:
        assert "uptime_s" in await link.call("ping", nonce="n")


async def test_a_guest_that_never_answers_ends_the_connection(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(silent, tmp_path / "s"):
        with pytest.raises(LinkError, match="did not answer"):
            await LabLink.connect(tmp_path / "s", timeout_s=0.3)


async def test_no_socket_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match="did not answer"):
        await LabLink.connect(tmp_path / "none")


async def test_a_failure_in_the_guest_reaches_the_caller(tmp_path: Path) -> None:
    async with guest(tmp_path / "s"), await LabLink.connect(tmp_path / "s") as link:
        with pytest.raises(ChannelOperationFailed, match="unknown op"):
            await link.call("nonsense")
        with pytest.raises(ChannelOperationFailed, match="FileNotFoundError"):
            await link.call("read", path=str(tmp_path / "none"))
        with pytest.raises(ChannelOperationFailed, match="field argv"):
            await link.call("exec")
        with pytest.raises(ChannelOperationFailed, match=r"longer than 0\.2 s"):
            await link.call("exec", argv=["sleep", "20"], timeout_s=0.2)


@pytest.mark.parametrize("key", ["", "a b", "a\r\nflush_all", "ä", "x" * 251])
def test_a_key_that_would_break_the_protocol_is_refused(key: str) -> None:
    reply = json.loads(labd.answer(json.dumps({"id": 1, "op": "memcached.get", "keys": [key]}).encode()) or b"{}")
    assert reply["ok"] is False
    assert "field keys" in reply["error"]


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"\xff\xfe", b'"text"'])
def test_a_line_that_is_no_request_gets_no_answer(line: bytes) -> None:
    assert labd.answer(line) is None


def test_the_value_of_a_key_is_its_hash_repeated() -> None:
    assert labd.value_of("k", 100) == (hashlib.sha256(b"k").hexdigest() * 2).encode()[:100]
    assert hashlib.sha256(labd.value_of("k", 100)).hexdigest() == value_digest("k", 100)


def test_a_channel_is_found_in_the_xml_of_a_running_domain() -> None:
    channel = "<channel><source mode='bind' path='/run/x'/><target name='io.ebbtide.lab.0'/></channel>"
    assert channel_path(f"<domain><devices>{channel}</devices></domain>") == Path("/run/x")
    with pytest.raises(LinkError, match="no channel"):
        channel_path("<domain><devices/></domain>")


def test_what_runs_within_a_root_file_system_is_told_of_no_directory_outside_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts of packages make their temporary files where TMPDIR says."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:3128")
    said = rootfs.run(["env"]).splitlines()
    assert "http_proxy=http://127.0.0.1:3128" in said
    assert not any(str(tmp_path) in line for line in said)
