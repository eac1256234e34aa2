"""Packages of extras that are imported when something of them is first asked for: most take longer than a command."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any


class Later:
    """A package, and modules of it, to be imported later; false where it is not installed.

    :param modules: full names; the first one is what the others belong to.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = modules

    def __bool__(self) -> bool:
        name = self._modules[0].partition(".")[0]
        return sys.modules[name] is not None if name in sys.modules else importlib.util.find_spec(name) is not None

    def __getattr__(self, name: str) -> Any:
        first, *_ = (importlib.import_module(module) for module in self._modules)
        value = getattr(first, name)
        # The next time it is found at once.
        setattr(self, name, value)
        return value
