"""A CA that follows another one, from the first step to the last, with a manager and a host agent over mutual TLS."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from cluster_manager.api.app import make_app as manager_app
from cluster_manager.authority import CertificateAuthority
from cluster_manager.errors import RequestError
from cluster_manager.manager import Manager
from cluster_manager.settings import Settings
from ebbtide.cli.main import app
from ebbtide.lab.state import write_private
from ebbtide.rest.access import Certificates
from ebbtide.rest.credentials import command_token, report_token
from ebbtide.rest.gate import Gate
from ebbtide.rest.roles import Role
from ebbtide.rest.settings import AccessSettings
from ebbtide.rest.tls import KeyPair, client_context
from ebbtide.rest.tokens import principal
from hostagent.control import asking, renewal
from tests.manager import cluster
from tests.manager.api.test_enrolment import request
from tests.manager.api.test_enrolment_attacks import Parts
from tests.manager.api.test_mutual_tls import BROKEN, agent_of
from tests.manager.cluster import QUICK, TOKEN
from tests.manager.fake_agent import HOSTS_KEY, FakeAgent
from tests.rest.pki import Pki
from tests.waiting import until

each_store = pytest.mark.usefixtures("each_store")


class HostFiles:
    """What one host has been given: copies, which nobody but its agent changes."""

    def __init__(self, directory: Path, pki: Pki) -> None:
        directory.mkdir()
        self._directory = directory
        self._pki = pki
        self.ca = directory / "ca.pem"
        shutil.copy(pki.ca, self.ca)

    def pair(self, name: str) -> KeyPair:
        made = self._pki.pair(name)
        own = KeyPair(self._directory / "host.pem", self._directory / "host.key")
        shutil.copy(made.certificate, own.certificate)
        write_private(own.key, made.key.read_text())
        return own

    @property
    def cas(self) -> int:
        """How many it trusts."""
        return self.ca.read_text().count("BEGIN CERTIFICATE")


@contextlib.asynccontextmanager
async def managing(path: Path, port: int) -> AsyncIterator[Manager]:
    """A manager with what stands in its directory by now, as it is after a start."""
    tls, next_key = path / "tls", path / "tls/next-ca.key"
    own = KeyPair(tls / "ebb-manager.pem", tls / "ebb-manager.key")
    authority = CertificateAuthority.load(
        tls / "ca.pem", tls / "ca.key", own.certificate, next_key if next_key.exists() else None
    )
    access = AccessSettings(own=own, client_ca=tls / "ca.pem")
    people = [principal("people", Role.ADMIN, TOKEN)]
    gate = Gate(access, people, Certificates(of_host=True), required=False, hosts_key=HOSTS_KEY, signs=True)
    settings = Settings(
        cluster.database_in(path),
        TOKEN,
        HOSTS_KEY,
        agents=QUICK,
        agent_tls=gate.calls,
        authority=authority,
        certificate_days=1.0,
        url=f"https://127.0.0.1:{port}",
    )
    manager = Manager(settings)
    async with gate.serve(manager_app(manager, gate.access), "127.0.0.1", port, 0.0):
        yield manager


async def ebb(path: Path, port: int, *words: str) -> tuple[int, str]:
    """A command that asks the manager; its exit code, and what it says, with what the daemons log meanwhile."""
    reach = ["--manager", f"https://127.0.0.1:{port}", "--token-file", str(path / "token")]
    argv = ["--ca", str(path / "tls/ca.pem"), *words, *reach]
    done = await asyncio.to_thread(CliRunner().invoke, app, argv)
    return done.exit_code, f"{done.output}{done.exception or ''}"


async def report(path: Path, port: int, host: str, own: KeyPair) -> int:
    body = FakeAgent(host, cpu_cores=4.0, memory_mib=1000.0).report().model_copy(update={"url": "https://127.0.0.1:9"})
    headers = {"Authorization": f"Bearer {report_token(HOSTS_KEY, host)}"}
    connector = aiohttp.TCPConnector(ssl=client_context(path / "tls/ca.pem", own))
    async with (
        aiohttp.ClientSession(connector=connector, headers=headers) as session,
        session.post(f"https://127.0.0.1:{port}/v1/hosts/{host}/report", json=body.model_dump(mode="json")) as answer,
    ):
        return answer.status


async def heard_by(url: str, tls: ssl.SSLContext) -> int:
    """How an agent answers whoever calls with this."""
    headers = {"Authorization": f"Bearer {command_token(HOSTS_KEY, 'host-a')}"}
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls), headers=headers) as session,
        session.get(f"{url}/v1/host") as answer,
    ):
        return answer.status


@each_store
async def test_hosts_take_over_the_ca_that_follows_and_the_one_before_is_dropped_when_all_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "EVERY_S", 0.1)
    # A manager that ends within this process may leave a connection in its handshake open.
    monkeypatch.setattr(asking, "LIMIT_S", 2.0)
    tls = tmp_path / "tls"
    pki = Pki(tls)
    before = pki.pair("ebb-manager")
    old_manager = HostFiles(tmp_path / "old", pki).pair("ebb-manager")
    behind = HostFiles(tmp_path / "behind", pki).pair("host-b")
    write_private(tmp_path / "token", TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    files: Any = HostFiles(tmp_path / "host-a", pki)
    old_ca = files.ca.read_bytes()
    async with agent_of(tmp_path, files, f"https://127.0.0.1:{port}") as agent:
        async with managing(tmp_path, port) as manager:
            await until(lambda: manager.hosts.get("host-a") is not None)
            assert "no other CA is to follow" in (await ebb(tmp_path, port, "ca", "show"))[1]
            code, said = await ebb(tmp_path, port, "ca", "finish", str(tls))
            assert (code, "there is no CA that is to follow" in said) == (1, True)
        assert CliRunner().invoke(app, ["ca", "next", str(tls)]).exit_code == 0
        assert files.ca.read_bytes() == old_ca
        async with managing(tmp_path, port) as manager:
            # By itself: it trusts both, and has a certificate of the one that follows.
            await until(lambda: manager.enrolments.rollover(["host-a"]).hosts == ())
            assert files.cas == 2
            assert await report(tmp_path, port, "host-b", behind) == 200
            code, said = await ebb(tmp_path, port, "ca", "finish", str(tls))
            assert (code, "no certificate of the CA that is to follow: host-b; nothing was dropped" in said) == (
                1,
                True,
            )
            assert (tls / "ca.pem").read_text().count("BEGIN CERTIFICATE") == 2
            code, said = await ebb(tmp_path, port, "ca", "show")
            assert "1 of 2 hosts have a certificate of the CA that is to follow; not yet: host-b" in said
            assert await heard_by(agent.host.slice.url, client_context(pki.ca, old_manager)) == 200
            await manager.enrolments.revoke("host-b", "it is behind")
            code, said = await ebb(tmp_path, port, "ca", "finish", str(tls))
            assert code == 0, said
            # Until the manager shows another certificate, nothing is dropped by hosts.
            assert files.cas == 2
        assert before.certificate.read_bytes() != old_manager.certificate.read_bytes()
        async with managing(tmp_path, port) as manager:
            await until(lambda: files.ca.read_bytes() == (tls / "ca.pem").read_bytes())
            assert files.cas == 1
            # It is in force then.
            await until(lambda: not list(files.ca.parent.glob("*.before")))
            await until(lambda: manager.hosts.get("host-a") is not None and manager.hosts.state("host-a")[0] == "ready")
            # What the CA of before has signed counts no more, on either side.
            new = client_context(files.ca, old_manager)
            with pytest.raises(BROKEN):
                await heard_by(agent.host.slice.url, new)
            with pytest.raises(BROKEN):
                await report(tmp_path, port, "host-b", behind)
            own = KeyPair(tls / "ebb-manager.pem", tls / "ebb-manager.key")
            assert await heard_by(agent.host.slice.url, client_context(files.ca, own)) == 200
            assert "no other CA is to follow" in (await ebb(tmp_path, port, "ca", "show"))[1]


@each_store
async def test_a_host_that_joins_while_a_ca_is_to_follow_gets_the_present_one_and_is_waited_for(tmp_path: Path) -> None:
    pki = Pki(tmp_path / "tls")
    pki.pair("ebb-manager")
    write_private(tmp_path / "token", TOKEN)
    assert CliRunner().invoke(app, ["ca", "next", str(tmp_path / "tls")]).exit_code == 0
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    async with managing(tmp_path, port) as manager:
        code, line = await ebb(tmp_path, port, "host", "invite", "host-c")
        assert code == 0, line
        (word,) = [word for word in line.split() if word.startswith("<<<")]
        token, _, named = word.removeprefix("<<<").partition(".")
        assert named == manager.enrolments.authority.fingerprint
        following = manager.enrolments.following
        assert following is not None
        assert named != following.fingerprint
        body = {"token": token, "host": "host-c", "address": "127.0.0.1", "csr": request("host-c")}
        connector = aiohttp.TCPConnector(ssl=client_context(pki.ca))
        async with aiohttp.ClientSession(connector=connector) as session:
            url = f"https://127.0.0.1:{port}/v1"
            async with session.post(f"{url}/enrolments", json=body) as answer:
                joined = await answer.json()
                assert answer.status == 200, joined
            assert joined["ca"] == manager.enrolments.authority.pem
            async with session.get(f"{url}/ca/next") as answer:
                assert (await answer.json())["ca"] == following.pem
        code, said = await ebb(tmp_path, port, "ca", "finish", str(tmp_path / "tls"))
        assert (code, "host-c" in said) == (1, True)


async def test_a_ca_that_has_ended_vouches_for_no_other_and_hosts_are_told_so(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.authority = replace(parts.authority, following=parts.authority)
    manager = await parts.term()
    with pytest.raises(RequestError, match="cannot vouch for the one that is to follow") as refused:
        manager.successor()
    assert refused.value.status == 409
    await manager._store.close()
