"""The units for systemd: they parse, their privileges are as few as docs/how-to/run-as-a-service.md says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

UNITS = ROOT / "packaging/systemd"
#: The exposure that `systemd-analyze security` finds, at the most.
EXPOSURE = {"ebb-manager": 1.5, "ebb-hostagent": 4.5, "ebb-guestagent": 9.6}


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True)


def test_every_unit_has_a_figure() -> None:
    assert {path.stem for path in UNITS.glob("*.service")} == set(EXPOSURE)


@pytest.mark.parametrize("unit", EXPOSURE)
def test_systemd_takes_the_unit_as_it_is(unit: str, tmp_path: Path) -> None:
    text = (UNITS / f"{unit}.service").read_text(encoding="utf-8")
    # The programs and their pages come with the package.
    text = re.sub(r"^(Exec\w+=)/usr/bin/ebb\S*", r"\1/bin/true", text, flags=re.MULTILINE)
    copy = tmp_path / f"{unit}.service"
    copy.write_text(re.sub(r"^Documentation=.*\n", "", text, flags=re.MULTILINE), encoding="utf-8")
    found = analyze("verify", "--recursive-errors=no", str(copy))
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize(("unit", "most"), EXPOSURE.items())
def test_the_unit_has_few_privileges(unit: str, most: float) -> None:
    found = analyze("security", "--offline=true", f"--threshold={10 * most:.0f}", str(UNITS / f"{unit}.service"))
    assert found.returncode == 0, found.stdout
    exposure = re.search(r"Overall exposure level for \S+: ([0-9.]+)", found.stdout)
    assert exposure is not None
    assert float(exposure[1]) <= most


@pytest.mark.parametrize(
    ("unit", "setting"),
    [("ebb-manager", "ProcSubset"), ("ebb-hostagent", "ProtectClock"), ("ebb-hostagent", "PrivateDevices")],
    ids=["/proc/stat, for the metrics of the process", "/dev/kvm, on an older systemd", "/dev/kvm"],
)
def test_the_unit_hides_nothing_that_its_daemon_reads(unit: str, setting: str) -> None:
    assert f"\n{setting}=" not in (UNITS / f"{unit}.service").read_text(encoding="utf-8")


def test_the_end_of_the_manager_takes_no_shared_memory_of_tasks_that_run_as_its_user() -> None:
    assert "\nRemoveIPC=yes" not in (UNITS / "ebb-manager.service").read_text(encoding="utf-8")


def test_the_manager_begins_when_users_of_tasks_can_be_looked_up() -> None:
    text = (UNITS / "ebb-manager.service").read_text(encoding="utf-8")
    ordering = [word for line in text.splitlines() if line.startswith("After=") for word in line[6:].split()]
    assert "nss-user-lookup.target" in ordering


@pytest.mark.parametrize("unit", EXPOSURE)
def test_the_unit_waits_for_signs_of_life_and_for_a_clean_end(unit: str) -> None:
    text = (UNITS / f"{unit}.service").read_text(encoding="utf-8")
    for line in ("Type=notify", "UMask=0077", "RestartPreventExitStatus=2", "ExecReload=/bin/kill -HUP $MAINPID"):
        assert line in text.splitlines()
    watched = re.search(r"^WatchdogSec=(\d+)$", text, re.MULTILINE)
    assert watched is not None
    assert int(watched[1]) >= 30, "a loop that is held up for a moment is no reason to kill it"


@pytest.mark.parametrize(
    ("page", "name", "adds"),
    [
        ("reference/tasks", "ebb-manager", ["\nReadWritePaths="] * 2),
        ("internals/bandwidth", "ebb-hostagent", ["\nRestrictNamespaces=net mnt\n"]),
        ("how-to/run-as-a-service", "ebb-hostagent", ["\nReadWritePaths="]),
    ],
)
def test_what_a_page_adds_to_a_unit_is_taken_by_systemd(page: str, name: str, adds: list[str], tmp_path: Path) -> None:
    unit = re.sub(
        r"^(Exec\w+=/usr/bin/ebb\S*.*|Documentation=.*)\n",
        "",
        (UNITS / f"{name}.service").read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    ).replace("[Service]", "[Service]\nExecStart=/bin/true")
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    added = re.findall(r"^```ini\n.*?^(\[Service\]\n.*?)^```", text, re.MULTILINE | re.DOTALL)
    for number, (lines, setting) in enumerate(zip(added, adds, strict=True)):
        assert setting in lines
        copy = tmp_path / f"{name}-{number}.service"
        copy.write_text(f"{unit}\n{lines}", encoding="utf-8")
        found = analyze("verify", "--recursive-errors=no", str(copy))
        assert (found.returncode, found.stderr) == (0, "")
