"""Commands about real guests, held to what tests/cli/test_every_command.py holds all others to."""

from __future__ import annotations

import json
import subprocess
import sys

import jsonschema
import pytest

from ebbtide.cli.schemas import schema_of
from tests.guests.conftest import RunningLab
from tests.guests.test_guest_enable import CONTROLLER, bare

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600)]


def ebb(lab: RunningLab, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "ebbtide.cli.main", *words]
    environment = lab.environment | variables
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, env=environment)


def check(lab: RunningLab, words: str, *more: str) -> str:
    """The table of a command, whose document is of its schema."""
    table, found = (ebb(lab, *words.split(), *more, "-o", form) for form in ("table", "json"))
    assert (table.returncode, found.returncode) == (0, 0), table.stderr + found.stderr
    jsonschema.validate(json.loads(found.stdout), schema_of(words))
    assert table.stdout != found.stdout
    return table.stdout


def test_a_lab_that_is_up_is_said_to_be_in_a_table_and_a_document(lab: RunningLab) -> None:
    assert "the lab is up: " in check(lab, "lab up")
    for host in lab.state.hosts:
        assert host.id in check(lab, "lab status")
    assert "was cached" in check(lab, "lab image build")


def test_the_channel_of_a_guest_is_made_and_told(lab: RunningLab) -> None:
    with bare(lab.state.uri, CONTROLLER) as domain:
        told = check(lab, "guest enable", domain.name(), "--uri", lab.state.uri)
    assert "has the channel io.ebbtide.guest.0" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [("guest enable not-there", "not-there"), ("lab status", "ebb lab up"), ("demo", "ebb lab up")],
)
def test_what_is_missing_is_one_sentence(
    lab: RunningLab, tmp_path_factory: pytest.TempPathFactory, words: str, said: str
) -> None:
    nowhere = {} if words.startswith("guest") else {"EBB_STATE_DIR": str(tmp_path_factory.getbasetemp() / "no-lab")}
    found = ebb(lab, *words.split(), **nowhere)
    assert (found.returncode, found.stdout) == (1, "")
    assert said in found.stderr
    assert "Traceback" not in found.stderr
