"""docs/reference/adapters.md: its example runs exactly as it is printed, and its tables are complete."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from app_adapters.registry import MODULES
from guestagent.hooks import DropIn, read_drop_in
from tests.adapters.proc import rss_mib

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs/reference/adapters.md").read_text()
SOCKET = "/run/ebbtide/hooks/thumbnails.sock"


def block(language: str, mark: str) -> str:
    """The only block of a language that begins with this."""
    (found,) = re.findall(rf"^```{language}\n({re.escape(mark)}.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert isinstance(found, str)
    return found


def test_every_ready_adapter_has_a_row() -> None:
    rows = {
        name
        for row in re.findall(r"^\| ([^|]*`[^|]*) \|", TEXT, re.MULTILINE)
        for name in re.findall(r"`([a-z-]+)`", row)
    }
    assert set(MODULES) <= rows


@pytest.mark.service
def test_the_example_runs_as_printed(tmp_path: Path) -> None:
    """Only the places of the socket and the token are this test's own: the printed ones may be in use."""
    directory = tempfile.TemporaryDirectory(prefix="ebb")
    own, token_file = f"{directory.name}/hook.sock", tmp_path / "token"
    token_file.write_text("t")
    (tmp_path / "thumbnails.py").write_text(block("python", "# file: thumbnails.py"))
    script = block("sh", "# file: try.sh")
    assert script.count(SOCKET) == 1
    assert script.count("/run/ebbtide/token") == 1
    script = script.replace(SOCKET, own).replace("/run/ebbtide/token", str(token_file))

    drop_in = tmp_path / "thumbnails.json"
    drop_in.write_text(block("json", '{"name": "thumbnails"'))
    drop_in.chmod(0o644)
    assert read_drop_in(str(drop_in), os.getuid()) == DropIn("thumbnails", path=SOCKET, uid=os.getuid())

    service = subprocess.Popen(
        [sys.executable, str(tmp_path / "thumbnails.py"), own, str(token_file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert service.stdout is not None
        assert service.stdout.readline() == b"serving\n"
        ran = subprocess.run(["sh", "-e"], input=script.encode(), stdout=subprocess.PIPE, timeout=120, check=True)
        decoder, answers, rest = json.JSONDecoder(), [], ran.stdout.decode()
        while rest := rest.lstrip():
            answer, end = decoder.raw_decode(rest)
            answers.append(answer)
            rest = rest[end:]
        offer, promised, *_, ended = answers
        before_mib = offer["resources"]["memory_mib"]["current"]
        assert before_mib > 125
        assert promised["promised"]["memory_mib"] == pytest.approx(before_mib - 80, abs=5)
        assert ended["state"] == "released"
        assert ended["released"]["memory_mib"] == pytest.approx(before_mib - 80, abs=5)
        assert rss_mib(service.pid) == pytest.approx(80, abs=5)
        service.communicate(b"", timeout=60)
        assert service.returncode == 0
    finally:
        service.kill()
        service.wait()
        directory.cleanup()
