"""Sentences of the event log by which a state of a host ends: an alert about it is over. Pure."""

from __future__ import annotations


def answers_again(host: str) -> str:
    """Its hypervisor does, after an event `hypervisor`."""
    return f"the hypervisor of {host} answers again"


def within_capacity(host: str) -> str:
    """Its VMs are, after an event `overcommitted`."""
    return f"{host} is within its capacity again"


def is_end(host: str | None, sentence: str) -> bool:
    """Whether an event says that what one of its kind told before is over. What a host says cannot come to such a
    sentence: one that tells of trouble goes on behind the host's name in other words.
    """
    return host is not None and sentence in (answers_again(host), within_capacity(host))
