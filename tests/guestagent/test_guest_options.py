"""Options of the guest agent: a file that any reader of TOML takes, the environment, the command line."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guestagent.main import build_parser, main
from guestagent.options import OptionsError, example, named, read_file, read_options


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "guestagent.toml"


def test_the_command_line_comes_before_the_environment_and_that_before_the_file(file: Path) -> None:
    file.write_text("reserve_mib = 1\nprocfs = \"/p\"  # as ever\nsysfs = '/s'\nlog_json = true\n")
    environ = {"EBB_GUESTAGENT_CONFIG": str(file), "EBB_GUESTAGENT_RESERVE_MIB": "2", "EBB_GUESTAGENT_SYSFS": "/t"}
    found = read_options(build_parser(), ["--reserve-mib", "3"], environ)
    assert (found.reserve_mib, found.procfs, found.sysfs, found.log_json) == (3.0, "/p", "/t", True)
    assert read_options(build_parser(), [], environ).reserve_mib == 2.0
    assert read_options(build_parser(), ["--config", str(file)], {}).reserve_mib == 1.0
    assert read_options(build_parser(), [], {"EBB_GUESTAGENT_LOG_JSON": "false"}).log_json is False


def test_the_example_has_every_option_and_says_nothing_until_it_is_edited(file: Path) -> None:
    text = example(build_parser())
    file.write_text(text)
    assert read_file(str(file)) == []
    file.write_text(re.sub(r"^#(\w+ = )", r"\1", text, flags=re.MULTILINE).replace("= 5 %", ""))
    assert [name for name, _, _ in read_file(str(file))] == list(named(build_parser()))
    usual = vars(read_options(build_parser(), [], {}))
    given = vars(read_options(build_parser(), ["--config", str(file)], {}))
    differ = {name for name in usual if usual[name] != given[name]}
    # Those have no default that could be written down.
    assert differ == {"config", "reserve_mib", "request_group", "origins"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("reserve_mib = -1", "2: reserve_mib: this must be a number from 0 on, but is -1.0"),
        ('reserve_mib = "much"', "2: reserve_mib: this must be a number"),
        ("procfs = 3", "2: procfs: this must be a text in quotes"),
        ("log_json = 1", "2: log_json: this must be true or false"),
        ('log_level = "loud"', "2: log_level: this must be one of error, warning, info, but is 'loud'"),
        ("reserve = 3", "2: reserve: there is no such option"),
        ("config = 3", "2: config: there is no such option"),
        ("reserve_mib 3", "2: this is not like key = value"),
        ("[memory]", "2: this is not like key = value"),
        ("reserve_mib = 3 4", '2: reserve_mib: the value must be a "text" on one line, a number, true or false'),
        ("port = [1]", '2: port: the value must be a "text" on one line'),
        ("port = 'a'\nport = 'b'", "3: port: this is given for the second time"),
    ],
)
def test_a_wrong_line_is_named_by_file_line_and_key_and_nothing_is_started(
    file: Path, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    file.write_text(f"# mine\n{line}\n")
    for words in (["--check-config"], []):
        assert main(["--config", str(file), *words]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith(f"ebb-guestagent: {file}:{said}")


def test_the_environment_is_named_where_it_is_wrong_and_all_is_said_at_once(file: Path) -> None:
    file.write_text("reserve = 1\n")
    with pytest.raises(OptionsError) as wrong:
        read_options(build_parser(), ["--config", str(file)], {"EBB_GUESTAGENT_RESERVE_MIB": "x"})
    assert [line.split(": ")[0] for line in str(wrong.value).splitlines()] == [
        f"{file}:1",
        "EBB_GUESTAGENT_RESERVE_MIB",
    ]
    with pytest.raises(OptionsError, match=r"none.toml cannot be read: No such file"):
        read_options(build_parser(), ["--config", "/none.toml"], {})


@pytest.mark.parametrize("amount", ["-5", "nan", "many"])
def test_an_amount_that_cannot_be_is_told_on_the_command_line_as_in_the_file(
    capsys: pytest.CaptureFixture[str], amount: str
) -> None:
    with pytest.raises(SystemExit):
        main(["request", "--memory-mib", amount])
    assert f"argument --memory-mib: this must be a number from 0 on, but is {amount}\n" in capsys.readouterr().err


def test_options_that_can_be_are_said_so_without_a_start(file: Path) -> None:
    file.write_text("reserve_mib = 96\n")
    command = [sys.executable, "-m", "guestagent", "--config", str(file), "--check-config"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("the guest agent can")


def test_a_group_that_is_not_there_is_told_by_a_check_of_the_options(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text('request_group = "no-such-group"\n')
    assert main(["--config", str(file), "--check-config"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"ebb-guestagent: {file}:1: request_group: there is no group 'no-such-group'\n")


_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_LINES = st.one_of(
    st.tuples(st.sampled_from([*named(build_parser()), '"port"', "x.y"]), _TEXTS).map(lambda p: f"{p[0]} = {p[1]}"),
    st.tuples(st.sampled_from(["port", "sysfs"]), _TEXTS).map(lambda p: f'{p[0]}="{p[1]}" # {p[1]}'),
    st.sampled_from(["reserve_mib = 1e3", "a = +0.5", "b = 00", "c = 1.", "d = true # x", "e = '\\'", 'f = "\\\\"']),
    _TEXTS,
)


@settings(max_examples=500, deadline=None)
@given(st.one_of(st.lists(_LINES, max_size=5).map("\n".join).map(str.encode), st.binary(max_size=40)))
def test_what_is_taken_means_the_same_to_every_reader_of_toml_and_the_rest_is_told_by_line(content: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        Path(file.name).write_bytes(content)
        try:
            found, wrong = read_file(file.name), ""
        except OptionsError as error:
            found, wrong = [], str(error)
        if wrong:
            assert re.match(rf"{re.escape(file.name)}:\d+: [^\n]+\Z", wrong), wrong
            return
    assert {name: value for name, _, value in found} == tomllib.loads(content.decode())
    lines = content.decode().replace("\r\n", "\n").split("\n")
    assert all(name in lines[number - 1] for name, number, _ in found)
