"""Hosts join by an invitation that works once: attacks on that, and the whole way with a real manager over TLS."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import re
import shlex
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from cluster_manager.authority import CertificateAuthority
from cluster_manager.errors import RequestError
from cluster_manager.inventory import enrolment
from ebbtide.client import ManagerClient
from ebbtide.lab.state import write_private
from ebbtide.messages.enrolment import EnrolmentRequest
from ebbtide.rest.access import Certificates
from ebbtide.rest.credentials import report_token
from ebbtide.rest.errors import AccessError
from ebbtide.rest.gate import Gate
from ebbtide.rest.settings import AccessSettings
from ebbtide.rest.tls import client_context
from hostagent.control.renewal import due, load
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.main import options_of
from hostagent.operations.agent import Agent
from hostagent.options import access_of, address_of
from hostagent.service import serve
from hostagent.state.journal import Journal
from hostagent.vm.host import Host, Slice
from tests.hostagent.agent_process import CAPACITY, OVERHEAD_MIB
from tests.hostagent.fake_hypervisor import FakeHypervisor
from tests.hostagent.world import World
from tests.manager.cluster import TOKEN, Cluster, cluster_of
from tests.manager.fake_agent import HOSTS_KEY, FakeAgent
from tests.rest.pki import Pki
from tests.waiting import until

each_store = pytest.mark.usefixtures("each_store")
REPO = Path(__file__).resolve().parents[3]
URL = "https://127.0.0.1:7100"


def request(name: str = "host-b", key: Any = None, subject: list[Any] | None = None, ca: bool = False) -> str:
    """A request for a certificate, PEM."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    names = subject or [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name(names))
    if ca:
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        everywhere = x509.SubjectAlternativeName([x509.DNSName("ebb-manager")])
        builder = builder.add_extension(everywhere, critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


@contextlib.asynccontextmanager
async def enrolling(tmp_path: Path, *agents: FakeAgent, url: str | None = URL) -> AsyncIterator[Cluster]:
    Pki(tmp_path / "ca")
    authority = CertificateAuthority.load(tmp_path / "ca/ca.pem", tmp_path / "ca/ca.key")
    async with cluster_of(tmp_path, *agents, url=url, authority=authority) as cluster:
        yield cluster


async def invite(cluster: Cluster, **body: Any) -> str:
    status, answer = await cluster.call("POST", "/v1/invitations", json=body)
    assert status == 200, answer
    token: str = answer["token"]
    return token


async def enrol(cluster: Cluster, token: str, host: str = "host-b", **body: Any) -> tuple[int, Any]:
    """As a stranger: no token but the invitation's."""
    body = {"host": host, "address": "127.0.0.1", "csr": request(host), **body}
    return await cluster.call("POST", "/v1/enrolments", token="", json={"token": token, **body})


@each_store
async def test_an_invitation_enrols_one_host_with_one_key_also_after_a_restart(tmp_path: Path) -> None:
    async with enrolling(tmp_path) as cluster:
        token = await invite(cluster)
        await cluster.stop_manager()
        await cluster.start_manager()
        csr = request()
        status, joined = await enrol(cluster, token, csr=csr)
        assert status == 200, joined
        assert joined["report_token"] == report_token(HOSTS_KEY, "host-b")
        certificate = x509.load_pem_x509_certificate(joined["certificate"].encode())
        assert certificate.subject.rfc4514_string() == "CN=host-b"
        authority = CertificateAuthority.load(tmp_path / "ca/ca.pem", tmp_path / "ca/ca.key")
        assert token.endswith(f".{authority.fingerprint}")
        assert re.fullmatch("[0-9a-f]+", token.partition(".")[0]), "a word of a command, which begins with no hyphen"
        certificate.verify_directly_issued_by(authority.certificate)
        # An answer that was lost is asked for again; another key, or another host, is another matter.
        assert (await enrol(cluster, token, csr=csr))[0] == 200
        for host in ("host-b", "host-c"):
            status, problem = await enrol(cluster, token, host)
            assert (status, problem["field"]) == (403, "token")
            assert "was used by host-b already" in problem["detail"]


@each_store
async def test_a_host_that_was_forgotten_is_not_waited_for_by_a_ca_that_is_to_follow_and_its_id_is_free(
    tmp_path: Path,
) -> None:
    for name in ("ca", "next"):
        Pki(tmp_path / name)
    present, following = (
        CertificateAuthority.load(tmp_path / name / "ca.pem", tmp_path / name / "ca.key") for name in ("ca", "next")
    )
    agent = FakeAgent("host-b")
    authority = replace(present, following=following)
    async with cluster_of(tmp_path, agent, url="http://127.0.0.1:7100", authority=authority) as cluster:
        token = await invite(cluster, host="host-b")
        assert (await enrol(cluster, token))[0] == 200
        assert (await cluster.get("/v1/ca/rollover"))["hosts"] == ["host-b"]
        await agent.die()

        async def forgotten() -> bool:
            return (await cluster.call("DELETE", "/v1/hosts/host-b"))[0] == 200

        await until(forgotten)
        for _ in range(2):
            assert (await cluster.get("/v1/ca/rollover"))["hosts"] == []
            await cluster.stop_manager()
            await cluster.start_manager()
        status, problem = await enrol(cluster, token)
        assert (status, problem["field"]) == (403, "token"), "another host may have the id by now"
        assert (await enrol(cluster, await invite(cluster)))[0] == 200


@each_store
async def test_of_two_hosts_that_come_at_once_with_one_invitation_one_joins(tmp_path: Path) -> None:
    async with enrolling(tmp_path) as cluster:
        token = await invite(cluster)
        came = await asyncio.gather(*(enrol(cluster, token, f"host-{number}") for number in range(8)))
        assert sorted(status for status, _ in came) == [200] + [403] * 7


@each_store
async def test_an_invitation_that_has_been_used_keeps_no_place_of_one_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrolment, "MOST_INVITATIONS", 2)
    async with enrolling(tmp_path) as cluster:
        for number in range(3):
            joined = await enrol(cluster, await invite(cluster), f"host-{number}")
            assert joined[0] == 200, joined
        for _ in range(2):
            await invite(cluster)
        status, problem = await cluster.call("POST", "/v1/invitations", json={})
        assert (status, problem["detail"]) == (409, "2 invitations wait for their hosts, which is the most")


@each_store
async def test_what_is_no_invitation_for_this_host_now_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async with enrolling(tmp_path, FakeAgent("host-a", cpu_cores=1.0, memory_mib=1000.0)) as cluster:
        named = await invite(cluster, host="host-x")
        assert "is for host-x" in (await enrol(cluster, named))[1]["detail"]
        known = await enrol(cluster, await invite(cluster), "host-a")
        assert (known[0], known[1]["field"]) == (409, "host")
        assert (await enrol(cluster, await invite(cluster, host="host-a"), "host-a"))[0] == 200
        for reserved in ("ebb-manager", "ca"):
            assert (await enrol(cluster, await invite(cluster), reserved))[0] == 400
        assert (await enrol(cluster, "A" * 43))[0] == 403
        late = await invite(cluster, expires_s=10.0)
        assert cluster.manager is not None
        enrolments = cluster.manager.enrolments
        monkeypatch.setattr(enrolments, "_clock", lambda was=enrolments._clock: was() + 11)
        assert (await enrol(cluster, late))[0] == 403
        stored = await cluster.manager.store.knowledge("enrolment")
        said = capfd.readouterr()
        for token in (named, late):
            secret = token.partition(".")[0]
            assert secret not in str(stored)
            assert secret not in said.out + said.err


@each_store
async def test_of_a_request_for_a_certificate_only_the_key_counts(tmp_path: Path) -> None:
    async with enrolling(tmp_path) as cluster:
        status, joined = await enrol(cluster, await invite(cluster), csr=request(ca=True))
        assert status == 200
        certificate = x509.load_pem_x509_certificate(joined["certificate"].encode())
        assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert [str(name.value) for name in names] == ["127.0.0.1"]
        token = await invite(cluster)
        both = [x509.NameAttribute(NameOID.COMMON_NAME, name) for name in ("host-b", "ebb-manager")]
        weak = rsa.generate_private_key(public_exponent=65537, key_size=1024)
        good = request()
        at = len(good) - 60
        for csr in (
            request("ebb-manager"),
            request(subject=both),
            request(key=weak),
            good[:at] + ("A" if good[at] != "A" else "B") + good[at + 1 :],
            "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n",
            good + "A" * 9000,
            "",
            None,
        ):
            status, problem = await enrol(cluster, token, csr=csr)
            assert (status, problem["field"]) == (400, "csr"), csr
        assert (await enrol(cluster, token, address="10.0.0.1\n"))[0] == 400
        assert (await enrol(cluster, token))[0] == 409, "host-b is on its way: another invitation does not take its id"
        assert (await enrol(cluster, token, "host-c"))[0] == 200, "what was refused has not used it up"


@each_store
@pytest.mark.parametrize("address", ["192.0.2.1:7070", "host-b.", "1::2::3"])
async def test_an_address_that_is_none_is_named_by_the_refusal(tmp_path: Path, address: str) -> None:
    said = (400, "address", f"address: {address!r} is neither an IP address nor a name")
    async with enrolling(tmp_path, FakeAgent("host-a", cpu_cores=1.0, memory_mib=1000.0)) as cluster:
        token = await invite(cluster)
        status, problem = await enrol(cluster, token, address=address)
        assert (status, problem["field"], problem["detail"]) == said
        own, body = report_token(HOSTS_KEY, "host-a"), {"csr": request("host-a"), "address": address}
        status, problem = await cluster.call("POST", "/v1/hosts/host-a/certificate", own, json=body)
        assert (status, problem["field"], problem["detail"]) == said
        assert (await enrol(cluster, token))[0] == 200, "what was refused has not used it up"


@each_store
async def test_what_the_managers_certificate_names_since_a_reload_is_no_hosts_either(tmp_path: Path) -> None:
    pki = Pki(tmp_path / "ca")
    own = pki.pair("ebb-manager", ("192.0.2.1",))
    gate = Gate(AccessSettings(own=own, client_ca=pki.ca), [], Certificates(), required=False, signs=True)
    authority = CertificateAuthority.load(pki.ca, tmp_path / "ca/ca.key", own.certificate)
    async with cluster_of(tmp_path, url=URL, authority=authority, certificates=gate.certificates) as cluster:
        token = await invite(cluster)
        pki.pair("ebb-manager", ("192.0.2.7", "host-b"))
        gate.read_again()()
        assert cluster.manager is not None
        for address in ("192.0.2.1", "192.0.2.7"):
            asked = EnrolmentRequest(
                token=token.partition(".")[0], host="host-c", address=address, csr=request("host-c")
            )
            with pytest.raises(RequestError, match=f"{address} is a manager's"):
                await cluster.manager.enrolments.enrol(asked)
        status, problem = await enrol(cluster, token)
        why = "since the manager's certificate names it: give the host another id (--id)"
        assert (status, problem["detail"]) == (400, f"host: no host may be called host-b, {why}")
        status, problem = await enrol(cluster, token, "ca")
        assert (status, problem["detail"]) == (400, "host: no host may be called ca")
        assert (await enrol(cluster, token, "host-c"))[0] == 200


@each_store
async def test_a_host_that_was_revoked_is_neither_heard_nor_taken_in_again(tmp_path: Path) -> None:
    agent = FakeAgent("host-a", cpu_cores=1.0, memory_mib=1000.0)
    async with enrolling(tmp_path, agent) as cluster:
        kept = await invite(cluster, host="host-a")
        path = "/v1/hosts/{}/revocation"
        assert (await cluster.call("POST", path.format("Host_Z"), json={"reason": "x"}))[0] == 404
        status, told = await cluster.call("POST", path.format("host-a"), json={"reason": "it was stolen"})
        assert status == 200, told
        for _ in range(2):
            assert (await cluster.get("/v1/hosts/host-a"))["state"] == "silent"
            report = agent.report().model_dump(mode="json")
            token = report_token(HOSTS_KEY, "host-a")
            for name, body in (("report", report), ("certificate", {"csr": request(), "address": "127.0.0.1"})):
                status, problem = await cluster.call("POST", f"/v1/hosts/host-a/{name}", token, json=body)
                assert (status, problem["detail"]) == (403, "host-a is revoked: it was stolen")
            assert (await enrol(cluster, kept, "host-a"))[0] == 409
            assert (await cluster.call("POST", "/v1/invitations", json={"host": "host-a"}))[0] == 409
            await cluster.stop_manager()
            await cluster.start_manager()


@each_store
async def test_a_host_that_is_gone_or_has_not_come_yet_can_be_revoked(tmp_path: Path) -> None:
    """Its tokens and its certificate are good for as long as there are the keys of which they are made."""
    agent = FakeAgent("host-a", cpu_cores=1.0, memory_mib=1000.0)
    async with enrolling(tmp_path, agent) as cluster:
        token = report_token(HOSTS_KEY, "host-a")
        renewal = {"csr": request("host-a"), "address": "127.0.0.1"}
        renew = ("POST", "/v1/hosts/host-a/certificate", token)
        await agent.die()

        async def silent() -> bool:
            return bool((await cluster.get("/v1/hosts/host-a"))["state"] == "silent")

        await until(silent)
        assert (await cluster.call(*renew, json=renewal))[0] == 200
        assert (await cluster.call("DELETE", "/v1/hosts/host-a"))[0] == 200
        status, problem = await cluster.call(*renew, json=renewal)
        assert (status, "host-a has neither joined nor reported" in problem["detail"]) == (403, True)
        kept = await invite(cluster, host="host-z")
        for host in ("host-a", "host-z"):
            status, told = await cluster.call("POST", f"/v1/hosts/{host}/revocation", json={"reason": "it is sold"})
            assert (status, f"no host {host} is known here" in told["sentence"]) == (200, True)
        report = agent.report().model_dump(mode="json")
        assert (await cluster.call("POST", "/v1/hosts/host-a/report", token, json=report))[0] == 403
        assert (await enrol(cluster, kept, "host-z"))[0] == 409


@each_store
async def test_invitations_that_nobody_has_used_can_be_taken_back(tmp_path: Path) -> None:
    async with enrolling(tmp_path) as cluster:
        used, csr = await invite(cluster), request()
        assert (await enrol(cluster, used, csr=csr))[0] == 200
        tokens = [await invite(cluster), await invite(cluster, host="host-c")]
        status, told = await cluster.call("DELETE", "/v1/invitations")
        assert (status, told["count"]) == (200, 2), told
        for token in tokens:
            status, problem = await enrol(cluster, token, "host-c")
            assert (status, problem["field"]) == (403, "token")
        assert (await enrol(cluster, used, csr=csr))[0] == 200, "an answer that was lost"
        assert (await enrol(cluster, await invite(cluster), "host-c"))[0] == 200, "its id is free"


@each_store
async def test_without_tls_tokens_are_all_that_a_host_gets_and_without_a_url_nobody_is_invited(tmp_path: Path) -> None:
    async with enrolling(tmp_path, url="http://127.0.0.1:7100") as cluster:
        token = await invite(cluster)
        assert "." not in token
        status, joined = await enrol(cluster, token, csr=None)
        assert (status, joined.get("certificate"), joined.get("ca")) == (200, None, None)
    async with cluster_of(tmp_path) as cluster:
        status, problem = await cluster.call("POST", "/v1/invitations", json={})
        assert (status, "start it with --url" in problem["detail"]) == (409, True)
        assert (await cluster.call("GET", "/v1/ca"))[0] == 409


@each_store
async def test_a_manager_that_nobody_can_call_takes_in_nobody_and_hosts_are_told_of_none_such(tmp_path: Path) -> None:
    everywhere = "https://0.0.0.0:7100"
    async with enrolling(tmp_path, url=everywhere) as cluster:
        token = await invite(cluster)
    async with enrolling(tmp_path, url=None) as cluster:
        status, problem = await enrol(cluster, token)
        assert (status, "start it with --url" in problem["detail"]) == (409, True), problem
    async with enrolling(tmp_path) as cluster:
        status, joined = await enrol(cluster, token)
        assert (status, joined["managers"]) == (200, [URL]), joined


@each_store
async def test_a_host_that_has_joined_and_never_reported_can_be_forgotten_and_its_id_is_free(tmp_path: Path) -> None:
    made = []
    for name in ("ca", "next"):
        Pki(tmp_path / name)
        made.append(CertificateAuthority.load(tmp_path / name / "ca.pem", tmp_path / name / "ca.key"))
    authority = replace(made[0], following=made[1])
    async with cluster_of(tmp_path, url=URL, authority=authority) as cluster:
        token = await invite(cluster)
        assert (await enrol(cluster, token))[0] == 200
        assert (await cluster.get("/v1/ca/rollover"))["hosts"] == ["host-b"]
        status, told = await cluster.call("DELETE", "/v1/hosts/host-b")
        assert (status, told["id"], told["vms"]) == (200, "host-b", []), told
        assert (await cluster.get("/v1/ca/rollover"))["hosts"] == []
        assert (await cluster.call("DELETE", "/v1/hosts/host-b"))[0] == 404
        assert (await enrol(cluster, token))[0] == 403, "its invitation is over"
        assert (await enrol(cluster, await invite(cluster)))[0] == 200


def test_a_certificate_is_renewed_when_a_third_of_its_life_is_left() -> None:
    begins = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    ends = begins + datetime.timedelta(days=90)
    assert not due(begins, ends, begins + datetime.timedelta(days=60))
    assert due(begins, ends, begins + datetime.timedelta(days=60, seconds=1))
    assert due(begins, ends, ends + datetime.timedelta(days=1))


def test_a_key_of_another_ca_is_refused(tmp_path: Path) -> None:
    for name in ("one", "other"):
        Pki(tmp_path / name)
    with pytest.raises(AccessError, match="is not the key of"):
        CertificateAuthority.load(tmp_path / "one/ca.pem", tmp_path / "other/ca.key")
    (tmp_path / "one/ca.key").chmod(0o644)
    with pytest.raises(AccessError, match="can be read by every user"):
        CertificateAuthority.load(tmp_path / "one/ca.pem", tmp_path / "one/ca.key")


# --- the whole way ---------------------------------------------------------------------------------------------------


async def run(*words: str, said: str = "") -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *words),
        cwd=REPO,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    told, _ = await process.communicate(said.encode())
    return process.returncode or 0, told.decode()


@contextlib.asynccontextmanager
async def managing(directory: Path, *options: str) -> AsyncIterator[list[str]]:
    """A real manager over TLS, as a user would start it; the options by which `ebb` reaches it."""
    pki = Pki(directory / "tls")
    pair = pki.pair("ebb-manager")
    write_private(directory / "token", TOKEN)
    write_private(directory / "hosts.key", HOSTS_KEY)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"https://127.0.0.1:{probe.getsockname()[1]}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cluster_manager.main", "--listen", url.removeprefix("https://")),
        *("--token-file", str(directory / "token"), "--hosts-key-file", str(directory / "hosts.key")),
        *("--database", str(directory / "manager.sqlite"), "--client-ca", str(pki.ca)),
        *("--tls-certificate", str(pair.certificate), "--tls-key", str(pair.key)),
        *("--ca-key", str(directory / "tls/ca.key"), *options),
        cwd=REPO,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(60):
            while b"event=listening" not in (line := await process.stderr.readline()):
                assert line, "it has ended"
        yield ["--manager", url, "--token-file", str(directory / "token")]
    finally:
        process.terminate()
        await process.communicate()


@pytest.mark.service
async def test_a_host_joins_by_the_printed_line_reports_and_renews_its_certificate(tmp_path: Path) -> None:
    # Of so short a life that it is time at once: it begins ten minutes ago.
    async with managing(tmp_path, "--certificate-days", "0.002") as reach:
        ca = ["-m", "ebbtide.cli.main", "--ca", str(tmp_path / "tls/ca.pem")]
        code, line = await run(*ca, "host", "invite", *reach)
        assert code == 0, line
        *words, last = shlex.split(line)
        assert words[:2] == ["ebb-hostagent", "join"]
        assert last.startswith("<<<"), "not on the command line, which every user of the host can see"
        token = last.removeprefix("<<<")
        assert token not in words
        with socket.create_server(("127.0.0.1", 0)) as probe:
            listen = f"127.0.0.1:{probe.getsockname()[1]}"
        config, directory = tmp_path / "hostagent.toml", tmp_path / "enrolment"
        here = ["--config", str(config), "--directory", str(directory), "--id", "host-b", "--listen", listen]
        # As the package has put it there, with what somebody has set in it before.
        code, example = await run("-m", "ebbtide.cli.main", "config", "example", "hostagent")
        assert code == 0, example
        config.write_text(example.replace("#reserve_mib = 512", "reserve_mib = 600"))
        code, said = await run("-m", "hostagent.main", "join", *words[2:], *here, said=token[:-4] + "0000")
        assert (code, "its CA is another one" in said) == (1, True), said
        assert "Written by" not in config.read_text()
        code, said = await run("-m", "hostagent.main", "join", *words[2:], *here)
        assert (code, "there is no token" in said) == (1, True), said
        code, said = await run("-m", "hostagent.main", "join", *words[2:], *here, said=token + "\n")
        assert code == 0, said
        assert f"host-b has joined {words[2]}" in said
        assert f"start it: ebb-hostagent --config {config}" in said
        assert {path.stat().st_mode & 0o077 for path in (config, *directory.iterdir())} == {0}
        code, said = await run("-m", "hostagent.main", "join", words[2], token, *here)
        assert (code, "--force replaces it" in said) == (1, True), said

        before = load(directory / "host.pem")
        given = options_of(["--config", str(config)])
        assert given.options.reserve_mib == 600
        access = access_of(given.options)
        stop, address = asyncio.Event(), address_of(given.options.listen)
        with TemporaryDirectory(prefix="ebb") as place:
            world = World(Path(place))
            await world.start()
            part = Slice("host-b", f"https://{listen}", CAPACITY, "qemu", OVERHEAD_MIB)
            host = Host(part, FakeHypervisor(world.socket, "host-b"), Journal(tmp_path / "state"), lambda: 1e6)
            options = given.options
            agent = asyncio.create_task(
                serve(
                    Agent(host, usable_boot_mib),
                    *address,
                    options.token_file,
                    options.manager,
                    options.manager_token_file,
                    stop,
                    access,
                ),
                name="agent",
            )
            async with ManagerClient(reach[1], TOKEN, tls=client_context(tmp_path / "tls/ca.pem")) as client:

                async def reported() -> bool:
                    return any(found.id == "host-b" and found.state == "ready" for found in await client.hosts())

                async with asyncio.timeout(60):
                    while not await reported():
                        assert not agent.done(), agent
                        with contextlib.suppress(TimeoutError):
                            await until(agent.done, limit_s=0.1)
                await until(lambda: load(directory / "host.pem").serial_number != before.serial_number, limit_s=30)
                code, told = await run(*ca, "host", "revoke", "host-b", "--yes", "-o", "json", *reach)
                assert (code, json.loads(told)["host"]) == (0, "host-b")
                (found,) = await client.hosts()
                assert (found.state, found.state_reason) == ("silent", "it is revoked")
            stop.set()
            await agent
            await world.stop()
