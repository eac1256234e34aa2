"""What the doctor makes of certificates that end soon, or have ended: it names the command that renews each."""

from __future__ import annotations

import builtins
import datetime
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ebbtide.cli import doctor_certificates
from ebbtide.cli.certificates import begin_rollover
from ebbtide.cli.commands import doctor as command
from ebbtide.cli.doctor import Diagnosis
from ebbtide.cli.findings import Finding
from ebbtide.cli.main import app
from ebbtide.extras import installing
from tests.rest.pki import Pki

NOW = datetime.datetime.now(datetime.UTC)


class Machine:
    """A manager and a host agent on one machine, with the files of options that they have."""

    def __init__(self, directory: Path) -> None:
        self.tls = directory / "tls"
        self.pki = Pki(self.tls)
        self.own = self.pki.pair("ebb-manager", ("192.0.2.1", "mgr.example"), days=365).certificate
        self.host = self.pki.pair("host-a", days=90).certificate
        self.manager, self.agent = directory / "manager.toml", directory / "hostagent.toml"
        self.manager.write_text(
            f'tls_certificate = "{self.own}"\nclient_ca = "{self.pki.ca}"\nca_key = "{self.tls}/ca.key"\n'
        )
        self.agent.write_text(f'id = "host-a"\ntls_certificate = "{self.host}"\nclient_ca = "{self.pki.ca}"\n')
        self.facts: dict[str, Any] = {}

    def found(self, days: float) -> list[Finding]:
        """What the doctor finds after so many days."""
        now = NOW + datetime.timedelta(days=days)
        return list(doctor_certificates.certificates(now, self.facts, self.manager, self.agent))

    def by_name(self, days: float) -> dict[str, Finding]:
        return {found.name: found for found in self.found(days)}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_end_of_each_certificate_is_told_once(machine: Machine) -> None:
    found = machine.found(1)
    assert [one.name for one in found] == ["manager certificate", "CA certificate", "host certificate"]
    assert all(one.ok and one.fix is None for one in found)
    assert f"{machine.host} ends on " in found[2].detail
    assert "in 88 days" in found[2].detail or "in 89 days" in found[2].detail
    assert [Path(one["file"]) for one in machine.facts["certificates"]] == [machine.own, machine.pki.ca, machine.host]


@pytest.mark.parametrize(
    ("name", "days", "noted"),
    [
        ("manager certificate", 334, False),
        ("manager certificate", 336, True),
        # It renews itself with 30 days left.
        ("host certificate", 61, False),
        ("host certificate", 71, True),
    ],
)
def test_a_certificate_that_ends_soon_is_a_note(machine: Machine, name: str, days: int, noted: bool) -> None:
    found = machine.by_name(days)[name]
    assert (found.ok, found.needed, found.ended) == (not noted, False, False)
    assert Diagnosis([found], {}).problem == ""


@pytest.mark.parametrize(("days", "noted"), [(0.1, False), (22, False), (24, True)])
def test_a_short_certificate_of_a_host_is_a_note_only_where_it_should_have_been_renewed(
    machine: Machine, days: float, noted: bool
) -> None:
    machine.pki.pair("host-a", days=30)
    assert machine.by_name(days)["host certificate"].ok is not noted


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("manager certificate", ""),
        ("CA certificate", ""),
        (
            "host certificate",
            "; if it is right, at the manager: ebb host invite host-a; then the line that it prints, with --force",
        ),
    ],
)
def test_a_certificate_of_later_is_a_note_and_the_clock_is_looked_at_first(
    machine: Machine, name: str, more: str
) -> None:
    found = machine.by_name(-2)[name]
    assert (found.ok, found.needed) == (False, False)
    assert found.detail.endswith(" UTC only (is this machine's clock right?), and not yet")
    assert found.fix == f"timedatectl: set the clock{more}"


@pytest.mark.parametrize(
    ("name", "soon", "over", "renew_soon", "renew_over"),
    [
        (
            "manager certificate",
            340,
            366,
            "ebb certificates {tls} --manager mgr.example --manager 192.0.2.1 && systemctl reload ebb-manager",
            "ebb certificates {tls} --manager mgr.example --manager 192.0.2.1 && systemctl reload ebb-manager",
        ),
        (
            "host certificate",
            71,
            91,
            "systemctl restart ebb-hostagent; journalctl -u ebb-hostagent",
            "at the manager: ebb host invite host-a; then the line that it prints, with --force",
        ),
        (
            "CA certificate",
            3630,
            3651,
            "ebb ca next {tls}",
            "ebb certificates NEW-DIRECTORY --manager ADDRESS; then, for each host, ebb host invite HOST",
        ),
    ],
)
def test_what_renews_a_certificate_is_said_and_one_that_has_ended_fails_the_machine(
    machine: Machine, name: str, soon: int, over: int, renew_soon: str, renew_over: str
) -> None:
    assert machine.by_name(soon)[name].fix == renew_soon.format(tls=machine.tls)
    found = machine.by_name(over)[name]
    assert (found.ok, found.needed, found.ended) == (False, True, True)
    assert found.fix == renew_over.format(tls=machine.tls)
    problem = Diagnosis([found], {}).problem
    assert "has ended on " in problem
    assert problem.endswith(f"to renew it: {found.fix}")
    assert "install-deps" not in problem


@pytest.mark.parametrize(
    ("days", "fix"),
    [
        (3284, " --manager 192.0.2.1 && systemctl"),
        (3300, " --manager 192.0.2.1 --days 3(49|50) && systemctl"),
        (3650, "ebb certificates NEW-DIRECTORY "),
    ],
)
def test_the_managers_certificate_is_renewed_for_as_long_as_its_ca_lasts(machine: Machine, days: int, fix: str) -> None:
    found = machine.by_name(days)["manager certificate"]
    assert re.search(fix, found.fix or "")


def test_on_a_host_alone_the_ca_is_renewed_at_the_manager(machine: Machine) -> None:
    machine.manager.unlink()
    assert machine.by_name(3630)["CA certificate"].fix == "at the manager: ebb ca next DIRECTORY"


def test_of_two_cas_each_is_looked_at(machine: Machine) -> None:
    begin_rollover(machine.tls)
    cas = [one for one in machine.found(3630) if one.name == "CA certificate"]
    assert [one.fix for one in cas] == [f"ebb ca finish {machine.tls}"] * 2


def test_what_cannot_be_looked_at_is_a_note(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.own.unlink()
    machine.pki.ca.write_text("junk")
    machine.agent.write_text("no TOML")
    found = machine.found(1)
    assert [one.name for one in found] == ["manager certificate", "CA certificate", "certificates"]
    assert f"{machine.own} cannot be read: No such file" in found[0].detail
    assert not any(one.needed or one.ok for one in found)
    importing = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "cryptography":
            raise ImportError(name)
        return importing(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert machine.found(1)[0].fix == installing("certificates")
    machine.manager.unlink()
    machine.agent.unlink()
    assert machine.found(1) == []


def test_the_command_marks_what_has_ended_and_ends_with_1(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine.found(366)
    monkeypatch.setattr(command, "examine", lambda report: Diagnosis(found, {}))
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    (line,) = [line for line in done.output.splitlines() if "manager certificate" in line]
    assert line.startswith("ENDED")
    assert "host certificate" in str(done.exception)
