"""`ebb config check` by root holds the manager's options to what its service's user may do."""

from __future__ import annotations

import configparser
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

# Where we are installed need not be readable to the user as whom is checked.
import ebbtide.matcher.engines.slurm  # noqa: F401
from cluster_manager import privileges
from cluster_manager.options import ManagerOptions
from ebbtide.cli.commands import config
from ebbtide.cli.commands.options import Output, Printing
from ebbtide.lab.state import write_private
from ebbtide.rest.options import example_of
from hostagent.options import HostAgentOptions

ROOT = Path(__file__).parents[2]


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A manager's options, which its service, here of the user nobody, can read with all that they name."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    monkeypatch.setattr(privileges, "SERVICE_USER", "nobody")
    monkeypatch.setattr(privileges, "SYSTEMD", Path("/nowhere"))
    # Not pytest's directory: only root can pass through.
    directory = Path(tempfile.mkdtemp(prefix="ebbtide-test-"))
    directory.chmod(0o755)
    shutil.chown(directory, "nobody")
    for name in ("hosts.key", "token"):
        write_private(directory / name, f"secret-of-{name}\n")
        shutil.chown(directory / name, "nobody")
    file = directory / "manager.toml"
    lines = {"hosts_key_file": "hosts.key", "database": "m.sqlite", "token_file": "token", "engine_file": "engine.toml"}
    file.write_text("".join(f'{name} = "{directory / value}"\n' for name, value in lines.items()))
    # The only form of it that the service takes: root alone may run tasks as somebody.
    (directory / "engine.toml").write_text(f'engine = "slurm"\ndirectory = "{directory}"\n')
    for name in ("manager.toml", "engine.toml"):
        (directory / name).chmod(0o644)
    yield file
    shutil.rmtree(directory)


def test_what_only_root_could_not_start_with_is_fine_where_the_service_can(
    options: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.check(options, to=Printing())
    assert capsys.readouterr().out == f"{options}: the manager can start with it as user nobody\n"
    assert (os.geteuid(), os.getegid()) == (0, os.getgid())


def _secret(options: Path) -> None:
    shutil.chown(options.parent / "token", "root")


def _file(options: Path) -> None:
    options.chmod(0o600)


def _directory(options: Path) -> None:
    shutil.chown(options.parent, "root")


def _tasks(options: Path) -> None:
    engine = options.parent / "engine.toml"
    engine.write_text(engine.read_text() + 'user = "daemon"\n')


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_secret, "3: token_file: --token-file: cannot read"),
        (_file, "manager.toml cannot be read: Permission denied"),
        (_directory, "2: database: --database: the directory "),
        (_tasks, "user: only root may run tasks as daemon"),
    ],
)
def test_what_the_service_could_not_start_with_is_said_to_root(
    options: Path, spoil: Callable[[Path], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(options)
    with pytest.raises(typer.Exit):
        config.check(options, to=Printing())
    told = capsys.readouterr().err
    assert said in told
    assert told.endswith(f"note: {options} was checked as user nobody\n")


def test_where_the_service_has_no_user_the_caller_counts(
    options: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(privileges, "SERVICE_USER", "nobody-of-this-name")
    with pytest.raises(typer.Exit):
        config.check(options, to=Printing(output=Output.JSON))
    (found,) = json.loads(capsys.readouterr().out)
    assert found["user"] == "root"
    assert "user must be given: the manager is root" in found["errors"][0]


@pytest.mark.parametrize(
    ("answers", "user"),
    [
        ("LoadState=loaded\nUser=root", "root"),
        ("LoadState=loaded\nUser=", "root"),
        ("LoadState=loaded\nUser=nobody", "nobody"),
        ("LoadState=not-found\nUser=", "nobody"),
        ("", "nobody"),
    ],
)
def test_a_manager_is_checked_as_the_user_that_systemd_gives_it(
    options: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: str, user: str
) -> None:
    programs = options.parent / "bin"
    programs.mkdir()
    systemctl = programs / "systemctl"
    systemctl.write_text(f'#!/bin/sh\n[ "$1 $3" = "show ebb-manager.service" ] || exit 1\necho "{answers}"\n')
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(privileges, "SYSTEMD", options.parent)
    if user == "root":
        _tasks(options)
    config.check(options, to=Printing())
    assert capsys.readouterr().out == f"{options}: the manager can start with it as user {user}\n"


def test_on_a_managers_machine_the_options_of_a_host_that_nobody_has_named_are_passed_over(
    options: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unnamed = options.parent / "hostagent.toml"
    unnamed.write_text(example_of(HostAgentOptions))
    monkeypatch.setattr(ManagerOptions, "file", options)
    monkeypatch.setattr(HostAgentOptions, "file", unnamed)
    config.check(None, None, to=Printing())
    said = capsys.readouterr()
    assert said.out == f"{options}: the manager can start with it as user nobody\n"
    assert said.err == f"note: {unnamed} names no host, so it was not checked\n"
    # Who asks for it is told, and so is everybody where it has a name.
    for daemon in (config.Daemon.HOSTAGENT, None):
        with pytest.raises(typer.Exit):
            config.check(None, daemon, to=Printing())
        assert "hostagent.toml" in capsys.readouterr().err
        unnamed.write_text('id = "No Name"\n')


def test_the_user_is_that_of_the_unit() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read(ROOT / "packaging/systemd/ebb-manager.service")
    assert unit["Service"]["User"] == privileges.SERVICE_USER
