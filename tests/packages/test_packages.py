"""What `make packages` builds: it runs where nothing of the checkout is."""

from __future__ import annotations

import gzip
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import pytest

from guestagent import __version__

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.service
#: Without a compiler, pkg-config or anything else of this machine's.
BARE = {"PATH": "/nonexistent", "LC_ALL": "C.UTF-8"}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages") / "dist"
    subprocess.run(["bash", ROOT / "scripts/packages.sh", sys.executable, folder, "--bare"], check=True)
    return folder


def said(*command: str | Path, cwd: Path, **environ: str) -> str:
    found = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**BARE, "HOME": str(cwd), **environ},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def architecture() -> str:
    return subprocess.run(["dpkg", "--print-architecture"], check=True, capture_output=True, text=True).stdout.strip()


def debian_version() -> str:
    """Of the commit that is built, whose date orders builds of one version; apt passes over an equal one."""
    said = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, check=True, capture_output=True, text=True)
    made = datetime.fromtimestamp(int(said.stdout), UTC)
    return f"{__version__.replace('.dev', '~dev')}+{made:%Y%m%d%H%M}" if ".dev" in __version__ else __version__


def unpacked(package: Path, place: Path) -> Path:
    subprocess.run(["/usr/bin/dpkg-deb", "-R", package, place], check=True)
    return place


def test_all_are_built(dist: Path) -> None:
    assert sorted(path.name for path in dist.iterdir()) == [
        "ebb-guestagent.pyz",
        "ebb-guestagent.service",
        f"ebbtide-{__version__}-py3-none-any.whl",
        f"ebbtide-{__version__}.tar.gz",
        f"ebbtide-guest_{debian_version()}_all.deb",
        f"ebbtide_{debian_version()}_{architecture()}.deb",
        f"ebbtide_guest-{__version__}-py3-none-any.whl",
    ]


def test_one_file_is_the_whole_guest_agent(dist: Path, tmp_path: Path) -> None:
    """Under Debian's own Python: nothing of the virtual environment."""
    assert said("/usr/bin/python3", "-I", dist / "ebb-guestagent.pyz", "--version", cwd=tmp_path) == f"{__version__}\n"


def test_the_guest_wheel_asks_for_nothing(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("ebbtide_guest-*.whl"))) as wheel:
        tops = {name.split("/")[0] for name in wheel.namelist()}
        metadata = wheel.read(f"ebbtide_guest-{__version__}.dist-info/METADATA").decode()
    assert tops == {"guestagent", "app_adapters", f"ebbtide_guest-{__version__}.dist-info"}
    assert "Requires-Dist" not in metadata
    assert "Requires-Python: >=3.8" in metadata


def test_the_debian_package_depends_on_python_only_and_its_programs_run(dist: Path, tmp_path: Path) -> None:
    package, system = next(dist.glob("ebbtide-guest_*.deb")), "/usr/bin:/bin"
    assert said("/usr/bin/dpkg-deb", "-f", package, "Depends", cwd=tmp_path, PATH=system) == "python3 (>= 3.8)\n"
    said("/usr/bin/dpkg-deb", "-x", package, tmp_path, cwd=tmp_path, PATH=system)
    for program in ("ebb-guestagent", "ebb-adapter"):
        text = (tmp_path / "usr/bin" / program).read_text().replace("/usr/lib", f"{tmp_path}/usr/lib")
        assert "usage: " in said("/usr/bin/python3", "-I", "-c", text, "--help", cwd=tmp_path)
    modes = {path.stat().st_mode & 0o7777 for path in (tmp_path / "usr").rglob("*") if path.is_file()}
    assert modes == {0o644, 0o755}
    assert {path.stat().st_uid for path in tmp_path.rglob("*")} == {os.getuid()}


@pytest.mark.parametrize(
    ("package", "pages"),
    [
        ("ebbtide_*", ["man1/ebb.1", "man8/ebb-hostagent.8", "man8/ebb-manager.8"]),
        ("ebbtide-guest_*", ["man1/ebb-adapter.1", "man8/ebb-guestagent.8"]),
    ],
)
def test_a_debian_package_has_a_page_for_each_program_and_asks_before_it_changes_an_edited_file(
    dist: Path, tmp_path: Path, package: str, pages: list[str]
) -> None:
    tree = unpacked(next(dist.glob(f"{package}.deb")), tmp_path / "tree")
    manual = tree / "usr/share/man"
    assert sorted(str(path.relative_to(manual)) for path in manual.rglob("*.gz")) == [f"{page}.gz" for page in pages]
    for path in manual.rglob("*.gz"):
        text = gzip.decompress(path.read_bytes()).decode()
        # Only macros of man(7) begin a line.
        assert {line.split()[0] for line in text.splitlines() if line.startswith(".")} <= {
            ".TH", ".SH", ".SS", ".TP", ".B", ".BR", ".PP", ".nf", ".fi",
        }  # fmt: skip
    asked = (tree / "DEBIAN/conffiles").read_text().splitlines()
    assert asked == sorted("/" + str(path.relative_to(tree)) for path in (tree / "etc").rglob("*") if path.is_file())
    scripts = {path.name for path in (tree / "DEBIAN").iterdir()} & {"preinst", "postinst", "prerm", "postrm"}
    assert scripts == {"preinst", "postinst", "prerm", "postrm"}
    for script in scripts:
        subprocess.run(["sh", "-n", tree / "DEBIAN" / script], check=True)
    units = list((tree / "lib/systemd/system").glob("*.service"))
    assert units
    for unit in units:
        for line in re.findall(r"^(?:Exec\w+=|Documentation=).*$", unit.read_text(), re.MULTILINE):
            words = re.findall(r"/usr/bin/(?:ebb\S*)|man:(\S+)\((\d)\)", line)
            for name, section in words:
                assert not name or (manual / f"man{section}/{name}.{section}.gz").exists(), line
            for program in re.findall(r"/usr/bin/ebb\S*", line):
                assert os.path.lexists(tree / program.lstrip("/")), line


def test_the_debian_package_of_manager_and_host_agent_has_their_options_and_completion(
    dist: Path, tmp_path: Path
) -> None:
    """What it brings of the index is looked at by `make test-packages`: here it is built without."""
    tree = unpacked(next(dist.glob("ebbtide_*.deb")), tmp_path / "tree")
    manager = tomllib.loads((tree / "etc/ebbtide/manager.toml").read_text())
    assert manager == {
        "token_file": "/etc/ebbtide/token",
        "hosts_key_file": "/etc/ebbtide/hosts.key",
        "database": "/var/lib/ebbtide/manager/manager.sqlite",
    }
    # Joining writes the host agent's below /etc, so that one is copied there and is no file of the package.
    assert (tree / "DEBIAN/conffiles").read_text() == "/etc/ebbtide/manager.toml\n"
    host = tomllib.loads((tree / "usr/share/ebbtide/hostagent.toml").read_text())
    assert host == {"id": "...", "capacity": "auto", "token_file": "/etc/ebbtide/command-token"}
    made = (tree / "DEBIAN/postinst").read_text()
    assert "for secret in token hosts.key" in made
    assert "complete " in (tree / "usr/share/bash-completion/completions/ebb").read_text()
    assert (tree / "usr/share/zsh/vendor-completions/_ebb").read_text().startswith("#compdef ebb\n")
    pages = tree / "usr/share/doc/ebbtide"
    assert (pages / "docs/reference/command-line.md").read_bytes() == (
        ROOT / "docs/reference/command-line.md"
    ).read_bytes()
    assert (pages / "deploy/prometheus/prometheus.yml").exists()
    for program in ("ebb", "ebb-manager", "ebb-hostagent"):
        link = tree / "usr/bin" / program
        assert link.resolve().read_text().startswith("#!/usr/lib/ebbtide/bin/python3 -I\n")
        module = re.search(r"^from (\S+) import main$", link.resolve().read_text(), re.MULTILINE)
        assert module is not None
        assert importlib.util.find_spec(module[1]) is not None


def test_the_core_runs_from_its_wheel_without_a_compiler_and_without_libvirt(dist: Path, tmp_path: Path) -> None:
    place = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    pip = [str(place / "bin/python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = next(dist.glob("ebbtide-*.whl"))
    subprocess.run([*pip, "install", "--only-binary=:all:", str(wheel)], check=True, cwd=tmp_path)
    assert said(place / "bin/ebb", "--version", cwd=tmp_path) == f"ebb {__version__}\n"
    assert "examples:" in said(place / "bin/ebb-manager", "--help", cwd=tmp_path)
    assert said(place / "bin/ebb", "config", "example", "manager", cwd=tmp_path).startswith("# Options of ebb-manager")
    listed = said(place / "bin/python", "-m", "pip", "list", "--format=freeze", cwd=tmp_path)
    assert not {"libvirt-python", "psutil", "scipy"} & {line.split("==")[0] for line in listed.splitlines()}
