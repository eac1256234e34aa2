"""``ebb-manager``: help, bad options, bad files."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster_manager.main import main
from ebbtide.lab.state import write_private

pytestmark = pytest.mark.usefixtures("logging_as_before")


@pytest.fixture
def options(tmp_path: Path) -> dict[str, str]:
    write_private(tmp_path / "token", "clients\n")
    write_private(tmp_path / "agents", "agents\n")
    return {
        "--token-file": str(tmp_path / "token"),
        "--hosts-key-file": str(tmp_path / "agents"),
        "--database": str(tmp_path / "db"),
        "--listen": "127.0.0.1:0",
    }


def run(options: dict[str, str]) -> int:
    return main([word for pair in options.items() for word in pair])


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "examples:\n  ebb-manager --token-file" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value", "said", "code"),
    [
        ("--token-file", "/nonexistent/token", "--token-file: cannot read the token file", 2),
        ("--listen", "7100", "--listen must be HOST:PORT", 2),
        ("--listen", "127.0.0.1:99999", "--listen must be HOST:PORT", 2),
        ("--seed", "-1", "--seed: input should be greater than or equal to 0", 2),
        ("--gone-s", "0", "--gone-s: input should be greater than or equal to 1", 2),
        ("--gone-s", "nan", "--gone-s: input should be ", 2),
        ("--policy", "worst-fit", "--policy: input should be 'best-fit'", 2),
        ("--database", "/proc/nonexistent/db", "cannot use the database", 1),
    ],
)
def test_what_it_cannot_start_with_is_said_in_one_line(
    options: dict[str, str], option: str, value: str, said: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run({**options, option: value}) == code
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("ebb-manager: ")
    assert said in last


@pytest.mark.parametrize("text", ["", "  \n", "two words", "a\x00b"])
def test_a_token_file_without_one_word_is_refused_and_not_shown(
    options: dict[str, str], tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text(text)
    assert run(options) == 2
    error = capsys.readouterr().err
    assert "--token-file: the token file" in error
    assert "must hold one word" in error
    assert "two words" not in error
