"""Reading of settings by name: each with what is allowed, unknown ones refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.experiments.model import INPUTS, Input

#: Stands for a default where there is none.
REQUIRED: Final = object()


class Given:
    """A mapping whose values are taken by name; `end` refuses what was not taken.

    :param where: what stands before each field's name in an error, as ``settings.``
    """

    def __init__(self, given: Mapping[str, Any], where: str = "") -> None:
        self._given = given
        self._where = where
        self._known: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def value(self, name: str, default: Any = REQUIRED) -> Any:
        """Whatever stands there. Raises InvalidParameter if nothing does and there is no default."""
        self._known.append(name)
        if name in self._given:
            return self._given[name]
        if default is REQUIRED:
            raise self.wrong(name, "is missing")
        return default

    def number(
        self,
        name: str,
        default: Any = REQUIRED,
        *,
        least: float = -math.inf,
        most: float = math.inf,
        above: float = -math.inf,
    ) -> float:
        """A finite number in [least, most] and above ``above``; a default is taken as it is.

        :raises InvalidParameter: it is something else.
        """
        found = self.value(name, default)
        if found is default and name not in self._given:
            return float(found)
        if isinstance(found, bool) or not isinstance(found, int | float) or not _finite(found):
            raise self.wrong(name, f"must be a finite number, but is {found!r}")
        if not (least <= found <= most and found > above):
            raise self.wrong(name, f"must be {_range(least, most, above)}, but is {found:g}")
        return float(found)

    def whole(self, name: str, default: Any = REQUIRED, *, least: float = -math.inf, most: float = math.inf) -> int:
        """A whole number in [least, most]. Raises InvalidParameter if it is something else."""
        number = self.number(name, default, least=least, most=most)
        if number != int(number):
            raise self.wrong(name, f"must be a whole number, but is {number:g}")
        # A float does not hold every whole number.
        exact = self._given.get(name, default)
        return exact if isinstance(exact, int) else int(number)

    def flag(self, name: str, default: Any = REQUIRED) -> bool:
        """True or false. Raises InvalidParameter if it is something else."""
        found = self.value(name, default)
        if not isinstance(found, bool):
            raise self.wrong(name, f"must be true or false, but is {found!r}")
        return found

    def text(self, name: str, default: Any = REQUIRED) -> str:
        """A text. Raises InvalidParameter if it is something else."""
        found = self.value(name, default)
        if not isinstance(found, str):
            raise self.wrong(name, f"must be a text, but is {found!r}")
        return found

    def choice(self, name: str, choices: Sequence[str], default: Any = REQUIRED) -> str:
        """One of these texts. Raises InvalidParameter if it is something else."""
        found = self.text(name, default)
        if found not in choices:
            raise self.wrong(name, f"must be one of {', '.join(choices)}, but is {found!r}")
        return found

    def texts(self, name: str, default: Any = REQUIRED) -> tuple[str, ...]:
        """A text or a list of texts. Raises InvalidParameter if it is something else."""
        found = self.value(name, default)
        found = (found,) if isinstance(found, str) else found
        if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
            raise self.wrong(name, f"must be a list of texts, but is {found!r}")
        return tuple(found)

    def numbers(self, name: str, default: Any = REQUIRED, *, above: float = -math.inf) -> tuple[float, ...]:
        """A list of finite numbers above ``above``. Raises InvalidParameter if it is something else."""
        found = self.value(name, default)
        if not isinstance(found, list | tuple):
            raise self.wrong(name, f"must be a list of numbers, but is {found!r}")
        return tuple(Given({name: one}, self._where).number(name, above=above) for one in found)

    def table(self, name: str, default: Any = REQUIRED) -> Mapping[str, Any]:
        """A table. Raises InvalidParameter if it is something else."""
        found = self.value(name, default)
        if not isinstance(found, Mapping):
            raise self.wrong(name, f"must be a table, but is {found!r}")
        return found

    def wrong(self, name: str, problem: str) -> InvalidParameter:
        """The error about a field."""
        return InvalidParameter(f"{self._where}{name}", problem)

    def inputs(self, *names: str) -> tuple[Input | None, ...]:
        """The inputs of these names, None for one that is not there. Raises InvalidParameter if there are others."""
        given = Given(self.table(INPUTS, {}), f"{INPUTS}.")
        found: tuple[Input | None, ...] = tuple(given.value(name, None) for name in names)
        given.end()
        return found

    def input(self, name: str) -> Input:
        """The only input. Raises InvalidParameter if it is not there, or others are."""
        (found,) = self.inputs(name)
        if found is None:
            raise InvalidParameter(f"{INPUTS}.{name}", "is missing")
        return found

    def end(self) -> None:
        """:raises InvalidParameter: something was given that was not taken."""
        for name in self._given:
            if name not in self._known:
                raise self.wrong(name, f"is unknown; allowed are {', '.join(dict.fromkeys(self._known))}")


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _range(least: float, most: float, above: float) -> str:
    words = []
    if above > -math.inf:
        words.append(f"above {above:g}")
    if least > -math.inf:
        words.append(f"at least {least:g}")
    if most < math.inf:
        words.append(f"at most {most:g}")
    return " and ".join(words)
