"""Errors of the simulator; the text of each is one sentence for the user."""

from __future__ import annotations

from ebbtide.errors import EbbError
from ebbtide.extras import installing


class SimulatorError(EbbError):
    """Base of what the simulator can fail with."""


class InvalidParameter(SimulatorError, ValueError):
    """A parameter of a generator or an option of a reader that cannot be.

    :param field: the parameter's name.
    :param problem: what is wrong with it, without the name.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem


class TraceError(SimulatorError):
    """A trace that cannot be read, or not be written.

    :param file: its path.
    :param problem: what is wrong, without file, place and field.
    :param line: where: counted from 1; None where the whole file is meant.
    :param field: the field as the format calls it; ``compression`` and ``file`` for what is around the fields.
    :param place: what ``line`` counts: ``line``, ``row`` (Parquet) or ``element`` (JSON).
    """

    def __init__(
        self, file: str, problem: str, *, line: int | None = None, field: str = "file", place: str = "line"
    ) -> None:
        where = file if line is None else f"{file}, {place} {line}"
        super().__init__(f"{where}: {field} {problem}")
        self.file = file
        self.line = line
        self.field = field
        self.problem = problem
        self.place = place


class MissingExtra(SimulatorError, ImportError):
    """What needs a package that comes with an extra only.

    :param package: what is missing.
    :param extra: of Ebbtide, which brings it along.
    :param needed_by: what cannot be done without it.
    """

    def __init__(self, package: str, extra: str, needed_by: str) -> None:
        super().__init__(f"{needed_by} need {package}, which is not installed: {installing(extra)}")


class ConservationBroken(SimulatorError):
    """The state of a simulation contradicts itself: an error in the simulator, never in its inputs.

    :param rule: what does not hold, a sentence.
    """


class ExperimentError(SimulatorError):
    """An experiment that cannot be read, run, loaded or compared.

    :param field: what is wrong: a key of its TOML file, or a part of its results.
    :param problem: what is wrong with it.
    :param file: where it stands; None where no file is meant.
    """

    def __init__(self, field: str, problem: str, *, file: str | None = None) -> None:
        super().__init__(f"{field} {problem}" if file is None else f"{file}: {field} {problem}")
        self.field = field
        self.problem = problem
        self.file = file


class Interrupted(SimulatorError):
    """A sweep was stopped by the user; what was done is kept."""
