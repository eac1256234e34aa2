"""REST bodies of a VM's lifecycle: stop, start, resize, migrate, adopt, release, and the templates of a host.

Those called ``...Request`` go to the manager, those called ``...Command`` to a host agent.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from deflation.allocations import Priority
from deflation.errors import InvalidField
from deflation.messages import Amount, Body, Command, HostTemplate, Name, RequestId, Seconds, Vector, VMSpec

#: Names of templates that stand for something else: a VM made from XML in a request, and an adopted one.
XML_TEMPLATE: Final = "xml"
ADOPTED_TEMPLATE: Final = "adopted"
RESERVED_TEMPLATES: Final = (XML_TEMPLATE, ADOPTED_TEMPLATE)

DomainName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,127}$", description="the domain's name in libvirt")
]
StopSeconds = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False, strict=True)]


# --- host agent ------------------------------------------------------------------------------------------------------


class StopCommand(Command):
    """POST /v1/vms/NAME/stop: ask the guest to power off, and cut its power when it has not within ``limit_s``."""

    limit_s: StopSeconds = 60.0


class SpecCommand(Command):
    """PUT /v1/vms/NAME/spec: what the VM is sold from now on."""

    spec: VMSpec
    deadline_s: Seconds = 60.0


class AdoptCommand(Command):
    """POST /v1/adoptions: look after a running domain that somebody else has made, at the size that it has."""

    domain: DomainName
    name: Name
    priority: Priority = Priority.DEFLATABLE
    minimum: Vector = Vector()


class ReleaseCommand(Command):
    """POST /v1/vms/NAME/release: undo everything and look after an adopted domain no more."""

    deadline_s: Seconds = 60.0


class TemplateInfo(HostTemplate):
    """One row of GET /v1/templates."""

    description: str = ""
    most: Vector | None = Field(None, description="largest size of its VMs; a component that is 0 is not limited")


class TemplateList(Body):
    """GET /v1/templates of a host agent, GET /v1/hosts/ID/templates of the manager; by name."""

    templates: tuple[TemplateInfo, ...]


# --- manager ---------------------------------------------------------------------------------------------------------


class PartialVector(Body):
    """Components to change; what is left out stays."""

    cpu_cores: Amount | None = None
    memory_mib: Amount | None = None
    disk_mib_s: Amount | None = None
    network_mib_s: Amount | None = None

    def onto(self, vector: Vector) -> Vector:
        """The vector with these components."""
        return vector.model_copy(update=self.model_dump(exclude_none=True))


class StopRequest(Body):
    """POST /v1/vms/NAME/stop of the manager."""

    request_id: RequestId
    limit_s: StopSeconds = Field(60.0, description="after this the guest's power is cut")


class StartRequest(Body):
    """POST /v1/vms/NAME/start of the manager."""

    request_id: RequestId
    anywhere: bool = Field(False, strict=True, description="on another host, where its own has no room for it")
    lose_disk: bool = Field(False, strict=True, description="what is on a disk that is not shared may be lost")
    deadline_s: Seconds = 60.0


class ResizeRequest(Body):
    """PATCH /v1/vms/NAME of the manager: what the VM is sold from now on; what is left out stays."""

    request_id: RequestId
    nominal: PartialVector | None = None
    minimum: PartialVector | None = None
    ceiling: PartialVector | None = None
    priority: Priority | None = None
    deadline_s: Seconds = 60.0

    def onto(self, spec: VMSpec) -> VMSpec:
        """The spec with these changes. A ceiling goes with the priority that needs one, a minimum never above nominal.

        :raises InvalidField: the sizes contradict each other, or nothing is to be changed.
        :raises ValidationError: a value can be none.
        """
        if all(part is None for part in (self.nominal, self.minimum, self.ceiling, self.priority)):
            raise InvalidField("nominal", "or minimum, ceiling or priority must be given")
        priority = self.priority or spec.priority
        nominal = self.nominal.onto(spec.nominal) if self.nominal is not None else spec.nominal
        minimum, shares = spec.minimum, {}
        if self.minimum is not None:
            # An absolute one takes the place of a share of nominal.
            minimum = self.minimum.onto(Vector.of(spec.asked_minimum()))
            shares = {"minimum_share": None, "utility": None}
        else:
            # A minimum that was not asked for again follows a smaller nominal size.
            minimum = Vector.of(minimum.vector().smaller(nominal.vector()))
        ceiling = None
        if priority is Priority.HARVEST:
            ceiling = spec.ceiling or nominal
            if self.ceiling is not None:
                ceiling = self.ceiling.onto(ceiling)
            else:
                ceiling = Vector.of(ceiling.vector().larger(nominal.vector()))
        elif self.ceiling is not None:
            raise InvalidField("ceiling", "is for harvest VMs")
        boot_mib = spec.boot_memory_mib
        if boot_mib is not None:
            boot_mib = min(boot_mib, nominal.memory_mib)
        changed = {
            "priority": priority,
            "nominal": nominal.model_dump(),
            "minimum": minimum.model_dump(),
            "ceiling": ceiling.model_dump() if ceiling is not None else None,
            "boot_memory_mib": boot_mib,
        }
        return VMSpec.model_validate({**spec.model_dump(), **shares, **changed})


class MigrateRequest(Body):
    """POST /v1/vms/NAME/migrate of the manager: stop it where it is, start it elsewhere."""

    request_id: RequestId
    host: Name | None = Field(None, description="where to; default: where it fits best")
    lose_disk: bool = Field(False, strict=True, description="what is on a disk that is not shared may be lost")
    limit_s: StopSeconds = Field(60.0, description="for the guest's own power-off")
    deadline_s: Seconds = 60.0


class AdoptRequest(Body):
    """POST /v1/adoptions of the manager."""

    request_id: RequestId
    host: Name
    domain: DomainName
    name: Name | None = Field(None, description="its name from now on; default: the domain's")
    priority: Priority = Priority.DEFLATABLE
    minimum: Vector = Vector()


class ForgottenHost(Body):
    """DELETE /v1/hosts/ID of the manager."""

    id: Name
    vms: tuple[Name, ...] = Field(description="VMs that are gone with it")
    sentence: str


class ReleaseRequest(Body):
    """POST /v1/vms/NAME/release of the manager."""

    request_id: RequestId
    deadline_s: Seconds = 60.0
