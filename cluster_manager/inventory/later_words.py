"""Readings of what host agents say: words that only a later version knows are taken, and written down once."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import Any, Final, TypeVar

import structlog
from pydantic import BaseModel

from ebbtide.deflation.allocations import Priority
from ebbtide.messages.common import Vector, is_known
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMStatus

B = TypeVar("B", bound=BaseModel)
log = structlog.get_logger()

#: Hosts and enums of which it has been written down.
_told: Final[set[tuple[str, Any]]] = set()


def read_of_agent(form: type[B], raw: str | bytes, host: str, *, strict: bool | None = None) -> B:
    """A body that the agent of a host has sent, which may be of a later version and say more.

    :raises ValidationError: it is none.
    """
    found = form.model_validate_json(raw, strict=strict, extra="ignore", context=partial(_read_word, host))
    if isinstance(found, HostReport) and not all(is_known(vm.priority) for vm in found.vms):
        return found.model_copy(update={"vms": tuple(_counted(vm) for vm in found.vms)})
    return found


def _read_word(host: str, field: str, kind: Any, word: str) -> StrEnum | None:
    if (host, kind) not in _told:
        _told.add((host, kind))
        log.warning("a word of a later version; it is taken with caution", host=host, field=field, word=word)
    # Nobody goes by an operation of which it is not known how it ended: it is waited for, as long as there is time.
    return OperationState.RUNNING if kind is OperationState else None


def _counted(vm: VMStatus) -> VMStatus:
    """A VM of a priority that is not known is counted as a fixed one, from which nothing is taken."""
    if is_known(vm.priority):
        return vm
    nominal = Vector.of(vm.nominal.vector().larger(vm.current.vector()))
    return vm.model_copy(update={"priority": Priority.FIXED, "ceiling": None, "nominal": nominal})
