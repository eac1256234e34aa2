"""Broken files of options for all three daemons: told by file, line and key, ended with 2, and nothing was begun."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cluster_manager.main
import guestagent.main
import hostagent.main
from cluster_manager.options import ManagerOptions
from ebbtide.lab.state import write_private
from guestagent.options import named
from hostagent.options import HostAgentOptions

#: Each daemon: its main, where it begins once its options are good, its options and those that it needs.
DAEMONS: dict[str, tuple[Callable[[list[str]], Any], str, list[str], str]] = {
    "ebb-manager": (
        cluster_manager.main.main,
        "cluster_manager.serving.serve",
        list(ManagerOptions.model_fields),
        'hosts_key_file = "hosts.key"\ndatabase = "m.sqlite"\ntoken_file = "token"\n',
    ),
    "ebb-hostagent": (
        lambda words: hostagent.main.main(),
        "hostagent.running.run",
        list(HostAgentOptions.model_fields),
        'id = "host-a"\ncapacity = "auto"\ntoken_file = "token"\nstate_dir = "state"\n',
    ),
    "ebb-guestagent": (
        guestagent.main.main,
        "guestagent.agent.Agent.run",
        list(named(guestagent.main.build_parser())),
        "reserve_mib = 96\n",
    ),
}
_BARE = st.text(st.characters(min_codepoint=32, max_codepoint=300, exclude_characters="'"), max_size=12)
VALUES = st.one_of(
    st.integers(-(10**20), 10**20).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(["true", "false", "nan", "inf", "-inf", "[]", "[1]", "['a']", "{}", "'''a\nb'''", "1979-05-27"]),
    st.sampled_from(["''", "'/'", "'https://'", "'0.0.0.0:1'", "'[::]:7100'", "'::'", "'postgresql://x'", "'.'"]),
    st.sampled_from(['"\\u0000"', '"a\\nb"', "'a", "= 3", "0x1F", "1_000", "+5", "08"]),
    _BARE.map(lambda text: f"'{text}'"),
    _BARE,
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the secrets that the files name."""
    monkeypatch.chdir(tmp_path)
    for name in ("hosts.key", "token"):
        write_private(tmp_path / name, f"secret-of-{name}")
    return tmp_path


def run(daemon: str, file: Path) -> tuple[int | None, str]:
    """How a daemon ends by this file, None: it would serve; and what it says on standard error."""
    main, begin, _, _ = DAEMONS[daemon]
    said, before = io.StringIO(), os.umask(0o022)
    words = ["--config", str(file)]

    class Begun(Exception):
        """It serves."""

    with (
        mock.patch(begin, side_effect=Begun),
        mock.patch("sys.argv", [daemon, *words]),
        contextlib.redirect_stderr(said),
    ):
        try:
            code = main(words)
        except Begun:
            return None, said.getvalue()
        except SystemExit as ended:
            code = ended.code
        finally:
            os.umask(before)
            structlog.reset_defaults()
    return code, said.getvalue()


@pytest.mark.parametrize("daemon", DAEMONS)
def test_a_good_file_is_begun_with(here: Path, daemon: str) -> None:
    file = here / "daemon.toml"
    file.write_text(DAEMONS[daemon][3])
    assert run(daemon, file)[0] is None


@pytest.mark.parametrize("daemon", DAEMONS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_broken_file_ends_a_daemon_with_2_before_it_has_begun_anything(
    here: Path, daemon: str, data: st.DataObject
) -> None:
    _, _, options, needed = DAEMONS[daemon]
    line = st.tuples(st.sampled_from([*options, "sede", "Listen", "[table]", "a.b"]), VALUES).map(" = ".join)
    lines = data.draw(st.lists(st.one_of(line, line, _BARE), min_size=1, max_size=3))
    place = data.draw(st.integers(0, len(lines)))
    content = "\n".join([*lines[:place], *needed.splitlines(), *lines[place:]]).encode()
    tail = data.draw(st.one_of(st.just(b""), st.just(b""), st.binary(min_size=1, max_size=8)))
    with tempfile.NamedTemporaryFile(suffix=".toml") as opened:
        file = Path(opened.name)
        file.write_bytes(content + b"\n" + tail)
        before = sorted(os.listdir(here))
        code, said = run(daemon, file)
        assert sorted(os.listdir(here)) == before
        if code is None:
            values = tomllib.loads(content.decode() + "\n" + tail.decode())
            assert set(values) <= set(options), "it begins with what is no option"
            return
        assert code == 2, said
        assert said
        where = re.escape(str(file))
        for sentence in said.splitlines():
            assert re.match(rf"{daemon}: ({where}:\d+: [^\n]+|--[a-z-]+ is missing)\Z", sentence), sentence
            assert len(sentence) < 600


@pytest.mark.parametrize("daemon", ["ebb-manager", "ebb-hostagent"])
@pytest.mark.parametrize("value", ['"\\u0000"', '["a", "b\\u0000"]'])
def test_a_null_character_is_named_with_its_option(here: Path, daemon: str, value: str) -> None:
    file = here / "daemon.toml"
    file.write_text(DAEMONS[daemon][3] + f"tokens_file = {value}\n")
    line = DAEMONS[daemon][3].count("\n") + 1
    assert run(daemon, file) == (2, f"{daemon}: {file}:{line}: tokens_file: no option holds a null character\n")
