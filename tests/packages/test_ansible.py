"""The Ansible role of hosts, by the rules of ansible-lint's strictest profile; `make test-vagrant` applies it."""

from __future__ import annotations

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


@pytest.mark.parametrize("name", COMMANDS)
def test_the_role_is_clean(name: str, tmp_path: Path) -> None:
    environ = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "ANSIBLE_HOME": str(tmp_path),
        "LC_ALL": "C.UTF-8",
        "NO_COLOR": "1",
    }
    done = subprocess.run(COMMANDS[name], cwd=PLACE, env=environ, capture_output=True, text=True)
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
