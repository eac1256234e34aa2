"""Resident size after the start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ebbtide.rest.settings import AccessSettings
from hostagent.main import _without_system_cas
from hostagent.options import HostAgentOptions
from hostagent.resident import unwritten

SMAPS = """\
1000-2000 r--p 00000000 fd:00 7 /lib/libx.so
Rss:                   4 kB
Anonymous:             0 kB
2000-4000 r-xp 00001000 fd:00 7 /lib/libx.so
Rss:                   8 kB
Anonymous:             4 kB
4000-5000 rw-p 00003000 fd:00 7 /lib/libx.so
Rss:                   4 kB
Anonymous:             0 kB
5000-6000 r-xp 00004000 fd:00 8 /lib/liby.so
Rss:                   4 kB
Anonymous:             0 kB
"""
FORGETTING = """
import hashlib, sqlite3, unicodedata
from hostagent.resident import forget_start

def file_kib():
    return int(open("/proc/self/status").read().split("RssFile:")[1].split()[0])

before, anonymous = file_kib(), bytearray(b"kept" * 2**18)
forget_start()
after = file_kib()
assert anonymous == b"kept" * 2**18
assert hashlib.sha256(b"x").hexdigest()[:4] == "2d71"
assert sqlite3.connect(":memory:").execute("select 6 * 7").fetchone() == (42,)
assert unicodedata.name("x") == "LATIN SMALL LETTER X"
print(before, after)
"""


def test_what_was_written_to_or_may_be_is_not_forgotten() -> None:
    assert unwritten(SMAPS) == {0x1000: 0x2000, 0x5000: 0x6000}


def test_pages_of_libraries_go_and_come_back_as_they_are_used() -> None:
    done = subprocess.run([sys.executable, "-c", FORGETTING], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert after < before / 2


@pytest.mark.parametrize(
    ("manager", "access", "read"),
    [
        ("http://127.0.0.1:7100", AccessSettings(), False),
        ("https://manager:7100", AccessSettings(server_ca=Path("ca.pem")), False),
        ("https://manager:7100", AccessSettings(), True),
    ],
)
def test_the_cas_of_the_machine_are_read_where_they_are_needed_only(
    manager: str, access: AccessSettings, read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/own.pem")
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    options = HostAgentOptions.model_construct(manager=(manager,))
    with _without_system_cas(options, access):
        assert os.environ["SSL_CERT_FILE"] == ("/own.pem" if read else os.devnull)
    assert os.environ["SSL_CERT_FILE"] == "/own.pem"
    assert "SSL_CERT_DIR" not in os.environ
