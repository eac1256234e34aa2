"""Settings of the engine that runs tasks: the TOML file of ``--engine-file``."""

from __future__ import annotations

import os
import pwd
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from ebbtide.matcher.acquire.settings import AcquirerSettings
from ebbtide.matcher.errors import EngineSettingsError
from ebbtide.matcher.match.attempts import DEFAULT_LABEL
from ebbtide.matcher.match.matching import MatchOptions
from ebbtide.matcher.match.rounds import LIVE, LIVE_PREDICTION
from ebbtide.matcher.match.turns import MOST_HELD
from ebbtide.matcher.predict.predictor import PredictorOptions
from ebbtide.messages.common import no_switch

_LABEL: Final = r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"
#: Options of sbatch that the manager sets, and those with which it would not find its jobs, or would wait for them.
_OWN_OPTIONS: Final = (
    *("array", "begin", "chdir", "clusters", "comment", "cpus-per-task", "gid", "gres", "help", "hold", "job-name"),
    *("jobid", "no-requeue", "nodelist", "nodes", "ntasks", "output", "parsable", "requeue", "test-only", "uid"),
    *("usage", "version", "wait", "wrap"),
)


class EngineSettings(BaseModel):
    """Of one engine. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: Literal["none", "slurm", "dask"] = "none"
    #: For records and outputs; every machine sees it under this path.
    directory: Path | None = None
    #: In the names of attempts: tells managers with one engine apart.
    label: Annotated[str, Field(pattern=_LABEL)] = DEFAULT_LABEL
    #: Seconds between two looks at the engine.
    period_s: Annotated[float, Field(ge=0.05, le=60)] = 1.0
    #: Seconds that one answer of the engine may take.
    answer_s: Annotated[float, Field(ge=0.1, le=600)] = 20.0
    #: A pool of harvest VMs that the manager keeps for tasks; None: it keeps none.
    acquirer: AcquirerSettings | None = None
    #: Whose tasks they are there; Slurm needs it where the manager runs as root, Dask where its workers are another's.
    user: str | None = None
    #: Slurm: other users for those who submit, by the names of their tokens: tasks of one user are not safe from others
    #: of the same.
    users: Mapping[str, str] = {}
    slurm_conf: Path | None = None
    #: Options of sbatch for each task, like ``--partition=long``.
    slurm_options: tuple[str, ...] = ()
    #: So many attempts at the most wait in the engine; those of tasks that get their machine are given to it anyway.
    most_held: Annotated[int, Field(ge=0, le=100_000)] = MOST_HELD
    dask_scheduler: Annotated[str, Field(pattern=r"^(tcp|tls)://")] | None = None
    dask_ca_file: Path | None = None
    dask_certificate_file: Path | None = None
    dask_key_file: Path | None = None
    #: Tables of the file: the match maker's switches, and the prediction engine's.
    matching: MatchOptions = LIVE
    prediction: PredictorOptions = LIVE_PREDICTION

    @property
    def unknown_users(self) -> tuple[str, ...]:
        """Users of tasks whom this machine does not know now: their tasks wait until it does."""
        every = dict.fromkeys(user for user in (self.user, *self.users.values()) if user is not None)
        return tuple(user for user in every if _number_of(user) is None)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch(cls, value: Any) -> Any:
        return no_switch(value)

    @field_validator("slurm_options")
    @classmethod
    def _not_ours(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for option in given:
            if (found := re.fullmatch(r"--([a-z][a-z0-9-]*)(=[^\x00-\x1f\x7f]+)?", option)) is None:
                raise ValueError(f"each is one word like --time=60, but one is {option!r}")
            # sbatch takes the beginning of a name for the name.
            if own := next((own for own in _OWN_OPTIONS if own.startswith(found[1])), None):
                raise ValueError(f"--{own} is up to the manager, and must not be among them: {option}")
        return given

    @field_validator("matching", "prediction", mode="before")
    @classmethod
    def _beside_defaults(cls, given: Any, info: ValidationInfo) -> Any:
        """A table says what is other than usual."""
        usual = asdict(LIVE if info.field_name == "matching" else LIVE_PREDICTION)
        if not isinstance(given, dict):
            return given
        for name, value in given.items():
            if not isinstance(usual.get(name, value), bool):
                no_switch(value, name)
        return {**usual, **given}


def read_settings(path: Path) -> EngineSettings:
    """The settings in a TOML file.

    :raises EngineSettingsError: says which key is wrong.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineSettingsError(f"cannot read the engine file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise EngineSettingsError(f"the engine file {path} is no TOML: {error}") from error
    try:
        return checked(EngineSettings.model_validate(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "it"
        raise EngineSettingsError(f"the engine file {path}: {key}: {first['msg']}") from error
    except EngineSettingsError as error:
        raise EngineSettingsError(f"the engine file {path}: {error}") from error


def checked(settings: EngineSettings) -> EngineSettings:
    """:raises EngineSettingsError: something is missing, or belongs to another engine."""
    given = settings.model_fields_set
    if settings.engine == "none":
        # Machines are ranked without an engine, too.
        if extra := given - {"engine", "prediction"}:
            raise EngineSettingsError(f"{min(extra)} says nothing where engine is none")
        return settings
    if settings.directory is None or not settings.directory.is_absolute():
        raise EngineSettingsError("directory must be given, as an absolute path that every machine sees")
    other = "dask_" if settings.engine == "slurm" else "slurm_"
    for key in sorted(given):
        if key.startswith(other) or (key == "users" and settings.engine != "slurm"):
            raise EngineSettingsError(f"{key} says nothing where engine is {settings.engine}")
    for user in (settings.user, *settings.users.values()):
        if user is not None:
            _check_user(user)
    if settings.engine == "slurm":
        if settings.user is None and not settings.users and os.geteuid() == 0:
            raise EngineSettingsError("user must be given: the manager is root, and tasks would be root's, too")
        return settings
    if settings.dask_scheduler is None:
        raise EngineSettingsError("dask_scheduler must be given, like tcp://127.0.0.1:8786")
    tls = [settings.dask_ca_file, settings.dask_certificate_file, settings.dask_key_file]
    if settings.dask_scheduler.startswith("tls:") != all(tls) or any(tls) != all(tls):
        raise EngineSettingsError(
            "dask_ca_file, dask_certificate_file and dask_key_file go with a dask_scheduler of tls://, all of them"
        )
    return settings


def _check_user(user: str) -> None:
    # Root may meet a name that nobody knows any more, or yet (LDAP after a boot): only tasks of that user wait.
    if os.geteuid() == 0:
        return
    if (number := _number_of(user)) is None:
        raise EngineSettingsError(f"user: there is no user {user} on this machine")
    if os.geteuid() != number:
        raise EngineSettingsError(f"user: only root may run tasks as {user}")


def _number_of(user: str) -> int | None:
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return None
