"""Hosts' last reports with less memory: what is equal is one object, and none says by itself which fields it was given.

A report is kept for each host, with all its VMs; most of their sizes are alike, and most fields are always given.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from pydantic import BaseModel

from deflation.messages import HostReport, Vector, VMStatus

#: Different sizes that are remembered, of all hosts.
MOST_SIZES: Final = 4096

_sizes: OrderedDict[tuple[Any, ...], Vector] = OrderedDict()
_given: dict[type[BaseModel], set[str]] = {}


def slim(report: HostReport) -> HostReport:
    """The same report, changed in place where that cannot be seen: its bodies are frozen."""
    _share(report, report.id)
    for vm in report.vms:
        _share(vm, report.id)
    return report


def _share(body: HostReport | VMStatus, host: str) -> None:
    values = body.__dict__
    for name, value in values.items():
        if type(value) is Vector:
            values[name] = _one_of(value)
    if "host" in values:
        values["host"] = host
    _forget_given(body)


def _one_of(size: Vector) -> Vector:
    key = tuple(size.__dict__.values())
    known = _sizes.get(key)
    if known is not None:
        return known
    _forget_given(size)
    _sizes[key] = size
    if len(_sizes) > MOST_SIZES:
        _sizes.popitem(last=False)
    return size


def _forget_given(body: BaseModel) -> None:
    """One set for all bodies of a kind that were given every field."""
    kind = type(body)
    every = _given.setdefault(kind, set(kind.model_fields))
    if len(body.__pydantic_fields_set__) == len(every):
        object.__setattr__(body, "__pydantic_fields_set__", every)
