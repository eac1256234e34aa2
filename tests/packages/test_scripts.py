"""The scripts of the Debian packages, with a systemctl and an agent that write down how they are called; and make."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Machine:
    """A folder that a script takes for the whole machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        for name in ("bin", "usr/lib/ebbtide", "etc/ebbtide", "var/lib/ebbtide/agent", "run/systemd/system"):
            (folder / name).mkdir(parents=True)
        for secret in ("token", "hosts.key"):
            (folder / "etc/ebbtide" / secret).touch()
        (folder / "usr/share/ebbtide").mkdir(parents=True)
        (folder / "usr/share/ebbtide/hostagent.toml").write_text('id = "..."\n')
        self.program("systemctl", '[ "$1" != is-active ] || echo active')
        for name in ("systemd-sysusers", "ebb-hostagent", "ebb"):
            self.program(name, "exit 0")

    def program(self, name: str, does: str) -> None:
        """Put one in the place of a program."""
        path = self.folder / "bin" / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >>{self.calls}\n{does}\n')
        path.chmod(0o755)

    def without_systemd(self) -> None:
        """Like a chroot in which an image is made: no systemd runs."""
        (self.folder / "run/systemd/system").rmdir()

    def run(self, script: str, *words: str, **environ: str) -> tuple[int, list[str], str]:
        """Its exit code, the calls that it made, and what it said."""
        text = (ROOT / "packaging" / script).read_text()
        for place in ("/run/", "/var/lib/", "/var/cache/", "/etc/", "/usr/lib/", "/usr/share/"):
            text = text.replace(place, f"{self.folder}{place}")
        self.calls.write_text("")
        path = {"PATH": f"{self.folder}/bin:/usr/bin:/bin"}
        done = subprocess.run(
            ["sh", "-c", text, script, *words], env=path | environ, capture_output=True, text=True, check=False
        )
        return done.returncode, self.calls.read_text().splitlines(), done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


STOPPED = "systemctl stop ebb-hostagent.service"
STARTED = "systemctl start ebb-hostagent.service"
LOOKED_AT = [f"systemctl is-enabled {unit}.service" for unit in ("ebb-manager", "ebb-hostagent")]
DISABLED = "systemctl disable --now ebb-hostagent.service ebb-manager.service"


def test_a_removal_that_is_refused_leaves_manager_and_agent_as_they_were(machine: Machine) -> None:
    (machine.folder / "var/lib/ebbtide/agent/state.json").touch()
    machine.program("ebb-hostagent", "exit 1")
    code, calls, said = machine.run("debian/prerm", "remove")
    assert (code, "so the package stays" in said, "ebb host resume HOST" in said) == (1, True, True)
    assert calls[1:] == [STOPPED, "ebb-hostagent release", STARTED]
    # One that had not run is not started.
    machine.program("systemctl", '[ "$1" != is-active ] || { echo inactive; exit 3; }')
    code, calls, _ = machine.run("debian/prerm", "remove")
    assert (code, calls[1:]) == (1, [STOPPED, "ebb-hostagent release"])


@pytest.mark.parametrize("leaves", [False, True], ids=["gives back", "leaves the limits"])
def test_a_removal_gives_back_first_and_then_disables_both(machine: Machine, leaves: bool) -> None:
    (machine.folder / "var/lib/ebbtide/agent/state.json").touch()
    code, calls, said = machine.run("debian/prerm", "remove", **({"EBB_LEAVE_LIMITS": "1"} if leaves else {}))
    assert code == 0, said
    assert calls[1:] == [STOPPED, *([] if leaves else ["ebb-hostagent release"]), *LOOKED_AT, DISABLED]


@pytest.mark.parametrize("line", ['state_dir = "{}"', "  state_dir='{}'  # on the large disk"])
def test_a_removal_gives_back_also_where_the_agent_remembers_elsewhere(machine: Machine, line: str) -> None:
    (machine.folder / "srv").mkdir()
    (machine.folder / "srv/state.json").touch()
    options = machine.folder / "etc/ebbtide/hostagent.toml"
    options.write_text('id = "host-a"\n#state_dir = "/nowhere"\n' + line.format(machine.folder / "srv") + "\n")
    assert "ebb-hostagent release" in machine.run("debian/prerm", "remove")[1]
    options.write_text('id = "host-a"\n#state_dir = "/var/lib/ebbtide/agent"\n')
    assert "ebb-hostagent release" not in machine.run("debian/prerm", "remove")[1]


def test_an_upgrade_stops_nothing(machine: Machine) -> None:
    lab_is_up(machine)
    assert machine.run("debian/prerm", "upgrade", "1.2") == (0, [], "")


def test_only_a_removal_takes_compiled_code_along(machine: Machine) -> None:
    compiled = machine.folder / "usr/lib/ebbtide/ebb/__pycache__"
    compiled.mkdir(parents=True)
    for words in (("upgrade", "1.2"), ("failed-upgrade", "1.2"), ("deconfigure", "in-favour", "other", "1")):
        assert machine.run("debian/prerm", *words)[0] == 0
        assert compiled.exists(), words
    assert machine.run("debian/prerm", "remove")[0] == 0
    assert not compiled.exists()


def lab_is_up(machine: Machine) -> Path:
    record = machine.folder / "var/lib/ebbtide/lab/lab.json"
    record.parent.mkdir()
    record.touch()
    return record


def test_a_removal_takes_a_lab_down_first_wherever_another_one_is(machine: Machine) -> None:
    assert machine.run("debian/prerm", "remove")[1][-1:] == [DISABLED], "no lab"
    lab_is_up(machine)
    machine.program("ebb", '[ -z "${EBB_STATE_DIR+given}" ]')
    code, calls, said = machine.run("debian/prerm", "remove", EBB_STATE_DIR="/srv/lab")
    assert (code, calls[0], calls[-1], said) == (0, "ebb lab down", DISABLED, "")


def test_a_lab_that_stays_up_keeps_the_package_and_stops_nothing(machine: Machine) -> None:
    lab_is_up(machine)
    machine.program("ebb", "exit 1")
    assert machine.run("debian/prerm", "remove") == (
        1,
        ["ebb lab down"],
        "ebbtide: a lab is up still, so the package stays: see above.\n",
    )


def test_a_purge_leaves_the_record_of_a_lab_that_is_up(machine: Machine) -> None:
    record = lab_is_up(machine)
    (machine.folder / "var/cache/ebbtide").mkdir(parents=True)
    assert machine.run("debian/postrm", "purge")[0] == 0
    assert (record.exists(), (machine.folder / "var/cache/ebbtide").exists()) == (True, True)
    record.unlink()
    assert machine.run("debian/postrm", "purge")[0] == 0
    assert not any((machine.folder / "var" / name).exists() for name in ("lib/ebbtide", "cache/ebbtide"))


def test_a_host_has_the_example_of_options_until_it_joins_and_no_upgrade_touches_what_is_there(
    machine: Machine,
) -> None:
    options = machine.folder / "etc/ebbtide/hostagent.toml"
    assert machine.run("debian/postinst", "configure")[0] == 0
    assert (options.read_text(), options.stat().st_mode & 0o777) == ('id = "..."\n', 0o644)
    for before in ((), ("1.2",)):
        options.write_text('id = "host-a"\n')
        assert machine.run("debian/postinst", "configure", *before)[0] == 0
        assert options.read_text() == 'id = "host-a"\n'
    # Who has removed it meant it.
    options.unlink()
    assert machine.run("debian/postinst", "configure", "1.2")[0] == 0
    assert not options.exists()
    options.touch()
    assert machine.run("debian/postrm", "purge")[0] == 0
    assert not options.parent.exists()


def removed(machine: Machine, *enabled: str) -> Path:
    """A removal that finds these units enabled; returns its record of them."""
    units = "|".join(f"is-enabled\\ {unit}.service" for unit in enabled or ["none"])
    machine.program("systemctl", f'case "$*" in {units}) echo enabled ;; is-enabled*) echo disabled; exit 1 ;; esac')
    code, _, said = machine.run("debian/prerm", "remove")
    assert code == 0, said
    assert machine.run("debian/postrm", "remove")[0] == 0
    return machine.folder / "var/lib/ebbtide/enabled"


def brought_up(calls: list[str]) -> list[str]:
    return [call for call in calls if call.startswith(("systemctl enable", "systemctl start"))]


HOST_AGAIN = ["systemctl enable ebb-hostagent.service", STARTED]


@pytest.mark.parametrize("enabled", [["ebb-hostagent"], ["ebb-manager", "ebb-hostagent"]])
def test_a_package_that_is_installed_again_enables_what_its_removal_found_enabled(
    machine: Machine, enabled: list[str]
) -> None:
    record = removed(machine, *enabled)
    assert machine.run("debian/preinst", "install", "1.2") == (0, [], "")
    code, calls, said = machine.run("debian/postinst", "configure", "1.2")
    again = [f"systemctl {does} {unit}.service" for unit in enabled for does in ("enable", "start")]
    assert (code, brought_up(calls), said) == (0, again, "")
    assert not record.exists()
    assert brought_up(machine.run("debian/postinst", "configure", "1.3")[1]) == [], "once"


def test_a_package_whose_services_were_disabled_is_installed_again_with_them_disabled(machine: Machine) -> None:
    assert not removed(machine).exists()
    assert machine.run("debian/preinst", "install", "1.2")[0] == 0
    assert brought_up(machine.run("debian/postinst", "configure", "1.2")[1]) == []


def test_an_upgrade_enables_nothing_that_a_removal_long_ago_has_found_enabled(machine: Machine) -> None:
    """A version that knows of no record may have been installed and its services disabled since."""
    record = removed(machine, "ebb-hostagent")
    assert machine.run("debian/preinst", "upgrade", "1.2")[0] == 0
    assert brought_up(machine.run("debian/postinst", "configure", "1.2")[1]) == []
    assert not record.exists()


def test_a_removal_that_fails_while_it_disables_leaves_enabled_what_was(machine: Machine) -> None:
    machine.program(
        "systemctl",
        'case "$*" in is-enabled*hostagent*) echo enabled ;; is-enabled*) exit 1 ;; disable*) exit 1 ;; esac',
    )
    assert machine.run("debian/prerm", "remove")[0] == 1
    code, calls, _ = machine.run("debian/postinst", "abort-remove")
    assert (code, calls) == (0, HOST_AGAIN)
    # One that is refused has disabled nothing.
    lab_is_up(machine)
    machine.program("ebb", "exit 1")
    assert machine.run("debian/prerm", "remove")[0] == 1
    assert machine.run("debian/postinst", "abort-remove") == (0, [], "")


def test_a_package_is_installed_again_where_no_systemd_runs_and_where_systemctl_fails(machine: Machine) -> None:
    removed(machine, "ebb-hostagent")
    machine.without_systemd()
    machine.program("systemctl", "exit 1")
    assert machine.run("debian/preinst", "install", "1.2")[0] == 0
    code, calls, said = machine.run("debian/postinst", "configure", "1.2")
    assert (code, brought_up(calls)) == (0, HOST_AGAIN[:1])
    assert said == "ebbtide: it does not start by itself: systemctl enable ebb-hostagent.service\n"


def test_a_purge_forgets_what_was_enabled(machine: Machine) -> None:
    record = removed(machine, "ebb-hostagent")
    assert record.exists()
    assert machine.run("debian/postrm", "purge")[0] == 0
    assert not record.parent.exists()


ENABLE, RELOAD, RESTART, TRY_RESTART = (
    *("systemctl enable ebb-guestagent.service", "systemctl daemon-reload"),
    *(f"systemctl {how} ebb-guestagent.service" for how in ("restart", "try-restart")),
)


def test_a_guest_agent_is_enabled_in_an_image_where_no_systemd_runs(machine: Machine) -> None:
    machine.without_systemd()
    assert machine.run("guest/postinst", "configure") == (0, [ENABLE], "")
    machine.program("systemctl", "exit 1")
    code, _, said = machine.run("guest/postinst", "configure")
    assert (code, said) == (0, "ebbtide-guest: the agent does not start by itself: systemctl enable ebb-guestagent\n")


def test_a_guest_agent_that_was_disabled_stays_so_at_an_upgrade(machine: Machine) -> None:
    assert machine.run("guest/postinst", "configure") == (0, [ENABLE, RELOAD, RESTART], "")
    assert machine.run("guest/preinst", "upgrade", "1.2")[0] == 0
    assert machine.run("guest/postinst", "configure", "1.2") == (0, [RELOAD, TRY_RESTART], "")


def test_a_guest_agent_is_enabled_again_when_it_is_installed_after_a_removal(machine: Machine) -> None:
    assert machine.run("guest/preinst", "install", "1.2") == (0, [], "")
    assert machine.run("guest/postinst", "configure", "1.2") == (0, [ENABLE, RELOAD, RESTART], "")
    assert machine.run("guest/postinst", "configure", "1.3")[1] == [RELOAD, TRY_RESTART], "once"


@pytest.mark.parametrize(("script", "units"), [("debian", "ebb-manager ebb-hostagent"), ("guest", "ebb-guestagent")])
def test_a_service_that_does_not_start_again_is_said_and_does_not_fail_the_installation(
    machine: Machine, script: str, units: str
) -> None:
    machine.program("systemctl", "exit 1")
    code, calls, said = machine.run(f"{script}/postinst", "configure", "1.2")
    assert calls[-1] == "systemctl try-restart " + " ".join(f"{unit}.service" for unit in units.split())
    assert (code, f"see systemctl status {units}\n" in said) == (0, True)


def dry_run(*words: str) -> str:
    """What make would do, called by nobody else: the tests may be run by make."""
    environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    make = ["make", "--dry-run", *words]
    return subprocess.run(make, cwd=ROOT, env=environ, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", ["demo", "lab", "test", "check", "docs", "packages"])
def test_what_may_be_the_first_command_installs_what_is_missing_first(target: str, tmp_path: Path) -> None:
    assert dry_run(target, f"VENV={tmp_path}").startswith("scripts/install-deps.sh demo\n")


@pytest.mark.parametrize("name", ["http_proxy", "HTTPS_PROXY", "no_proxy", "EBB_STATE_DIR"])
def test_what_runs_as_root_sees_the_proxies_and_folders_of_its_caller(name: str, tmp_path: Path) -> None:
    said = dry_run("lab-down", f"VENV={tmp_path}", "SUDO=sudo")
    kept = re.search(r"^sudo --preserve-env=(\S+) ", said)
    assert kept is not None, said
    assert name in kept[1].split(",")


def test_the_folder_of_what_is_built_belongs_to_who_calls_make() -> None:
    assert [line.split()[0] for line in dry_run("box", "SUDO=sudo").splitlines()] == ["mkdir", "sudo"]


def test_packages_are_fetched_by_the_proxy_of_who_calls_sudo(machine: Machine) -> None:
    for name, does in (("id", "echo 1000"), ("dpkg-query", "exit 1"), ("sudo", "exit 0")):
        machine.program(name, does)
    environ = {"PATH": f"{machine.folder}/bin:/usr/bin:/bin", "http_proxy": "http://10.0.0.1:3128"}
    subprocess.run(["bash", ROOT / "scripts/install-deps.sh"], env=environ, check=True, capture_output=True)
    calls = [line for line in machine.calls.read_text().splitlines() if line.startswith("sudo ")]
    assert [" ".join(line.split()[:5]) for line in calls] == [
        "sudo env http_proxy=http://10.0.0.1:3128 DEBIAN_FRONTEND=noninteractive apt-get"
    ] * 2


PACKAGES = ROOT / "scripts/packages.sh"


def test_packages_that_cannot_be_built_leave_the_folder_as_it_was(tmp_path: Path) -> None:
    python, folder = tmp_path / "python", tmp_path / "mine"
    python.write_text("#!/bin/sh\ncase $2 in *version*) echo 1.2 ;; *) exit 1 ;; esac\n")
    python.chmod(0o755)
    folder.mkdir()
    for name in ("letters.txt", "ebbtide_1.1_amd64.deb"):
        (folder / name).touch()
    assert subprocess.run(["bash", PACKAGES, python, folder], capture_output=True).returncode == 1
    assert sorted(path.name for path in folder.iterdir()) == ["ebbtide_1.1_amd64.deb", "letters.txt"]


@pytest.mark.parametrize(
    ("version", "there", "said"),
    [
        ("3.13", "1", "is not Python 3.11, which requirements.lock and Debian 12 have: no Debian package for hosts"),
        ("3.11", "1", "has no setuptools: "),
    ],
)
def test_a_python_that_cannot_build_is_told_before_anything_is_built(
    tmp_path: Path, version: str, there: str, said: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncase $2 in *version_info*) echo {version} ;; *) exit {there} ;; esac\n")
    python.chmod(0o755)
    done = subprocess.run(["bash", PACKAGES, python, tmp_path / "dist"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert f"{python} -m pip install setuptools" in done.stderr.splitlines()[-1]


def test_packages_take_the_place_of_those_of_before_and_of_nothing_else(tmp_path: Path) -> None:
    """By what the script ends with."""
    built, folder = tmp_path / "built", tmp_path / "a folder"
    others = ["ebbtide-notes.txt", "letters.txt"]
    before = ["ebb-guestagent.pyz", "ebbtide-1.1-py3-none-any.whl", "ebbtide-1.1.tar.gz", "ebbtide-guest_1.1_all.deb"]
    for place, names in ((built, ["ebb-guestagent.pyz", "ebbtide_1.2.deb"]), (folder, before + others)):
        place.mkdir()
        for name in names:
            (place / name).write_text(place.name)
    function = PACKAGES.read_text(encoding="utf-8").partition("\ndeliver() {\n")[2].partition("\n}\n")[0]
    script = f"set -euo pipefail; dist=$1 folder=$2\n{function}\n"
    subprocess.run(["bash", "-c", script, "end", built, folder], check=True, stdout=subprocess.DEVNULL)
    assert sorted(path.name for path in folder.iterdir()) == sorted(["ebb-guestagent.pyz", "ebbtide_1.2.deb", *others])
    assert (folder / "ebb-guestagent.pyz").read_text() == "built"
