"""REST bodies of live migrations: where a host's hypervisor is reached by another one, and the commands to both."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field

from ebbtide.messages.commands import Command
from ebbtide.messages.common import LARGEST, MOST, Body, LibvirtUri, Name, Seconds, Size
from ebbtide.messages.vms import VMSpec

#: Of a host, as another host's hypervisor is told of it.
Directory = Annotated[str, Field(pattern=r"^/[A-Za-z0-9._/-]{0,300}$")]


class MigrationAddress(Body):
    """Where a host takes VMs that move to it live."""

    uri: LibvirtUri = Field(description="its libvirt, as another host's reaches it")
    listen: Annotated[str, Field(pattern=r"^[A-Za-z0-9.:-]{1,253}$")] = Field(
        description="the address at which a VM's memory arrives"
    )
    disk_dir: Directory = Field(description="below it each VM has its disk")
    image_dir: Directory = Field(description="holds the kernel and the base image")
    image: Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")] = Field(
        "", description="the same where the base image is: then only what differs from it is copied"
    )


def is_own(url: str, uri: str, listen: str) -> bool:
    """Whether a host takes VMs at the address of its own agent: no other host is sent to any other.

    :param url: of its agent; ``uri``, ``listen``: of `MigrationAddress`.
    """
    agent, libvirt = urlsplit(url).hostname, urlsplit(uri)
    if libvirt.scheme.endswith("+unix"):
        # A socket is on the same machine.
        return agent in ("127.0.0.1", "::1", "localhost") and listen in ("127.0.0.1", "::1")
    return (libvirt.hostname, listen) == (agent, agent)


class ArrivalCommand(Command):
    """POST /v1/vms/NAME/arrival of a host agent: keep room for a VM, and a definition that it can move into."""

    vm: VMSpec = Field(description="as it was asked for")
    size: Size = Field(description="what it has, and keeps while it moves")
    boot_memory_mib: float = Field(ge=0, le=MOST, description="memory that cannot be unplugged, MiB")
    generation: int = Field(0, ge=0, le=LARGEST, description="of its latest target")
    uuid: Annotated[str, Field(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")] = Field(
        description="of its domain"
    )


class DepartureCommand(Command):
    """POST /v1/vms/NAME/departure of a host agent: move a running VM to another host."""

    to: Name = Field(description="that host's id")
    address: MigrationAddress = Field(description="where that host takes it")
    copy_storage: bool = Field(False, strict=True, description="its disk is not shared, and is copied")
    bandwidth_mib_s: float = Field(0.0, ge=0, le=MOST, allow_inf_nan=False, description="at most; 0: no limit")
    deadline_s: Seconds = Field(120.0, description="what has not moved by then is called off")
    size: Size | None = Field(
        None, description="what that host has room for: a VM that has grown beyond it stays; left out: not looked at"
    )
