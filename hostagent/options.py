"""The options of `ebb-hostagent`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.common import Address, LibvirtUri, Name
from ebbtide.messages.hosts import capacity_of
from ebbtide.messages.migrations import Directory, is_own
from ebbtide.rest.errors import AccessError
from ebbtide.rest.options import DaemonOptions, Paths, Texts, read_file, settings_config
from ebbtide.rest.rates import Rate
from ebbtide.rest.settings import AccessSettings, key_pair, settings_of
from ebbtide.rest.tls import is_everywhere, is_protected, names_a_host
from hostagent.errors import HostAgentError
from hostagent.state.files import ACPI_VERDICT, SAVE_DIR

#: The common name of the manager's certificate.
MANAGER_NAME: Final = "ebb-manager"
#: The id in the file that comes with the package.
UNNAMED: Final = "..."
#: Most calls are the manager's, which acts for all users.
RATE: Final = Rate(200.0, 1000.0)
_STATE: Final = Path("/var/lib/ebbtide")


def own_capacity(reserve_mib: float) -> ResourceVector:
    """All of this machine but a reserve; its disks' and its network's bandwidth are handed out only where declared.

    :raises HostAgentError: the reserve is all of it.
    """
    import psutil

    memory_mib = psutil.virtual_memory().total // 2**20 - reserve_mib
    if memory_mib <= 0:
        raise HostAgentError(f"--reserve-mib {reserve_mib:g} leaves nothing of this machine's memory")
    return ResourceVector(float(psutil.cpu_count() or 1), memory_mib)


def address_of(text: str) -> tuple[str, int]:
    """What ``127.0.0.1:7101`` says. Raises ValueError."""
    address, _, port = text.rpartition(":")
    if not address or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ValueError("this is not like 127.0.0.1:7101")
    return address, int(port)


def _checked_capacity(text: str) -> str:
    if text != "auto":
        capacity_of(text)
    return text


def _checked_address(text: str) -> str:
    address_of(text)
    return text


def _checked_name(text: str) -> str:
    try:
        return TypeAdapter(Name).validate_python(text)
    except ValidationError:
        raise ValueError("this is no name: lower-case letters, digits and hyphens, 1 to 40") from None


class HostAgentOptions(DaemonOptions):
    """See `ebb-hostagent --help`."""

    program: ClassVar[str] = "ebb-hostagent"
    file: ClassVar[Path] = Path("/etc/ebbtide/hostagent.toml")
    model_config = settings_config("ebb-hostagent")

    id: Annotated[str, AfterValidator(_checked_name)] = Field(
        description="this host's name in the cluster: lower-case letters, digits, hyphens"
    )
    capacity: Annotated[str, AfterValidator(_checked_capacity)] = Field(
        description="the slice of this machine to hand out, cpu_cores=6,memory_mib=4096,...; auto: its CPUs, and its "
        "memory less --reserve-mib",
        json_schema_extra={"metavar": "SIZE|auto", "example": "auto"},
    )
    token_file: Path = Field(
        description="what the manager carries towards this API",
        json_schema_extra={"example": "/etc/ebbtide/command-token"},
    )
    listen: Annotated[str, AfterValidator(_checked_address)] = Field(
        "127.0.0.1:7101", description="where to serve", json_schema_extra={"metavar": "ADDRESS:PORT"}
    )
    manager: Texts = Field(
        (),
        description="base URL of the manager, given again for each standby; without it the agent serves its API only",
        json_schema_extra={"metavar": "URL"},
    )
    manager_token_file: Path | None = Field(
        None,
        description="what we carry towards the manager",
        json_schema_extra={"example": "/etc/ebbtide/report-token"},
    )
    manager_ca: Path | None = Field(None, description="PEM: CA of an HTTPS manager; default: --client-ca")
    certificate: Path | None = Field(None, description="PEM, shown to the manager; default: --tls-certificate")
    key: Path | None = Field(None, description="PEM, the key of --certificate")
    manager_name: str = Field(MANAGER_NAME, description="common name of the manager's certificate")
    url: str | None = Field(None, description="where the manager finds this API; default: as in --listen")
    state_dir: Path = Field(_STATE / "agent", description="what it remembers")
    image_dir: Path = Field(_STATE / "image", description="holds base.qcow2, vmlinuz, initrd")
    disk_dir: Path = Field(_STATE / "disks", description="of the VMs")
    templates: Paths = Field((), description="directory of root's with templates NAME.xml; may be given again")
    image_prefix: Paths = Field(
        (),
        description="directory below which the files of XML in a request must lie; without it no XML is taken; may be "
        "given again",
    )
    save_dir: Path = Field(SAVE_DIR, description="where libvirt saves memory of VMs")
    uri: str = Field("qemu:///system", description="libvirt connection")
    migration_uri: LibvirtUri | None = Field(
        None,
        description="how other hosts' libvirt reaches this one, which then trusts them; without it no VM moves here "
        "while it runs",
    )
    migration_listen: str = Field(
        "127.0.0.1", description="the address at which the memory of such a VM arrives: the one that --url names"
    )
    migration_emulated: bool = Field(
        False,
        description="emulated VMs leave by the manager's own decision under QEMU before 9.0, too, which may lose "
        "writes of theirs while they move",
    )
    accelerator: Literal["auto", "kvm", "qemu"] = Field("auto", description="auto: found by booting a kernel")
    acpi_verdict: Path = Field(
        ACPI_VERDICT, description="what `ebb doctor --probe-acpi` found; without it no vCPU is unplugged"
    )
    cold_first: bool = Field(
        False,
        description="before memory is unplugged, guests' cold pages become free (docs/reference/layers.md)",
    )
    overhead_mib: Annotated[float, Field(ge=0, le=1e6)] | None = Field(
        None, description="memory a VM costs besides its size; default by accelerator"
    )
    reserve_mib: Annotated[float, Field(ge=0, le=1e9)] = Field(512.0, description="host memory never handed out")
    requests_per_s: float = Field(RATE.per_s, description="requests of one token a second")
    burst: float = Field(RATE.burst, description="requests of one token at once")


#: Where the packaged unit lets the agent write nothing: ProtectSystem=full, ProtectHome=read-only.
UNWRITABLE: Final = tuple(map(Path, ("/usr", "/boot", "/efi", "/etc", "/home", "/root", "/run/user")))


def unwritable_above(directory: Path) -> Path | None:
    """The one of `UNWRITABLE` in which a directory is; None: it is in none."""
    place = directory.resolve()
    return next((root for root in UNWRITABLE if place.is_relative_to(root.resolve())), None)


def notes_on(state_dir: Path, disk_dir: Path) -> tuple[str, ...]:
    """What the packaged service needs to write there, a sentence each."""
    return tuple(
        f"{name} {directory}: the packaged service can write below {root} only what a drop-in of its unit names: "
        f"ReadWritePaths={directory}, which must be there when it starts"
        for name, directory in (("state_dir", state_dir), ("disk_dir", disk_dir))
        if (root := unwritable_above(directory)) is not None
    )


def url_of(options: HostAgentOptions, scheme: str) -> str:
    """Where the manager finds this API. ``scheme``: that of the server.

    :raises AccessError: nothing but a scheme, a host and a port can be it.
    """
    url = options.url or f"{scheme}://{options.listen}"
    try:
        return TypeAdapter(Address).validate_python(url)
    except ValidationError:
        raise AccessError(f"--url {url} must be a scheme, a host and a port, nothing else") from None


def is_unnamed(file: Path) -> bool:
    """Whether a file of options is as it comes with the package; one that cannot be read is taken for somebody's."""
    try:
        return read_file(file)[0].get("id") == UNNAMED
    except (AccessError, OSError):
        return False


def _check_told(option: str, directory: Path) -> None:
    try:
        TypeAdapter(Directory).validate_python(str(directory))
    except ValidationError:
        raise AccessError(
            f"{option} {directory} must be an absolute path of letters, digits and . _ - where --migration-uri is "
            "given: other hosts are told of it"
        ) from None


def access_of(options: HostAgentOptions) -> AccessSettings:
    """:raises AccessError: options that contradict each other."""
    address, _ = address_of(options.listen)
    settings = settings_of(options, address)
    caller = key_pair(options.certificate, options.key, "--certificate and --key")
    if options.url is None and is_everywhere(address):
        raise AccessError(f"--listen {address} is no address that the manager could call: give --url")
    own = url_of(options, settings.scheme)
    if options.migration_uri is not None and not is_own(own, options.migration_uri, options.migration_listen):
        raise AccessError(
            f"--migration-uri {options.migration_uri} and --migration-listen {options.migration_listen} must both name "
            f"the host as its agent's address does, {own}: no VM is sent anywhere else"
        )
    if options.migration_uri is not None:
        _check_told("--disk-dir", options.disk_dir)
        _check_told("--image-dir", options.image_dir)
    for url in options.manager:
        if not names_a_host(url):
            raise AccessError(f"--manager {url} must be like https://10.0.0.1:7100")
    secret = caller is not None or options.manager_ca is not None
    if secret and not all(url.startswith("https://") for url in options.manager):
        raise AccessError("--manager must begin with https:// where --manager-ca or --certificate is given")
    for url in options.manager:
        if not is_protected(url):
            raise AccessError(f"--manager {url} would get the token over plain HTTP: give https://")
    if options.manager and options.manager_token_file is None:
        raise AccessError(
            "--manager needs --manager-token-file: a host has a token for each direction (`ebb host tokens`)"
        )
    if options.tracing:
        # Imported here, so that --help and a wrong option are answered at once.
        from ebbtide.tracing.exporting import check_tracing

        check_tracing(options.tracing)
    return replace(settings, server_ca=options.manager_ca, caller=caller)
