"""Interface of the engines that run tasks, and their choice. Both implementations pass the same contract tests."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from ebbtide.extras import installing
from ebbtide.matcher.engines.settings import EngineSettings, checked
from ebbtide.matcher.errors import EngineSettingsError
from ebbtide.matcher.match.attempts import Look
from ebbtide.matcher.match.tasks import TaskOrder


class Engine(Protocol):
    """Runs attempts on machines. Every method may be called again with the same arguments, and changes nothing then.

    Every method raises EngineUnreachable where no answer comes in time (what was asked for may happen yet), and
    EngineRefused with the engine's own words.
    """

    kind: str

    async def start(self) -> None:
        """Make ready. An engine that is not reachable yet is no error.

        :raises EngineSettingsError: it can never be used like this.
        """

    async def stop(self) -> None:
        """Let go of it; what runs goes on."""

    async def look(self, wanted: Collection[str], begun: Collection[str] = ()) -> Look:
        """All that the engine has now.

        :param wanted: attempts whose records are read even where the engine does not know them.
        :param begun: attempts that have begun. Where none of them has a record, the records lie elsewhere:
            EngineUnreachable.
        """

    async def submit(self, attempt: str, order: TaskOrder) -> None:
        """Take an attempt on, held."""

    async def release(self, attempt: str, machine: str) -> None:
        """Let a held attempt begin on this machine, as soon as that has the cores free, and nowhere else."""

    async def cancel(self, attempt: str, begun_too: bool = True) -> None:
        """Seal an attempt that has not begun; end one that has, unless ``begun_too`` is False."""

    async def signal(self, attempt: str, signal: str, notice: str) -> None:
        """Have the command of an attempt that has begun get a signal; once for each notice.

        :param signal: ``TERM``, ``USR1`` or ``USR2``.
        """

    async def forget(self, attempt: str) -> None:
        """An attempt that has ended need not be kept."""

    async def set_usable_cores(self, machine: str, cores: int) -> None:
        """New attempts get no more than so many whole cores there; what runs goes on."""

    async def drain(self, machine: str, reason: str) -> None:
        """Nothing new begins there; what runs goes on."""

    async def undrain(self, machine: str) -> None:
        """Undo `drain`."""


def engine_of(settings: EngineSettings) -> Engine | None:
    """The engine; None: none. What it needs is imported only now.

    :raises EngineSettingsError: what it needs is not installed.
    """
    checked(settings)
    if settings.engine == "slurm":
        from ebbtide.matcher.engines.slurm import Slurm

        return Slurm(settings)
    if settings.engine == "dask":
        try:
            from ebbtide.matcher.engines.dask import Dask
        except ImportError as error:
            raise EngineSettingsError(f"engine dask needs distributed: {installing('dask')}") from error
        return Dask(settings)
    return None
