"""The engine file: what it may say, and a sentence that names the key for everything else."""

from __future__ import annotations

import os
import pwd
from dataclasses import replace
from pathlib import Path

import pytest

from ebbtide.matcher.engines.interface import engine_of
from ebbtide.matcher.engines.settings import EngineSettings, checked, read_settings
from ebbtide.matcher.errors import EngineSettingsError
from ebbtide.matcher.match.rounds import LIVE, LIVE_PREDICTION

SLURM = 'engine = "slurm"\ndirectory = "/srv"\nuser = "nobody"\n'
DASK = 'engine = "dask"\ndirectory = "/srv"\ndask_scheduler = "tcp://x:1"\n'


def read(path: Path, text: str) -> EngineSettings:
    (path / "engine.toml").write_text(text)
    return read_settings(path / "engine.toml")


def test_an_engine_is_none_unless_it_is_said() -> None:
    assert engine_of(EngineSettings()) is None


def test_both_engines_can_be_said(tmp_path: Path) -> None:
    made = read(tmp_path, 'engine = "slurm"\ndirectory = "/srv/tasks"\nuser = "nobody"\nslurm_conf = "/etc/slurm.conf"')
    assert (made.engine, made.slurm_conf, made.label) == ("slurm", Path("/etc/slurm.conf"), "ebb")
    made = read(tmp_path, 'engine = "dask"\ndirectory = "/srv/tasks"\ndask_scheduler = "tcp://127.0.0.1:8786"')
    found = engine_of(made)
    assert found is not None
    assert found.kind == "dask"


def test_options_for_slurms_jobs_can_be_said(tmp_path: Path) -> None:
    assert (read(tmp_path, SLURM).slurm_options, read(tmp_path, SLURM).most_held) == ((), 1000)
    said = ["--partition=long", "--mem-per-cpu=2G", "--time=1-00:00:00", "--account=a", "--qos=q", "--no-kill"]
    made = read(tmp_path, f"{SLURM}most_held = 0\nslurm_options = {said}")
    assert (made.slurm_options, made.most_held) == (tuple(said), 0)


def test_a_table_says_what_is_other_than_usual(tmp_path: Path) -> None:
    assert (EngineSettings().matching, EngineSettings().prediction) == (LIVE, LIVE_PREDICTION)
    made = checked(read(tmp_path, '[prediction]\nform = "next-change"'))
    assert (made.prediction, made.matching) == (replace(LIVE_PREDICTION, form="next-change"), LIVE)
    dask = 'engine = "dask"\ndirectory = "/srv/tasks"\ndask_scheduler = "tcp://127.0.0.1:8786"\n'
    assert read(tmp_path, f"{dask}[matching]\ndelay = false").matching == replace(LIVE, delay=False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("engine = ", "is no TOML"),
        ('engine = "pbs"', "engine: "),
        ('engine = "slurm"\nuser = "nobody"', "directory must be given"),
        ('engine = "slurm"\nuser = "nobody"\ndirectory = "tasks"', "absolute path"),
        (
            'engine = "slurm"\ndirectory = "/srv"\nuser = "nobody"\ndask_scheduler = "tcp://x:1"',
            "dask_scheduler says nothing",
        ),
        ('engine = "dask"\ndirectory = "/srv"', "dask_scheduler must be given"),
        ('engine = "dask"\ndirectory = "/srv"\ndask_scheduler = "http://x"', "dask_scheduler: "),
        (
            'engine = "dask"\ndirectory = "/srv"\ndask_scheduler = "tcp://x:1"\n[users]\nci = "nobody"',
            "users says nothing",
        ),
        ('engine = "dask"\ndirectory = "/srv"\ndask_scheduler = "tls://x:1"', "dask_ca_file"),
        ('engine = "dask"\ndirectory = "/srv"\ndask_scheduler = "tcp://x:1"\ndask_ca_file = "/ca"', "dask_ca_file"),
        ('directory = "/srv"', "directory says nothing where engine is none"),
        ('engine = "slurm"\ndirectory = "/srv"\nuser = "nobody"\nperiod_s = 0', "period_s: "),
        ('engine = "slurm"\ndirectory = "/srv"\nuser = "nobody"\nlabel = "a.b"', "label: "),
        ("period_s = true", "period_s: Value error, must not be true or false"),
        ("[matching]\nescalation = true", "escalation must not be true or false"),
        ("[prediction]\nwindow_s = true", "window_s must not be true or false"),
        (f"{SLURM}most_held = -1", "most_held: "),
        (f"{SLURM}slurm_options = ['--time 60']", "slurm_options: Value error, each is one word like --time=60"),
        (f"{SLURM}slurm_options = ['-t60']", "but one is '-t60'"),
        (f"{SLURM}slurm_options = ['--time=60', '--gres=gpu:1']", "--gres is up to the manager"),
        # sbatch takes it for the former.
        (
            f"{SLURM}slurm_options = ['--job=mine']",
            "--job-name is up to the manager, and must not be among them: --job",
        ),
        (f"{SLURM}slurm_options = ['--wait']", "--wait is up to the manager"),
        (f"{SLURM}slurm_options = ['--jobid=5']", "--jobid is up to the manager"),
        (f"{SLURM}slurm_options = '--time=60'", "slurm_options: "),
        (f"{DASK}slurm_options = ['--time=60']", "slurm_options says nothing where engine is dask"),
        ("speed = 3", "speed: "),
        ("[matching]\nescalation = 1", "matching says nothing where engine is none"),
        ("[matching]\nspeed = 1", "matching.speed: "),
        ("[matching]\nunknown = 2", "unknown must be within [0, 1]"),
        ('[prediction]\nform = "guess"', "form must be one of next-change, next-shrink, landmark"),
        ("[prediction]\nwindow_s = 0.5", "window_s must be at least 1 and finite, but is 0.5"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(EngineSettingsError, match=r"engine\.toml") as raised:
        read(tmp_path, text)
    assert said in str(raised.value)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(EngineSettingsError, match="cannot read the engine file"):
        read_settings(tmp_path / "none.toml")


def test_a_user_whom_nobody_knows_keeps_only_a_manager_down_that_is_not_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'engine = "slurm"\ndirectory = "/srv"\nuser = "nobody"\n[users]\nci = "nobody-knows"'
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert read(tmp_path, text).unknown_users == ("nobody-knows",)
    monkeypatch.setattr(os, "geteuid", lambda: pwd.getpwnam("nobody").pw_uid)
    # It would run the tasks as itself.
    with pytest.raises(EngineSettingsError, match="there is no user nobody-knows on this machine"):
        read(tmp_path, text)


def test_root_must_say_whose_tasks_they_are_and_others_have_no_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(EngineSettingsError, match="only root may run tasks as nobody"):
        read(tmp_path, 'engine = "slurm"\ndirectory = "/srv"\nuser = "nobody"')
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(EngineSettingsError, match="user must be given"):
        read(tmp_path, 'engine = "slurm"\ndirectory = "/srv"')
