"""`ebb sim inputs` as a user calls it."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner, Result

from ebbtide.cli import main
from ebbtide.cli.schemas import schema_of
from ebbtide.simulator.inputs.traces import Trace
from tests.simulator import samples

DATA = Path(__file__).parent / "data"


def call(*words: str) -> Result:
    return CliRunner().invoke(main.app, ["sim", "inputs", *words], catch_exceptions=True)


def test_json_has_the_report_and_the_figures() -> None:
    done = call(str(DATA / "azure_derived.csv.gz"), "-o", "json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    jsonschema.validate(found, schema_of("sim inputs"))
    assert (found["report"]["format"], found["report"]["read"], found["report"]["malformed"]) == (
        "azure-derived",
        48,
        0,
    )
    summary = found["summary"]
    assert (summary["kind"], summary["rows"], summary["still_there_at_the_end"]) == ("vms", 48, 8)
    assert (summary["first_s"], summary["last_s"]) == (1_800_000, 1_800_300)
    assert summary["distributions"]["cpu_cores"]["mean"] == pytest.approx(90 / 48)
    assert summary["distributions"]["lifetime_s"]["mean"] == pytest.approx(136_950 / 40)


def test_a_table_says_the_same(tmp_path: Path) -> None:
    done = call(str(samples.put(tmp_path, samples.SWF)))
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for line in ("format swf", "jobs 3", "comments, header, blank 3", "left out: no runtime 1", "malformed 0"):
        assert line in lines
    assert "from, to 0 s (0.00 d), 179,350 s (2.08 d)" in lines


def test_malformed_lines_are_shown(tmp_path: Path) -> None:
    lines = b"".join(b"%d,%d\n" % (i, i) for i in range(2000))
    path = samples.put(tmp_path, b"at_s,value\n" + lines + b"x,1\n" * 12)
    done = call(str(path))
    assert done.exit_code == 0, done.output
    assert "malformed: line 2002: at_s is 'x', not a number" in done.stderr
    assert "malformed: and 2 more" in done.stderr


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_trace_is_converted_with_its_options(tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"out{suffix}"
    carbon = str(DATA / "carbon_miso.csv")
    done = call(carbon, "--option", "intensity=lifecycle", "--convert", str(out))
    assert done.exit_code == 0, done.output
    (batch,) = Trace(out)
    assert sum(row["value"] for row in batch.rows()) == pytest.approx(28431.82)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("none",), "none: file does not exist"),
        ((str(DATA / "README.md"),), "README.md, line 1: format is none that is known; there are vms"),
        ((str(DATA / "gaia_azure.csv"), "--format", "swf"), "gaia_azure.csv, line 1: submit_s is missing"),
        ((str(DATA / "gaia_azure.csv"), "--format", "x"), "format 'x' is unknown"),
        ((str(DATA / "gaia_azure.csv"), "--option", "a=b"), "a is no option of the format gaia (it has: time_unit)"),
        ((str(DATA / "gaia_azure.csv"), "--order", "x"), "order must be buffer or sort, not 'x'"),
        (
            (str(DATA / "gaia_azure.csv"), "--max-malformed", "2"),
            "max_malformed must be a share between 0 and 1, not 2",
        ),
        ((str(DATA / "gaia_azure.csv"), "--convert", "/nowhere/x.csv"), "/nowhere/x.csv: file cannot be written"),
    ],
)
def test_what_goes_wrong_is_one_sentence(
    words: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ebb", "sim", "inputs", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert sentence in said.err
    assert len(said.err.splitlines()) == 1


def test_an_option_without_a_value_is_a_wrong_call() -> None:
    assert call(str(DATA / "gaia_azure.csv"), "--option", "time_unit").exit_code == 2


def test_a_bar_appears_for_what_takes_long_and_on_a_terminal_only(tmp_path: Path) -> None:
    path = samples.put(tmp_path, b"at_s,value\n" + b"".join(b"%d,%d\n" % (i, i) for i in range(200_000)))
    code = "import ebbtide.cli.commands.sim as sim; sim._SILENT_S = 0.0"
    code += "; import ebbtide.cli.main; ebbtide.cli.main.main()"
    command = [sys.executable, "-c", code, "sim", "inputs", str(path), "-o", "json"]
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"})
        os.close(theirs)
        seen = b""
        until_s = time.monotonic() + 60
        while process.poll() is None or select.select([ours], [], [], 0)[0]:
            assert time.monotonic() < until_s
            if select.select([ours], [], [], 0.2)[0]:
                try:
                    seen += os.read(ours, 65536)
                except OSError:
                    break
        found = json.loads(process.communicate(timeout=60)[0])
    finally:
        os.close(ours)
    assert found["summary"]["rows"] == 200_000
    assert b"reading trace" in seen
    assert b"100%" in seen
    quiet = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert quiet.stderr == b""
