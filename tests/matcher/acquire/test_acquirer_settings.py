"""The table [acquirer] of the engine file: what it may say."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.matcher.engines.settings import EngineSettings, read_settings
from ebbtide.matcher.errors import EngineSettingsError

ENGINE = 'engine = "slurm"\ndirectory = "/srv/tasks"\nuser = "nobody"\n'
SIZE = "{cpu_cores = 2.0, memory_mib = 1024.0}"
VM = f"[acquirer.vm]\nnominal = {SIZE}\nceiling = {SIZE}\n"


def read(path: Path, text: str) -> EngineSettings:
    (path / "engine.toml").write_text(text)
    return read_settings(path / "engine.toml")


def test_an_acquirer_is_said_with_its_vms(tmp_path: Path) -> None:
    made = read(tmp_path, f"{ENGINE}[acquirer]\nmost_machines = 8\n{VM}").acquirer
    assert made is not None
    assert (made.options().most_machines, made.options().expected_cores) == (8, 2.0)
    assert (made.spec(3).name, made.spec(3).priority) == ("harvest-3", "harvest")
    names = ("harvest-12", "harvest-0", "harvest-", "other", "harvest-1x")
    assert [made.number_of(name) for name in names] == [12, None, None, None, None]


def test_there_is_none_unless_it_is_said(tmp_path: Path) -> None:
    assert read(tmp_path, ENGINE).acquirer is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"[acquirer]\n{VM}", "acquirer.most_machines"),
        ("[acquirer]\nmost_machines = 8\n", "acquirer.vm"),
        (f"[acquirer]\nmost_machines = 8\nspeed = 1\n{VM}", "acquirer.speed"),
        (f'[acquirer]\nmost_machines = 8\nprefix = "Harvest"\n{VM}', "acquirer.prefix"),
        (f"[acquirer]\nmost_machines = 8\nleast_machines = 9\n{VM}", "least_machines"),
        (f"[acquirer]\nmost_machines = 8\nleast_utilisation = 0.9\n{VM}", "least_utilisation"),
        (f"[acquirer]\nmost_machines = 8\nperiod_s = 0\n{VM}", "acquirer.period_s"),
        (f'[acquirer]\nmost_machines = 8\n{VM}name = "a"\n', "name is not to be said"),
        ("[acquirer]\nmost_machines = 8\n[acquirer.vm]\nnominal = {cpu_cores = -1.0}\n", "cpu_cores"),
        (f"[acquirer]\nmost_machines = 8\n[acquirer.vm]\nnominal = {SIZE}\n", "ceiling"),
        (f"[acquirer]\nmost_machines = true\n{VM}", "acquirer.most_machines: Value error, must not be true or false"),
        (f"[acquirer]\nmost_machines = 8\n{VM}utility = {{at_least = 0.8}}\n", "must have the curve of a component"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(EngineSettingsError, match=r"engine\.toml") as raised:
        read(tmp_path, ENGINE + text)
    assert said in str(raised.value)


def test_without_an_engine_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(EngineSettingsError, match="acquirer says nothing where engine is none"):
        read(tmp_path, f"[acquirer]\nmost_machines = 8\n{VM}")
