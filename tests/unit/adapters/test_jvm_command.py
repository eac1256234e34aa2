"""The command line of `ebb-adapter jvm`."""

from __future__ import annotations

import argparse
import os

import pytest

from app_adapters.errors import ApplicationError
from app_adapters.jvm import transports
from app_adapters.jvm.adapter import JVMAdapter
from app_adapters.main import build_parser
from app_adapters.registry import ready


def options(*words: str) -> argparse.Namespace:
    return build_parser("jvm").parse_args(["jvm", *words])


@pytest.mark.parametrize(
    "words",
    [
        ["--pid", "10"],
        ["--pid-file", "/run/x.pid", "--minimum-mib", "100"],
        ["--main-class", "Server", "--jattach"],
        ["--match", "mark=[0-9]", "--jattach", "/opt/jattach"],
        ["--match", "x", "--jmx", "127.0.0.1:9010", "--state-dir", "/tmp/x"],
    ],
)
def test_each_way_makes_an_adapter_without_looking_at_anything(words: list[str]) -> None:
    assert isinstance(ready("jvm").build(options(*words)), JVMAdapter)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "--pid"),
        (["--main-class", ""], "--main-class"),
        (["--pid", "0"], "--pid"),
        (["--pid", "x"], "--pid"),
        (["--pid", "1", "--match", "x"], "--match"),
        (["--match", "("], "--match"),
        (["--pid", "1", "--jmx", "9010"], "--jmx"),
        (["--pid", "1", "--jmx", "h:1", "--jattach"], "--jattach"),
        (["--pid", "1", "--minimum-mib", "nan"], "--minimum-mib"),
    ],
)
def test_bad_options_are_told_by_name(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(*words)
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_where_the_program_that_wakes_a_jvm_is_missing_none_was_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "catches_quit", lambda pid: True)
    monkeypatch.setattr(transports, "refuses_attach", lambda pid: False)
    transport = transports.Jattach("/nowhere/jattach")
    for _ in range(2):
        with pytest.raises(ApplicationError, match="No such file"):
            transport.command(os.getpid(), "VM.version", 1.0)
