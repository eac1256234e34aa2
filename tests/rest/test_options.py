"""Options of both daemons that would not be safe, or make no sense: refused at the start, in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

import cluster_manager.main
import hostagent.main
from rest.tls import KeyPair

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
            needed = ["--token-file", "token", "--agent-token-file", "agents", "--database", "db"]
            assert cluster_manager.main.main([*needed, *options]) == 1
            return capsys.readouterr().err
        needed = ["--id", "host-a", "--capacity", "cpu_cores=1", "--token-file", "token"]
        monkeypatch.setattr(sys, "argv", [daemon, *needed, *options])
        with pytest.raises(SystemExit) as ended:
            hostagent.main.main()
        return f"{ended.value.code}\n"

    yield run
    # The commands configure the process's logs, which other tests share.
    structlog.reset_defaults()


@pytest.mark.parametrize("daemon", ["ebb-manager", "ebb-hostagent"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--listen", "0.0.0.0:7999"], "give --tls-certificate and --tls-key, or --insecure"),
        (["--listen", "[::]:7999"], "give --tls-certificate and --tls-key, or --insecure"),
        (["--listen", "192.0.2.1:7999"], "give --tls-certificate and --tls-key, or --insecure"),
        (["--listen", "example.org:7999"], "give --tls-certificate and --tls-key, or --insecure"),
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
        (["--listen", "0.0.0.0:7999", "--insecure"], "give --url"),
        (["--manager", "http://127.0.0.1:1", "--manager-ca", "x"], "--manager must begin with https://"),
        (["--manager", "https://192.0.2.1:1", "--manager", "http://192.0.2.2:1"], "http://192.0.2.2:1 would get"),
        (["--manager", "http://127.0.0.1:1@example.org"], "over plain HTTP: give https://, or --insecure"),
        (["--certificate", "x"], "--certificate and --key need each other"),
    ],
)
def test_an_agent_that_could_not_be_called_or_would_leak_does_not_start(
    refusal: Refusal, options: list[str], said: str
) -> None:
    error = refusal("ebb-hostagent", options)
    assert error.count("\n") == 1
    assert said in error


def test_one_token_for_people_and_agents_is_refused(refusal: Refusal) -> None:
    assert "have the same token" in refusal("ebb-manager", ["--agent-token-file", "token"])


def test_a_token_of_one_host_is_refused_where_each_host_learns_the_one_of_all(refusal: Refusal, tmp_path: Path) -> None:
    entry = f'[[token]]\nname = "a"\nrole = "agent"\nsha256 = "{"0" * 64}"\nhost = "host-a"\n'
    (tmp_path / "tokens").write_text(entry)
    assert "a token bound to a host needs --client-ca" in refusal("ebb-manager", ["--tokens-file", "tokens"])


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[::1]:1", "http://localhost", "https://192.0.2.1"])
def test_an_agent_calls_its_own_machine_or_by_tls(url: str) -> None:
    needed = ["--id", "host-a", "--capacity", "cpu_cores=1", "--token-file", "token", "--manager", url]
    hostagent.main._access(hostagent.main._parser().parse_args(needed))


def test_an_agent_that_is_told_so_calls_by_plain_http() -> None:
    needed = ["--id", "host-a", "--capacity", "cpu_cores=1", "--token-file", "token", "--manager", "http://192.0.2.1"]
    hostagent.main._access(hostagent.main._parser().parse_args([*needed, "--insecure"]))


def test_a_manager_needs_somebody_to_listen_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "agents").write_text("secret")
    assert cluster_manager.main.main(["--agent-token-file", str(tmp_path / "agents"), "--database", "db"]) == 1
    assert "--token-file or --tokens-file must be given" in capsys.readouterr().err
    structlog.reset_defaults()


def test_what_an_agent_calls_its_manager_with_is_its_own_unless_it_is_told_otherwise() -> None:
    needed = ["--id", "host-a", "--capacity", "cpu_cores=1", "--token-file", "token", "--listen", "192.0.2.11:7101"]
    needed += ["--tls-certificate", "c.pem", "--tls-key", "c.key", "--client-ca", "ca.pem"]
    own = KeyPair(Path("c.pem"), Path("c.key"))
    found = hostagent.main._access(hostagent.main._parser().parse_args(needed))
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
    ]
    found = hostagent.main._access(hostagent.main._parser().parse_args([*needed, *more]))
    assert (found.own, found.client_ca) == (own, Path("ca.pem"))
    assert (found.server_ca, found.caller) == (Path("other.pem"), KeyPair(Path("d.pem"), Path("d.key")))
