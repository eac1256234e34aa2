"""The drop-in program that holds a guest's power-off back while tasks save, in a process namespace of its own."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from ebbtide.matcher.engines.records import shell_of

pytestmark = [pytest.mark.service, pytest.mark.timeout(120)]

PROGRAM = Path(__file__).resolve().parents[2] / "examples/preempt.d/end-tasks"
#: What goes on until it is killed.
STUBBORN = "trap '' TERM; tail -f /dev/null"
#: An attempt as a Dask worker starts one, a notice, the program, and whether the attempt's command is still there: one
#: that was killed a moment ago may be seen as it dies, and until somebody has waited for it.
INSIDE = """
mount -t tmpfs none /run && mkdir /run/ebbtide && touch /run/ebbtide/preemption.json
setsid "$@" & sleep 0.5
if [ "$WITHDRAWN_S" ]; then (sleep "$WITHDRAWN_S"; rm /run/ebbtide/preemption.json) & fi
"$0" "$KIND" 6 shortfall
sleep 0.5
pgrep -x -r D,R,S,T tail > /dev/null && echo left
exit 0
"""


def held_back_s(directory: Path, command: str, kind: str = "stop", withdrawn_s: str = "") -> tuple[float, str]:
    """How long a notice of 6 s was held back, and what was left when it was over."""
    attempt = "ebb.train.0a.1"
    (directory / attempt).mkdir(parents=True)
    argv = [*shell_of(directory, attempt), "n1", "sh", "-c", command]
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
    began = time.monotonic()
    done = subprocess.run(
        [*apart, "sh", "-c", INSIDE, str(PROGRAM), *argv],
        env={"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "KIND": kind, "WITHDRAWN_S": withdrawn_s},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return time.monotonic() - began, done.stdout.strip()


def test_it_waits_for_what_ends_by_itself_and_kills_what_does_not(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    soon_s, left = held_back_s(tmp_path / "a", f"sleep 2; echo saved > {ended}")
    assert (ended.read_text(), left) == ("saved\n", "")
    late_s, left = held_back_s(tmp_path / "b", STUBBORN)
    assert left == "", "its command is gone"
    assert soon_s < late_s


@pytest.mark.parametrize("command", ["timeout 60 {}; true", "(timeout 60 {} &); sleep 60", "setsid --wait {}; true"])
def test_what_a_command_has_started_in_groups_and_sessions_of_their_own_is_killed(tmp_path: Path, command: str) -> None:
    assert held_back_s(tmp_path, command.format(f'sh -c "{STUBBORN}"'))[1] == ""


@pytest.mark.parametrize(("kind", "withdrawn_s"), [("withdrawn", ""), ("stop", "1")])
def test_a_preemption_that_is_withdrawn_ends_no_task(tmp_path: Path, kind: str, withdrawn_s: str) -> None:
    assert held_back_s(tmp_path, STUBBORN, kind, withdrawn_s)[1] == "left"
