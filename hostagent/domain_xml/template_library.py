"""The templates of a host: read once when the agent starts, checked, and handed out by name.

An operator's directory may hold NAME.xml and, beside it, NAME.toml with ``description``, ``shared_disk`` (its VMs'
disks are on storage that other hosts reach too), ``most_cpu_cores`` and ``most_memory_mib``.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import TemplateInfo
from ebbtide.messages.vms import RESERVED_TEMPLATES, VMSpec
from hostagent.domain_xml.templates import PACKAGED, DomainParameters, DomainTemplate, TemplateError, render_domain
from hostagent.domain_xml.xml_allow_list import Rights, XMLRefused, check, parse
from hostagent.errors import RequestRefused

_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_WIDE: Final = Rights(wide=True)
_FACTS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "description": str,
    "shared_disk": bool,
    "most_cpu_cores": (int, float),
    "most_memory_mib": (int, float),
}


@dataclass(frozen=True, slots=True)
class TemplateLibrary:
    """All templates by name; of two with one name the first directory's."""

    templates: Mapping[str, DomainTemplate]
    infos: tuple[TemplateInfo, ...]

    @classmethod
    def load(cls, directories: Sequence[Path] = (PACKAGED,), owner: int | None = None) -> TemplateLibrary:
        """Read and check every template. Blocks: call it in a thread.

        :param owner: the user to whom the directories and files must belong (0: root), and who alone may write them;
            None: any user. What comes with the agent is not held to it.
        :raises TemplateError: one cannot be used; the text names the file.
        """
        templates: dict[str, DomainTemplate] = {}
        infos: dict[str, TemplateInfo] = {}
        for directory in directories:
            if not directory.is_dir():
                raise TemplateError(f"the template directory {directory} is not there")
            own = directory == PACKAGED
            if owner is not None and not own:
                _check_owner(directory, owner)
            for path in sorted(directory.glob("*.xml")):
                name = path.stem
                if not _NAME.fullmatch(name) or name in RESERVED_TEMPLATES:
                    raise TemplateError(f"{path}: {name} can be no template's name")
                facts = path.with_suffix(".toml")
                if owner is not None and not own:
                    for file in (path, facts) if facts.exists() else (path,):
                        _check_owner(file, owner)
                if name in templates:
                    continue
                template = DomainTemplate(name, path.read_text(encoding="utf-8"))
                if not own:
                    _check_template(path, template)
                templates[name] = template
                infos[name] = _info(name, facts)
        return cls(templates, tuple(infos[name] for name in sorted(infos)))

    def get(self, name: str) -> DomainTemplate:
        """:raises TemplateError: there is none of this name."""
        try:
            return self.templates[name]
        except KeyError:
            there = ", ".join(sorted(self.templates)) or "none"
            raise TemplateError(f"template {name} is not on this host (there: {there})") from None

    def check_size(self, spec: VMSpec) -> None:
        """Whether a template's VMs may be as large as this.

        :raises RequestRefused: with the field.
        """
        most = next((info.most for info in self.infos if info.name == spec.template), None)
        for component, highest in most.model_dump().items() if most is not None else ():
            for field, size in (("nominal", spec.nominal), ("ceiling", spec.ceiling)):
                if size is not None and 0 < highest < getattr(size, component):
                    sentence = f"vm.{field}.{component} exceeds what template {spec.template} allows ({highest:g})"
                    raise RequestRefused(400, sentence, f"vm.{field}.{component}")


def sample(memory_mib: float, boot_mib: float | None) -> DomainParameters:
    """A VM that is never started, to see what a template makes of it."""
    return DomainParameters(
        name="x",
        uuid="00000000-0000-0000-0000-000000000000",
        cpu_cores=1,
        memory_mib=int(memory_mib),
        accelerator="qemu",
        kernel=Path("/kernel"),
        initrd=Path("/initrd"),
        disk=Path("/disk"),
        console=Path("/console"),
        boot_memory_mib=int(boot_mib) if boot_mib is not None else None,
    )


def _check_template(path: Path, template: DomainTemplate) -> None:
    try:
        check(parse(render_domain(template, sample(1024, 512))), _WIDE)
    except (TemplateError, XMLRefused) as error:
        raise TemplateError(f"{path}: {error}") from error


def _check_owner(path: Path, owner: int) -> None:
    """:raises TemplateError: another user could change what it says."""
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        raise TemplateError(f"{path} is a symbolic link")
    if found.st_uid != owner:
        raise TemplateError(f"{path} belongs to user {found.st_uid}, but must belong to {owner}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise TemplateError(f"{path} can be written by others than its owner")


def _info(name: str, path: Path) -> TemplateInfo:
    if not path.exists():
        return TemplateInfo(name=name)
    try:
        facts: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TemplateError(f"{path} is no TOML: {error}") from error
    for key, value in facts.items():
        if key not in _FACTS:
            raise TemplateError(f"{path}: {key} is not known (known: {', '.join(_FACTS)})")
        if not isinstance(value, _FACTS[key]) or (isinstance(value, bool) and key != "shared_disk"):
            raise TemplateError(f"{path}: {key} cannot be {value!r}")
    sizes = {key.removeprefix("most_"): float(value) for key, value in facts.items() if key.startswith("most_")}
    try:
        return TemplateInfo(
            name=name,
            description=facts.get("description", ""),
            shared_disk=facts.get("shared_disk", False),
            most=Vector(**sizes) if sizes else None,
        )
    except ValidationError as error:
        raise TemplateError(f"{path}: {error.errors()[0]['msg']}") from error
