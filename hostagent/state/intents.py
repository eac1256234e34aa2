"""Intents: what each domain is to be, kept in the domain's own libvirt metadata.

The agent has no other memory of its VMs (rule 7): killed at any instruction and started again, it reads the intents
and goes on. ``committed`` is what the VM is charged with: raised before anything is given, lowered only after the fall
of the bound was verified.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final
from xml.sax.saxutils import escape, quoteattr

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.common import Body, Name, RequestId, Vector
from ebbtide.messages.vms import VMSpec

NAMESPACE: Final = "urn:ebbtide:intent:1"
PREFIX: Final = "ebb"
ELEMENT: Final = "intent"
#: Attribute of the element.
_UUID: Final = "uuid"
#: Cores of which what is sold is told: `ebbtide.messages.vms.Sold`.
_ROUNDED: Final = 1e-4


class Phase(StrEnum):
    """What is under way with a VM."""

    CREATING = "creating"
    SETTLED = "settled"
    DEFLATING = "deflating"
    REINFLATING = "reinflating"
    DELETING = "deleting"
    #: Started from outside: paused by us until it is held to its committed size.
    ADMITTING = "admitting"
    STOPPING = "stopping"
    #: Off, on command or by itself: charged with nothing; ``committed`` is the size that it comes up with.
    STOPPED = "stopped"
    #: Started on command, and charged from here on.
    STARTING = "starting"
    #: Moves to another host, and from one. Its size is fixed, and it is charged on both.
    LEAVING = "leaving"
    ARRIVING = "arriving"


class Cause(Body):
    """The operation that the VM's present target comes from."""

    request_id: RequestId
    kind: str
    #: The command as it came, to recognise its repetition after a restart.
    body: dict[str, Any]
    started_at: float
    #: The bound when the operation began.
    before: Vector

    @property
    def gently(self) -> bool:
        """Whether it is a step of steady mode: only what the guest itself can spare is taken, nobody is asked."""
        return bool(self.body.get("gently"))


@dataclass(frozen=True, slots=True)
class Request:
    """What asks for a change of VMs: a command, or the agent itself."""

    request_id: str
    kind: str
    #: As it is compared with a repetition, and stored.
    body: dict[str, Any]
    started_at: float

    def cause(self, before: ResourceVector) -> Cause:
        """:param before: the size of the VM when its operation begins."""
        return Cause(
            request_id=self.request_id,
            kind=self.kind,
            body=self.body,
            started_at=self.started_at,
            before=Vector.of(before),
        )


class CpuLimits(Body):
    """What an owner gives a domain of the host's CPUs."""

    cpu_shares: int | None = None
    #: Quota of one vCPU in cores; None: it had none.
    quota_per_cpu: float | None = None
    #: Cap of the whole domain in cores; None: it had none.
    cap_cores: float | None = None
    #: The periods of quota and cap in us, left out where they are the usual one: earlier agents know of no such field.
    vcpu_period_us: int | None = Field(None, exclude_if=lambda us: us is None)
    global_period_us: int | None = Field(None, exclude_if=lambda us: us is None)


class Before(CpuLimits):
    """What an adopted domain had before it was ours, to be put back when it is released."""

    #: The same of its definition; None: adopted by an agent that did not tell them apart.
    definition: CpuLimits | None = None
    #: What it held; None: adopted by an agent that did not note it, so that what it is sold counts.
    size: Vector | None = None
    #: How often its balloon driver was asked for statistics, seconds, 0: never; None: it has none, or as for size.
    stats_period_s: int | None = None
    #: What its definition asked of a virtio-mem device, MiB; None: it had none, or as for size.
    requested_mib: float | None = None


class Intent(Body):
    """One VM's intent."""

    owner: Name
    spec: VMSpec
    boot_mib: float
    generation: int = Field(0, ge=0)
    phase: Phase
    target: Vector
    committed: Vector
    cause: Cause | None = None
    #: Its operation was answered as failed: it is not carried out any more, and what it took is given back. Until the
    #: next is planned: a target that failed sets no size that is held.
    given_up: bool = False
    #: What it becomes at its next start, because the running domain cannot take it.
    at_next_start: VMSpec | None = None
    #: What it was sold before the resize or release that is under way; None: none is.
    was: VMSpec | None = None
    #: Whether its definition is to be written again before it starts.
    redefine: bool = False
    #: Off, its memory saved to disk, where it takes so many MiB: it goes on where it was; None: it boots.
    saved_mib: float | None = None
    #: When it was started last, other than from what was saved; None: by an agent that did not note it.
    started_at: float | None = None
    #: The notice of preemption that its guest has had and is still to be told the end of; empty: there is none.
    told: str = ""
    #: A domain of another owner: it is never removed, only released.
    adopted: Before | None = None
    #: The size that a target has set and other operations have left in force, left out where there is none: earlier
    #: agents know of no such field. See `held_size`.
    held: Vector | None = Field(None, exclude_if=lambda held: held is None)

    @field_validator("target", "committed", "held")
    @classmethod
    def _as_sold(cls, size: Vector | None, read: ValidationInfo) -> Vector | None:
        """Earlier agents kept more digits of what a VM is sold: a size above it could not be charged."""
        spec = read.data.get("spec")
        if size is None or spec is None:
            return size
        cores = (spec.ceiling or spec.nominal).cpu_cores
        return size.model_copy(update={"cpu_cores": cores}) if 0.0 < size.cpu_cores - cores <= _ROUNDED else size

    @property
    def held_size(self) -> Vector | None:
        """The size below nominal that a target has set: beyond it the VM grows by command only. None: none has."""
        sets = self.cause is not None and self.cause.kind == "target" and not self.given_up
        size = self.target if sets else self.held
        return None if size is None or self.spec.nominal.vector().fits_in(size.vector()) else size

    @property
    def gently(self) -> bool:
        """Whether a step of steady mode is under way."""
        return self.cause is not None and self.cause.gently and self.phase in (Phase.DEFLATING, Phase.REINFLATING)

    def changed(self, **fields: object) -> Intent:
        """A copy with fields replaced. What a target holds stays in force where another operation follows."""
        if "cause" in fields:
            fields = {"held": self.held_size, **fields}
        return self.model_copy(update=fields)


def to_element(intent: Intent, uuid: str) -> str:
    """The metadata element, without its namespace prefix: libvirt adds that.

    :param uuid: of the domain that it is written into, by which it is told from its copies. Not in the intent: earlier
        agents read none with fields that they do not know.
    """
    return f"<{ELEMENT} {_UUID}={quoteattr(uuid)}>{escape(intent.model_dump_json())}</{ELEMENT}>"


def is_original(xml: str, uuid: str) -> bool | None:
    """Whether the element was written into the domain of this UUID; None: it does not say, or cannot be read."""
    try:
        written = ElementTree.fromstring(xml).get(_UUID)
    except ElementTree.ParseError:
        return None
    return None if written is None else written == uuid


def to_qualified_element(intent: Intent) -> str:
    """The metadata element as it stands inside a domain's XML."""
    text = escape(intent.model_dump_json())
    return f'<{PREFIX}:{ELEMENT} xmlns:{PREFIX}="{NAMESPACE}">{text}</{PREFIX}:{ELEMENT}>'


def from_element(xml: str) -> Intent | None:
    """Read the element back; None if it is not one of ours or does not hold together."""
    try:
        root = ElementTree.fromstring(xml)
        return Intent.model_validate_json(root.text or "")
    except (ElementTree.ParseError, ValidationError):
        return None
