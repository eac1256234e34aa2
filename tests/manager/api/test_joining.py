"""`ebb-hostagent join` on the host: what it leaves there, and what it says before an invitation is used."""

from __future__ import annotations

import asyncio
import errno
import getpass
import io
import re
import ssl
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from cluster_manager.inventory.enrolment import Enrolments
from ebbtide.messages.enrolment import Authority, EnrolmentRequest, InvitationRequest
from ebbtide.rest.tls import KeyPair
from hostagent import joining
from hostagent.errors import HostAgentError
from hostagent.main import main, options_of
from hostagent.options import UNWRITABLE as LISTED
from hostagent.options import HostAgentOptions, access_of
from hostagent.state import files
from hostagent.state.journal import Journal
from tests.manager.api.test_enrolment_attacks import Parts, serving
from tests.rest.pki import Pki


class Terminal(io.StringIO):
    """Where somebody sits."""

    def isatty(self) -> bool:
        return True


class Inviting:
    """A manager's enrolments over TLS, and a host that joins."""

    def __init__(self, directory: Path, manager: Enrolments) -> None:
        self.manager = manager
        self.url = ""
        self.asked: list[EnrolmentRequest] = []
        #: What its answers say besides.
        self.more: dict[str, Any] = {}
        #: What its agent tells systemd, once it is started.
        self.status = "host-b is active; 0 VMs"
        self.config = directory / "etc/hostagent.toml"
        self.directory = directory / "var/enrolment"

    async def ca(self, _: web.Request) -> web.Response:
        return web.json_response(Authority(ca=self.manager.authority.pem).model_dump(mode="json") | self.more)

    async def enrol(self, came: web.Request) -> web.Response:
        self.asked.append(EnrolmentRequest.model_validate_json(await came.text()))
        return web.json_response((await self.manager.enrol(self.asked[-1])).model_dump(mode="json") | self.more)

    async def join(self, *words: str, token: str = "") -> None:
        """Raises HostAgentError."""
        token = token or (await self.manager.invite(InvitationRequest(host="host-b"))).token
        here = ["--id", "host-b", "--config", str(self.config), "--directory", str(self.directory)]
        # A token may begin with a hyphen.
        await asyncio.to_thread(joining.join, [*here, *words, "--", self.url, token])

    @property
    def options(self) -> dict[str, Any]:
        return tomllib.loads(self.config.read_text())


def full_at(file: str) -> Callable[[Path, str], None]:
    """A disk that takes every file but one of this name."""

    def replace(path: Path, text: str) -> None:
        if path.name == file:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        files.replace(path, text)

    return replace


@pytest.fixture
async def inviting(tmp_path: Path) -> AsyncIterator[Inviting]:
    parts = Parts(tmp_path)
    made = Inviting(tmp_path, await parts.term())
    app = web.Application()
    app.add_routes([web.get("/v1/ca", made.ca), web.post("/v1/enrolments", made.enrol)])
    async with serving(app, parts.pki.pair("ebb-manager")) as made.url:
        yield made
    await made.manager._store.close()


@pytest.fixture
def started(inviting: Inviting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """On a machine with systemd: what it was told."""
    told: list[str] = []

    def run(words: list[str], **_: Any) -> Any:
        if words[1] == "show":
            return SimpleNamespace(returncode=0, stderr="", stdout=f"{inviting.status}\n")
        told.append(" ".join(words))
        return SimpleNamespace(returncode=0, stderr="", stdout="")

    inviting.config.parent.mkdir()
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(HostAgentOptions, "file", inviting.config)
    monkeypatch.setattr(joining, "SYSTEMD", tmp_path)
    return told


async def test_a_host_that_joins_again_by_force_keeps_what_was_set_for_it(
    inviting: Inviting, capsys: pytest.CaptureFixture[str]
) -> None:
    inviting.config.parent.mkdir()
    inviting.config.write_text('id = "..."\ncapacity = "auto"\nreserve_mib = 600.0\n')
    await inviting.join("--capacity", "cpu_cores=14,memory_mib=57344")
    own = 'templates = ["/etc/ebbtide/templates"]\ndisk_dir = "/srv/disks"\n'
    inviting.config.write_text(inviting.config.read_text() + own + 'url = "https://192.0.2.7:7101"\n')
    with pytest.raises(HostAgentError, match="--force replaces it"):
        await inviting.join()
    capsys.readouterr()
    await inviting.join("--force", "--listen", "127.0.0.1:7109")
    found = inviting.options
    assert (found["reserve_mib"], found["templates"], found["disk_dir"]) == (
        600.0,
        ["/etc/ebbtide/templates"],
        "/srv/disks",
    )
    assert (found["capacity"], found["listen"]) == ("cpu_cores=14,memory_mib=57344", "127.0.0.1:7109")
    assert "url" not in found, "it was that of the certificate before"
    assert "not kept of the options before: url\n" in capsys.readouterr().out


async def test_a_host_that_joins_by_force_is_told_which_managers_it_leaves(
    inviting: Inviting, capsys: pytest.CaptureFixture[str]
) -> None:
    inviting.config.parent.mkdir()
    inviting.config.write_text(f'id = "host-b"\nmanager = ["{inviting.url}", "https://192.0.2.7:7100"]\n')
    await inviting.join("--force")
    assert "https://192.0.2.7:7100" not in inviting.options["manager"]
    assert "not kept of the options before: manager https://192.0.2.7:7100\n" in capsys.readouterr().out


@pytest.mark.parametrize("file", ["hostagent.toml", "host.pem"])
async def test_a_host_that_joins_again_by_force_has_a_new_key_also_where_it_has_to_ask_twice(
    inviting: Inviting, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    await inviting.join()
    # On a machine made of this one's image the same key would be.
    before = (inviting.directory / "host.key").read_text()
    token = (await inviting.manager.invite(InvitationRequest(host="host-b"))).token
    with monkeypatch.context() as here:
        here.setattr(joining, "replace", full_at(file))
        with pytest.raises(HostAgentError, match="No space left"):
            await inviting.join("--force", token=token)
    assert (inviting.directory / "host.key").read_text() == before, "that of the certificate that is still there"
    await inviting.join("--force", token=token)
    assert (inviting.directory / "host.key").read_text() != before
    assert not list(inviting.directory.glob("*.next"))
    KeyPair(inviting.directory / "host.pem", inviting.directory / "host.key").load(
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    )


def followed(inviting: Inviting, directory: Path, ca: str) -> Path:
    """The state of a host that has followed a manager with epoch 5 and this CA."""
    state, trusted = directory / "state", directory / "before.pem"
    Journal(state).raise_epoch(5)
    trusted.write_text(ca)
    inviting.config.parent.mkdir(exist_ok=True)
    inviting.config.write_text(f'id = "host-b"\nstate_dir = "{state}"\nclient_ca = "{trusted}"\n')
    return state


async def test_a_host_that_joins_another_cluster_forgets_the_epoch_of_the_one_before_while_its_agent_is_stopped(
    inviting: Inviting, started: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = followed(inviting, tmp_path, Pki(tmp_path / "other").ca.read_text())
    await inviting.join("--force")
    assert Journal(state).epoch == 0
    assert started == [f"systemctl {verb} ebb-hostagent" for verb in ("stop", "enable", "restart")]
    assert "epoch 5 of the cluster of before is forgotten" in capsys.readouterr().out


async def test_a_host_that_gets_other_tokens_has_left_its_cluster(inviting: Inviting, tmp_path: Path) -> None:
    state = followed(inviting, tmp_path, inviting.manager.authority.pem)
    (tmp_path / "token").write_text("of another hosts.key\n")
    inviting.config.write_text(inviting.config.read_text() + f'token_file = "{tmp_path}/token"\n')
    await inviting.join("--force")
    assert Journal(state).epoch == 0


async def test_a_host_whose_agent_runs_while_it_joins_another_cluster_is_told_how_the_epoch_is_forgotten(
    inviting: Inviting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = followed(inviting, tmp_path, Pki(tmp_path / "other").ca.read_text())
    with files.alone_in(state):
        await inviting.join("--force")
    assert Journal(state).epoch == 5
    assert f"when no agent runs: ebb host epoch --state-dir {state} --reset\n" in capsys.readouterr().out


async def test_a_host_that_joins_its_cluster_again_keeps_the_epoch_and_is_told_how_to_forget_it(
    inviting: Inviting, started: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = followed(inviting, tmp_path, inviting.manager.authority.pem.replace("\n", "\r\n"))
    await inviting.join("--force")
    assert Journal(state).epoch == 5
    assert started == ["systemctl enable ebb-hostagent", "systemctl restart ebb-hostagent"]
    assert (
        "epoch 5 on; if this one has begun with a new store: systemctl stop ebb-hostagent; ebb host epoch --state-dir "
        f"{state} --reset; systemctl start ebb-hostagent\n"
    ) in capsys.readouterr().out


async def test_a_host_whose_vms_have_its_name_gets_no_other_one_before_they_are_given_back(
    inviting: Inviting, tmp_path: Path
) -> None:
    state = followed(inviting, tmp_path, inviting.manager.authority.pem)
    before = inviting.config.read_text()
    with pytest.raises(HostAgentError, match=f"are host-b's, and host-c .*`ebb-hostagent release`, and move {state} "):
        await inviting.join("--force", "--id", "host-c")
    assert (inviting.asked, inviting.config.read_text()) == ([], before)
    state.rename(tmp_path / "away")
    token = (await inviting.manager.invite(InvitationRequest())).token
    await inviting.join("--force", "--id", "host-c", token=token)
    assert inviting.options["id"] == "host-c"


def test_a_host_has_the_id_in_its_options_unless_it_is_told_another_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(joining, "_own_name", lambda: "kvm-7")
    config = tmp_path / "hostagent.toml"
    words = ["https://192.0.2.1:7100", "--config", str(config), "--directory", str(tmp_path)]

    def found(*more: str) -> str:
        return joining._checked(joining._parser().parse_args([*words, *more]))[0]

    assert found() == "kvm-7"
    config.write_text('id = "..."\n')
    assert found() == "kvm-7"
    config.write_text(f'id = "host-b"\nstate_dir = "{tmp_path}"\ntoken_file = "{tmp_path}/none"\n')
    assert (found(), found("--id", "host-c")) == ("host-b", "host-c")


@pytest.mark.parametrize("options", [None, 'id = "..."\n'], ids=["gone", "as they come"])
def test_a_host_that_has_vms_and_no_options_any_more_is_asked_for_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: str | None
) -> None:
    monkeypatch.setattr(joining, "_own_name", lambda: "kvm-7")
    monkeypatch.setattr(HostAgentOptions.model_fields["state_dir"], "default", tmp_path / "agent")
    config = tmp_path / "hostagent.toml"
    if options is not None:
        config.write_text(options)
    words = ["https://192.0.2.1:7100", "--config", str(config), "--directory", str(tmp_path), "--force"]
    (tmp_path / "agent").mkdir()
    assert joining._checked(joining._parser().parse_args(words))[0] == "kvm-7"
    (tmp_path / "agent/state.json").touch()
    with pytest.raises(HostAgentError, match=r"does not say what this host was called, as its VMs are: .* --id"):
        joining._checked(joining._parser().parse_args(words))
    assert joining._checked(joining._parser().parse_args([*words, "--id", "host-b"]))[0] == "host-b"


async def test_an_agent_that_runs_is_restarted_with_its_new_certificate(
    inviting: Inviting, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    await inviting.join()
    assert started == ["systemctl enable ebb-hostagent", "systemctl restart ebb-hostagent"]
    assert "the service ebb-hostagent runs" in capsys.readouterr().out


async def test_a_host_whose_agent_waits_for_libvirt_is_told_that_instead_of_a_success(
    inviting: Inviting, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    inviting.status = "waits for libvirt: Failed to connect socket: No such file or directory"
    await inviting.join()
    said = capsys.readouterr().out
    assert f"the service ebb-hostagent {inviting.status}\n" in said
    assert "runs" not in said


UNWRITABLE = ("/etc", "/usr", "/boot", "/efi", "/home", "/root", "/run/user")


@pytest.mark.parametrize("place", [*UNWRITABLE, "a link to /etc"])
async def test_a_directory_that_the_service_cannot_write_is_refused_before_the_invitation_is_used(
    inviting: Inviting, started: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    def nothing(*_: object) -> None:
        raise OSError(errno.EROFS, "nothing is written by a test", place)

    if place not in UNWRITABLE:
        (tmp_path / "link").symlink_to("/etc")
        place = str(tmp_path / "link")
    monkeypatch.setattr(joining, "make_parents", nothing)
    with pytest.raises(HostAgentError, match=f"--directory {place}/ebbtide-none: the service ebb-hostagent can write"):
        await inviting.join("--directory", f"{place}/ebbtide-none")
    assert not inviting.asked
    # What something else runs may write there.
    with pytest.raises(HostAgentError, match="nothing is written by a test"):
        await inviting.join("--directory", f"{place}/ebbtide-none", "--no-start")
    assert not started


def test_the_unit_keeps_its_agent_from_writing_where_join_refuses_a_directory() -> None:
    unit = (Path(__file__).parents[3] / "packaging/systemd/ebb-hostagent.service").read_text(encoding="utf-8")
    assert {"ProtectSystem=full", "ProtectHome=read-only"} <= set(unit.splitlines())
    assert {str(place) for place in LISTED} == set(UNWRITABLE)


async def test_a_host_is_told_what_its_service_needs_to_write_disks_and_state_before_it_is_started(
    inviting: Inviting, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    inviting.config.write_text('disk_dir = "/home/vms"\nstate_dir = "/etc/ebbtide/agent"\n')
    await inviting.join()
    said = capsys.readouterr().out
    for name, root, directory in (("disk_dir", "/home", "/home/vms"), ("state_dir", "/etc", "/etc/ebbtide/agent")):
        assert f"note: {name} {directory}: the packaged service can write below {root} only" in said
        assert f" ReadWritePaths={directory}, " in said
    await inviting.join("--force", "--no-start")
    assert "note: " not in capsys.readouterr().out, "something else runs the agent"


async def test_a_host_without_a_folder_for_its_options_joins(inviting: Inviting) -> None:
    await inviting.join()
    assert inviting.options["tls_certificate"] == str(inviting.directory / "host.pem")
    assert {path.stat().st_mode & 0o077 for path in (inviting.config, *inviting.directory.iterdir())} == {0}


async def test_options_that_cannot_be_written_use_no_invitation(inviting: Inviting) -> None:
    inviting.config.parent.write_text("a file")
    with pytest.raises(HostAgentError, match=r"cannot be (read|written)"):
        await inviting.join()
    assert not inviting.asked
    assert not inviting.directory.exists()


@pytest.mark.parametrize("file", ["host.key", "hostagent.toml", "report-token", "ca.pem", "command-token", "host.pem"])
async def test_a_host_of_which_a_file_could_not_be_written_can_join_again(
    inviting: Inviting, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    token = (await inviting.manager.invite(InvitationRequest())).token
    with monkeypatch.context() as here:
        here.setattr(joining, "replace", full_at(file))
        with pytest.raises(HostAgentError, match=f"{re.escape(file)} cannot be written: No space left"):
            await inviting.join(token=token)
    await inviting.join(token=token)
    assert inviting.options["id"] == "host-b"


async def test_a_manager_that_says_more_than_is_known_here_is_joined_all_the_same(inviting: Inviting) -> None:
    inviting.more = {"of_a_later_version": 1}
    await inviting.join()
    assert inviting.options["id"] == "host-b"


async def test_a_host_without_the_package_for_certificates_is_told_what_to_install(
    inviting: Inviting, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = (await inviting.manager.invite(InvitationRequest())).token
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(HostAgentError, match=r"this needs the package cryptography: .* install 'cryptography"):
        await inviting.join(token=token)
    assert not inviting.asked


async def test_a_host_that_listens_at_all_addresses_is_called_at_the_one_in_its_certificate(inviting: Inviting) -> None:
    for number, listen in enumerate(("0.0.0.0:7101", "[::]:7102")):
        await inviting.join("--listen", listen, *(["--force"] if number else []))
        assert inviting.asked[-1].address == "127.0.0.1"
        assert inviting.options["listen"] == listen
        options = options_of(["--config", str(inviting.config)]).options
        assert options.url == f"https://127.0.0.1:710{number + 1}"
        access_of(options)
    await inviting.join("--force", "--listen", "127.0.0.1:7101")
    assert "url" not in inviting.options


@pytest.mark.parametrize("listen", ["127.0.0.1:7109", "0.0.0.0:7109"])
@pytest.mark.parametrize("again", [(), ("--force",)], ids=["first", "by force"])
async def test_a_host_serves_where_its_options_say_unless_joining_is_told_otherwise(
    inviting: Inviting, listen: str, again: tuple[str, ...]
) -> None:
    inviting.config.parent.mkdir()
    if again:
        await inviting.join()
        found = inviting.config.read_text()
        inviting.config.write_text(re.sub("^listen = .*$", f'listen = "{listen}"', found, flags=re.MULTILINE))
    else:
        inviting.config.write_text(f'listen = "{listen}"\n')
    await inviting.join(*again)
    assert inviting.options["listen"] == listen
    assert inviting.asked[-1].address == "127.0.0.1"
    access_of(options_of(["--config", str(inviting.config)]).options)
    await inviting.join("--force", "--listen", "127.0.0.1:7110")
    assert inviting.options["listen"] == "127.0.0.1:7110"


async def test_a_host_is_called_where_its_options_say_and_its_certificate_names_that(inviting: Inviting) -> None:
    inviting.config.parent.mkdir()
    inviting.config.write_text('url = "https://host-b.example:7109"\nlisten = "0.0.0.0:7101"\n')
    await inviting.join()
    assert inviting.asked[-1].address == "host-b.example"
    assert (inviting.options["url"], inviting.options["listen"]) == ("https://host-b.example:7109", "0.0.0.0:7101")
    access_of(options_of(["--config", str(inviting.config)]).options)


async def test_a_host_that_is_told_where_to_listen_is_not_called_where_it_was_before(
    inviting: Inviting, capsys: pytest.CaptureFixture[str]
) -> None:
    inviting.config.parent.mkdir()
    inviting.config.write_text('url = "https://host-b.example:7109"\n')
    await inviting.join("--listen", "127.0.0.1:7101")
    assert inviting.asked[-1].address == "127.0.0.1"
    assert "url" not in inviting.options
    assert "not kept of the options before: url\n" in capsys.readouterr().out


@pytest.mark.parametrize("manager", ["the same", "another"])
async def test_an_address_that_fits_no_more_is_replaced_by_force_and_its_port_stays(
    inviting: Inviting, capsys: pytest.CaptureFixture[str], manager: str
) -> None:
    url, listen = (inviting.url, "192.0.2.7") if manager == "the same" else ("https://192.0.2.1:7100", "127.0.0.2")
    inviting.config.parent.mkdir()
    inviting.config.write_text(f'id = "host-b"\nmanager = "{url}"\nlisten = "{listen}:7109"\n')
    await inviting.join("--force")
    assert inviting.options["listen"] == "127.0.0.1:7109"
    assert f"not kept of the options before: listen {listen}:7109" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ('listen = "fd00::5:7101"', r'listen = "fd00::5:7101" in .* must be like 10.0.0.12:7101 or \[fd00::12\]:7101'),
        ('capacity = "cpu_cores=14"', "capacity in .*hostagent.toml: memory_mib must be given, and above 0"),
        ('listen = "7101"', 'listen = "7101" in .*: this is not like 127.0.0.1:7101'),
        ('listen = "127.0.0.1:7101"', "is no address that the manager could call: change it, or give --listen"),
        ('url = "http://192.0.2.7:7101"', "must begin with https://, as the manager's does"),
        ('url = "https://192.0.2.7:7101/api"', "must be a scheme, a host and a port, nothing else"),
    ],
)
async def test_options_by_which_a_host_could_not_be_called_use_no_invitation(
    inviting: Inviting, monkeypatch: pytest.MonkeyPatch, options: str, said: str
) -> None:
    inviting.config.parent.mkdir()
    inviting.config.write_text(f"{options}\n")
    monkeypatch.setattr(joining, "_own_address", lambda *_: "192.0.2.7")
    with pytest.raises(HostAgentError, match=said):
        await inviting.join()
    assert not inviting.asked
    assert inviting.config.read_text() == f"{options}\n"


@pytest.mark.parametrize("listen", ["fd00::5:7101", "::1:7101", "a/b:7101", "my_host:7101"])
async def test_an_address_that_the_agent_would_refuse_uses_no_invitation(inviting: Inviting, listen: str) -> None:
    with pytest.raises(HostAgentError, match=f"--listen {listen} must be like 10.0.0.12:7101 or"):
        await inviting.join("--listen", listen)
    assert not inviting.asked
    assert not inviting.config.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--listen", "7101"), "--listen 7101: this is not like 127.0.0.1:7101"),
        (("--capacity", "cpu_cores=14"), "--capacity: memory_mib must be given, and above 0"),
        (("--capacity", ""), "--capacity: '' is not COMPONENT=NUMBER"),
    ],
)
async def test_a_word_of_join_that_is_wrong_is_named(inviting: Inviting, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(HostAgentError, match=said):
        await inviting.join(*words)
    assert not inviting.asked


@pytest.mark.parametrize(
    "url",
    [
        "https://[::1",
        "https://10.0.0.1\N{FULLWIDTH COLON}7100",
        "https://10.0.0.1:71000",
        "https://10.0.0.1:abc",
        "https://fd00::5:7100",
        "https://10.0.0.1:7100?x",
        "https://a@10.0.0.1:7100",
        "10.0.0.1:7100",
        "https://",
        "https://h:",
        "https://h;x",
        "https://,:1",
        "https://h\\x:1",
        "https://h\tx:1",
    ],
)
async def test_what_is_no_url_of_a_manager_is_said_in_one_sentence(inviting: Inviting, url: str) -> None:
    inviting.url = url
    with pytest.raises(HostAgentError, match="is no address of a manager: it must be like https://"):
        await inviting.join()
    assert not inviting.config.exists()


async def test_without_certificates_no_host_joins_where_its_options_let_others_reach_it(inviting: Inviting) -> None:
    inviting.url = inviting.url.replace("https", "http")
    inviting.config.parent.mkdir()
    inviting.config.write_text('listen = "0.0.0.0:7101"\n')
    with pytest.raises(HostAgentError, match=r'listen = "0\.0\.0\.0:7101" in .* can be reached from other machines'):
        await inviting.join()
    assert not inviting.asked


async def test_without_certificates_no_host_joins_where_others_could_reach_it(inviting: Inviting) -> None:
    inviting.url = inviting.url.replace("https", "http")
    with pytest.raises(HostAgentError, match=r"--listen 0\.0\.0\.0:7101 can be reached from other machines"):
        await inviting.join("--listen", "0.0.0.0:7101")
    assert not inviting.config.exists()


@pytest.mark.parametrize(
    ("stdin", "raised", "code", "said"),
    [
        (Terminal(), EOFError, 1, "there is no token: give it on standard input"),
        (Terminal(), KeyboardInterrupt, 130, "interrupted; the same line again does no harm"),
        (None, AssertionError, 1, "there is no token: give it on standard input"),
    ],
    ids=["Ctrl-D", "Ctrl-C", "closed"],
)
def test_a_join_that_gets_no_token_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stdin: Terminal | None,
    raised: type[BaseException],
    code: int,
    said: str,
) -> None:
    def asked(prompt: str) -> str:
        raise raised

    monkeypatch.setattr(getpass, "getpass", asked)
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(sys, "argv", ["ebb-hostagent", "join", "https://192.0.2.1:7100"])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert (ended.value.code, told.out, told.err.count("\n")) == (code, "", 1)
    assert told.err.startswith(f"ebb-hostagent: {said}")
