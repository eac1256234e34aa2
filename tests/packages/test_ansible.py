"""The Ansible role of hosts, by the rules of ansible-lint's strictest profile; `make test-vagrant` applies it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
