"""Errors of the engines that run tasks."""

from __future__ import annotations


class EngineError(Exception):
    """Base of all."""


class EngineUnreachable(EngineError):
    """The engine does not answer: whether a command arrived is unknown."""


class EngineRefused(EngineError):
    """The engine answered that it does not do this."""


class EngineFull(EngineRefused):
    """It takes no more for now, whatever it is."""


class EngineSettingsError(EngineError):
    """Settings of an engine that it cannot be used with."""
