"""Options of both daemons that would not be safe, or make no sense: refused at the start, in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

import cluster_manager.main
import hostagent.main
from ebbtide.lab.state import write_private
from ebbtide.rest.tls import KeyPair
from hostagent.options import access_of

TLS = ["--tls-certificate", "c.pem", "--tls-key", "c.key", "--client-ca", "ca.pem"]
Refusal = Callable[[str, list[str]], str]


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Refusal]:
    """What a daemon says as it ends with 1."""
    (tmp_path / "token").write_text("secret")
    (tmp_path / "agents").write_text("secret of agents".replace(" ", "-"))
    for path in tmp_path.iterdir():
        path.chmod(0o600)
    monkeypatch.chdir(tmp_path)

    def run(daemon: str, options: list[str]) -> str:
        if daemon == "ebb-manager":
            needed = ["--token-file", "token", "--hosts-key-file", "agents", "--database", "db"]
            assert cluster_manager.main.main([*needed, *options]) in (1, 2)
            return capsys.readouterr().err
        needed = ["--id", "host-a", "--capacity", "cpu_cores=1,memory_mib=512", "--token-file", "token"]
        needed += ["--state-dir", str(tmp_path / "state")]
        monkeypatch.setattr(sys, "argv", [daemon, *needed, *options])
        with pytest.raises(SystemExit) as ended:
            hostagent.main.main()
        assert ended.value.code in (1, 2)
        said = capsys.readouterr().err
        return "".join(line for line in said.splitlines(keepends=True) if line.startswith(f"{daemon}: "))

    yield run
    # The commands configure the process's logs, which other tests share.
    structlog.reset_defaults()


@pytest.mark.parametrize("daemon", ["ebb-manager", "ebb-hostagent"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--listen", "0.0.0.0:7999"], "give --tls-certificate, --tls-key and --client-ca"),
        (["--listen", "[::]:7999"], "give --tls-certificate, --tls-key and --client-ca"),
        (["--listen", "192.0.2.1:7999"], "give --tls-certificate, --tls-key and --client-ca"),
        (["--listen", "example.org:7999"], "give --tls-certificate, --tls-key and --client-ca"),
        (["--tls-key", "x"], "--tls-certificate and --tls-key need each other"),
        (["--client-ca", "x"], "--client-ca needs --tls-certificate and --tls-key"),
        (["--requests-per-s", "0"], "--requests-per-s must be above 0"),
        (["--burst", "nan"], "--burst must be at least 1"),
        (["--connections", "0"], "--connections must be above 0"),
        (["--body-timeout-s", "-1"], "--body-timeout-s must be above 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_not_safe_or_not_whole_is_refused_in_one_line(
    refusal: Refusal, daemon: str, options: list[str], said: str
) -> None:
    error = refusal(daemon, options)
    assert error.startswith(f"{daemon}: ")
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([*TLS, "--listen", "0.0.0.0:7999"], "give --url"),
        (["--manager", "http://127.0.0.1:1", "--manager-ca", "x"], "--manager must begin with https://"),
        *(
            ([option, figure], f"{option}: input should be")
            for option in ("--reserve-mib", "--overhead-mib")
            for figure in ("-1", "nan", "inf")
        ),
        (["--manager", "https://192.0.2.1:1", "--manager", "http://192.0.2.2:1"], "http://192.0.2.2:1 would get"),
        (["--manager", "http://127.0.0.1:1@example.org"], "over plain HTTP: give https://"),
        (["--certificate", "x"], "--certificate and --key need each other"),
        (["--manager", "http://127.0.0.1:1"], "--manager needs --manager-token-file"),
        (["--manager", "http://127.0.0.1:1", "--manager-token-file", "token"], "hold the same token"),
        (["--url", "http://127.0.0.1:1/path"], "must be a scheme, a host and a port"),
    ],
)
def test_an_agent_that_could_not_be_called_or_would_leak_does_not_start(
    refusal: Refusal, options: list[str], said: str
) -> None:
    error = refusal("ebb-hostagent", options)
    assert error.count("\n") == 1
    assert said in error


@pytest.mark.parametrize(
    "options", [["--url", "127.0.0.1:17201"], ["--manager", "https://", "--manager-token-file", "agents"]]
)
def test_an_address_that_is_none_ends_an_agent_for_good(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str]
) -> None:
    needed = [
        "--id",
        "host-a",
        "--capacity",
        "cpu_cores=1,memory_mib=512",
        "--token-file",
        "token",
        "--state-dir",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", ["ebb-hostagent", *needed, *options])
    with pytest.raises(SystemExit) as ended:
        hostagent.main.main()
    assert ended.value.code == 2
    structlog.reset_defaults()


def test_one_secret_for_people_and_hosts_is_refused(refusal: Refusal) -> None:
    assert "hold the same word" in refusal("ebb-manager", ["--hosts-key-file", "token"])


@pytest.mark.parametrize("daemon", ["ebb-manager", "ebb-hostagent"])
def test_tls_alone_does_not_do_beyond_loopback(refusal: Refusal, daemon: str) -> None:
    """Both sides show certificates, or the daemon does not start."""
    options = ["--listen", "192.0.2.1:7999", *TLS[:4]]
    assert "give --tls-certificate, --tls-key and --client-ca" in refusal(daemon, options)


@pytest.mark.parametrize("daemon", ["ebb-manager", "ebb-hostagent"])
@pytest.mark.parametrize("mode", [0o604, 0o602, 0o666])
def test_a_token_that_everybody_can_read_is_refused(refusal: Refusal, tmp_path: Path, daemon: str, mode: int) -> None:
    (tmp_path / "token").chmod(mode)
    assert "token can be read by every user of this machine: chmod o-rwx" in refusal(daemon, [])


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[::1]:1", "http://localhost", "https://192.0.2.1"])
def test_an_agent_calls_its_own_machine_or_by_tls(url: str) -> None:
    needed = [
        "--id",
        "host-a",
        "--capacity",
        "cpu_cores=1,memory_mib=512",
        "--token-file",
        "token",
        "--manager",
        url,
        "--manager-token-file",
        "r",
    ]
    access_of(hostagent.main.options_of(needed).options)


def test_a_manager_needs_somebody_to_listen_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_private(tmp_path / "agents", "secret")
    assert cluster_manager.main.main(["--hosts-key-file", str(tmp_path / "agents"), "--database", "db"]) == 2
    assert "--token-file or --tokens-file must be given" in capsys.readouterr().err
    structlog.reset_defaults()


def test_what_an_agent_calls_its_manager_with_is_its_own_unless_it_is_told_otherwise() -> None:
    needed = [
        "--id",
        "host-a",
        "--capacity",
        "cpu_cores=1,memory_mib=512",
        "--token-file",
        "token",
        "--listen",
        "192.0.2.11:7101",
    ]
    needed += ["--tls-certificate", "c.pem", "--tls-key", "c.key", "--client-ca", "ca.pem"]
    own = KeyPair(Path("c.pem"), Path("c.key"))
    found = access_of(hostagent.main.options_of(needed).options)
    assert (found.own, found.client_ca, found.server_ca, found.caller) == (own, Path("ca.pem"), None, None)
    more = [
        "--manager-ca",
        "other.pem",
        "--certificate",
        "d.pem",
        "--key",
        "d.key",
        "--manager",
        "https://192.0.2.1:7100",
        "--manager-token-file",
        "reports",
    ]
    found = access_of(hostagent.main.options_of([*needed, *more]).options)
    assert (found.own, found.client_ca) == (own, Path("ca.pem"))
    assert (found.server_ca, found.caller) == (Path("other.pem"), KeyPair(Path("d.pem"), Path("d.key")))
