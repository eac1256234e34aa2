"""The Ansible role of hosts, by the rules of ansible-lint's strictest profile; `make test-vagrant` applies it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ebbtide.cli.doctor import PROGRAMS

PLACE = Path(__file__).parents[2] / "packaging/ansible"
COMMANDS = {
    "lint": ("ansible-lint", "--offline", "-q", "--profile", "production", "hosts.yml", "roles/ebbtide"),
    "syntax": ("ansible-playbook", "--syntax-check", "--inventory", "localhost,", "hosts.yml"),
}


def run(home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environ = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "ANSIBLE_HOME": str(home),
        "LC_ALL": "C.UTF-8",
        "NO_COLOR": "1",
    }
    return subprocess.run(command, cwd=PLACE, env=environ, capture_output=True, text=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_role_is_clean(name: str, tmp_path: Path) -> None:
    done = run(tmp_path, *COMMANDS[name])
    assert done.returncode == 0, done.stdout + done.stderr


def of_role(name: str) -> Any:
    return yaml.safe_load((PLACE / "roles/ebbtide" / name / "main.yml").read_text(encoding="utf-8"))


def test_a_host_gets_the_packages_of_all_programs_that_its_agent_calls() -> None:
    """Nothing comes along with them, and a machine that was made a while ago has old lists of packages or none."""
    installed = of_role("defaults")["ebbtide_host_packages"]
    (install,) = [task["ansible.builtin.apt"] for task in of_role("tasks") if "libvirt" in task["name"]]
    assert install["name"] == "{{ ebbtide_host_packages }}"
    called = {PROGRAMS[program][0] for program in ("qemu-system-x86_64", "qemu-img", "libvirtd", "virtlogd")}
    assert set(installed) == called | {"iproute2"}
    assert (install["update_cache"], install["cache_valid_time"] > 0) == (True, True)


def test_the_role_begins_only_where_it_is_said_at_which_url_the_manager_serves(tmp_path: Path) -> None:
    """By its first task alone: the others would install packages on this machine."""
    url = "https://10.0.0.1:7100"
    given: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        ({"ebbtide_manager_url": "10.0.0.1:7100"}, False),
        ({"ebbtide_manager_url": url}, True),
        ({"ebbtide_manager_environment": {"EBB_MANAGER": url}}, True),
        # Root's own, on the manager.
        ({"ebbtide_manager_environment": {"EBB_CONTEXT": "here"}}, True),
    ]
    first = of_role("tasks")[0]
    assert set(first) == {"name", "ansible.builtin.assert"}
    tasks = [
        first | {"vars": some, "register": f"looked_{n}", "ignore_errors": True} for n, (some, _) in enumerate(given)
    ]
    looked = ", ".join(f"looked_{n}" for n in range(len(given)))
    found = tmp_path / "found.json"
    tasks.append({"ansible.builtin.copy": {"content": f"{{{{ [{looked}] | to_json }}}}", "dest": str(found)}})
    # The groups are those of an inventory.
    defaults = {name: value for name, value in of_role("defaults").items() if "query(" not in str(value)}
    python = {"ansible_python_interpreter": sys.executable}
    play = {"hosts": "localhost", "gather_facts": False, "vars": defaults | python, "tasks": tasks}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
    done = run(tmp_path, "ansible-playbook", "--inventory", "localhost,", "-c", "local", str(tmp_path / "play.yml"))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(found.read_text(encoding="utf-8"))
    assert [not result["failed"] for result in results] == [passes for _, passes in given]
    assert results[0]["msg"].startswith("Set ebbtide_manager_url to the URL at which the manager serves")


class Joining:
    """The tasks by which a host joins, on this machine, over programs that write down how they are called."""

    TOKEN = "k2GcQ-the-token"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        (folder / "bin").mkdir()
        self.program("ebb", f"echo 'ebb-hostagent join http://127.0.0.1:7100 - <<<{self.TOKEN}'")
        # As over plain HTTP: without a certificate.
        self.program("ebb-hostagent", f"grep -qx {self.TOKEN} && touch {folder}/command-token")

    def program(self, name: str, does: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >>{self.calls}\n{does}\n')
        path.chmod(0o755)

    def play(self, **given: Any) -> tuple[bool, list[str], str]:
        """Whether it went well, the calls, and what Ansible said."""
        tasks = [task for task in of_role("tasks") if task["name"].endswith(("has joined", "the cluster"))]
        assert len(tasks) == 2
        known = {"ebbtide_manager": "localhost", "ebbtide_host_id": "host-a", "ebbtide_manager_environment": {}}
        known["ebbtide_manager_url"] = "http://127.0.0.1:7100"
        known["ebbtide_joined"] = of_role("defaults")["ebbtide_joined"].replace(
            "/var/lib/ebbtide/enrolment", str(self.folder)
        )
        defaults = {name: value for name, value in of_role("defaults").items() if "{{" not in str(value)}
        python = {"ansible_python_interpreter": sys.executable}
        play = {"hosts": "localhost", "gather_facts": False, "vars": defaults | known | python | given, "tasks": tasks}
        play["environment"] = {"PATH": f"{self.folder}/bin:/usr/bin:/bin"}
        (self.folder / "play.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
        self.calls.write_text("")
        command = ("ansible-playbook", "--inventory", "localhost,", "-c", "local", str(self.folder / "play.yml"))
        done = run(self.folder, *command)
        assert self.TOKEN not in done.stdout + done.stderr
        return done.returncode == 0, self.calls.read_text().splitlines(), done.stdout


@pytest.fixture
def joining(tmp_path: Path) -> Joining:
    return Joining(tmp_path)


LINE = "ebb-hostagent join http://127.0.0.1:7100 - --id host-a"


def test_a_host_that_has_joined_over_plain_http_joins_once_and_keeps_the_capacity_that_it_has(joining: Joining) -> None:
    assert joining.play()[:2] == (True, ["ebb host invite", LINE])
    assert joining.play()[:2] == (True, [])


def test_a_host_whose_join_ended_before_its_certificate_was_written_joins_again(joining: Joining) -> None:
    over_tls = {"ebbtide_manager_url": "https://10.0.0.1:7100"}
    for _ in range(2):
        assert joining.play(**over_tls)[:2] == (True, ["ebb host invite", LINE])
    (joining.folder / "host.pem").touch()
    assert joining.play(**over_tls)[:2] == (True, [])


def test_a_host_that_was_made_anew_is_invited_by_its_name_where_that_is_said(joining: Joining) -> None:
    given = {"ebbtide_enrol_again": True, "ebbtide_capacity": "cpu_cores=6"}
    assert joining.play(**given)[:2] == (True, ["ebb host invite host-a", f"{LINE} --capacity cpu_cores=6"])


@pytest.mark.parametrize(
    ("program", "task"),
    [("ebb", "Invite the host"), ("ebb-hostagent", "Join by the line that the manager has printed")],
)
def test_why_a_host_has_not_joined_is_said_without_the_token(joining: Joining, program: str, task: str) -> None:
    # The token on its input is read first: to write to a program that has ended already fails.
    joining.program(
        program, f"cat >/dev/null; echo {joining.TOKEN}; echo 'host: there is a host host-a already' >&2; exit 1"
    )
    well, _, said = joining.play()
    assert (well, f"{task}: host: there is a host host-a already" in said) == (False, True), said
