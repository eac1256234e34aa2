"""Declared VMs: files of them, and how one that is there differs from what is declared of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.errors import EbbError
from ebbtide.messages.common import PartialVector, Vector, problem_of
from ebbtide.messages.requests import VMRequest
from ebbtide.messages.vms import ClusterVM, VMSpec


def specs_of(file: Path) -> list[VMSpec]:
    """The VMs in a file of YAML, or of JSON: a VM a document, or a list of them, in the form of POST /v1/vms.

    :param file: "-" is standard input.
    :raises EbbError: it cannot be read, or a field of it is wrong; names the document and the field.
    """
    import yaml

    try:
        if str(file) == "-" and sys.stdin is None:
            raise EbbError("standard input is closed")
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        documents = _documents(text)
    except OSError as error:
        raise EbbError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise EbbError(f"{file} is no text") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        raise EbbError(f"{file} is no YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise EbbError(f"{file} is no YAML: it is nested too deeply") from error
    bodies = [body for each in documents for body in (each if isinstance(each, list) else [each]) if body is not None]
    if not bodies:
        raise EbbError(f"{file} declares no VM")
    found: dict[str, VMSpec] = {}
    for number, body in enumerate(bodies, 1):
        if not isinstance(body, dict):
            raise EbbError(f"{file}: VM {number} must be fields with values, like `name: web`")
        try:
            spec = VMSpec.model_validate(body)
            # What no manager takes, before anything is done with the others.
            VMRequest(request_id="a", vm=spec)
        except (ValidationError, InvalidField) as error:
            raise EbbError(f"{file}: VM {number}: {problem_of(error).detail.removeprefix('vm.')}") from error
        if spec.name in found:
            raise EbbError(f"{file}: VM {number}: name: {spec.name} is declared twice")
        found[spec.name] = spec
    return list(found.values())


def _documents(text: str) -> list[Any]:
    """:raises YAMLError: it is none, or names a key twice, of which PyYAML would take the last."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        # Before mappings are merged: what overrides is no repetition.
        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node: yaml.MappingNode = super().compose_mapping_node(anchor)
            seen = set()
            for key, _ in node.value:
                if key.tag != "tag:yaml.org,2002:merge" and isinstance(key, yaml.ScalarNode):
                    if (key.tag, key.value) in seen:
                        raise yaml.composer.ComposerError(None, None, f"found {key.value!r} twice", key.start_mark)
                    seen.add((key.tag, key.value))
            return node

    return list(yaml.load_all(text, Loader))


@dataclass(frozen=True)
class Change:
    """What makes a VM what is declared of it.

    :param sentences: one a field, as it is and as it is to be.
    :param fields: of `ebbtide.client.ManagerClient.resize`; None: it is not there, and is created.
    :param labels: of `ebbtide.client.ManagerClient.label_vm`.
    :param under_way: what is being done with it.
    :param hindrance: why it cannot be made what is declared now.
    :param version: that the VM has with these differences; None: it is not there.
    """

    name: str
    sentences: tuple[str, ...] = ()
    fields: Mapping[str, Any] | None = field(default_factory=dict)
    labels: Mapping[str, str | None] = field(default_factory=dict)
    under_way: str = ""
    hindrance: str = ""
    version: str | None = None

    @property
    def action(self) -> str:
        if self.fields is None:
            return "create"
        return "resize" if self.fields else "label" if self.labels else "none"


def change_to(spec: VMSpec, vm: ClusterVM | None) -> Change:
    """The difference between what is declared and what is there, or will be at its next start.

    The template and the memory to boot with are not looked at: a VM that is there keeps them.
    """
    # One that no host took is created by its name.
    if vm is None or (vm.state == "failed" and vm.host is None):
        return Change(spec.name, (f"{spec.priority}, {spec.nominal.vector()}",), None)
    if vm.state == "deleting":
        return Change(spec.name, hindrance="it is being deleted: apply again once it is gone")
    if vm.state == "failed":
        return Change(spec.name, hindrance=f"it has failed: {vm.sentence}")
    later = vm.at_next_start
    minimum = spec.allocation(ZERO).minimum
    there = vm.minimum.vector() if later is None else later.allocation(ZERO).minimum
    now: VMSpec | ClusterVM = vm if later is None else later
    sentences: list[str] = []
    fields: dict[str, Any] = {}
    ceiling = _size(spec.ceiling)
    sizes: tuple[tuple[str, ResourceVector | None, ResourceVector | None, ResourceVector | None], ...] = (
        ("nominal", now.nominal.vector(), spec.nominal.vector(), spec.nominal.vector()),
        ("minimum", there, minimum, spec.asked_minimum()),
        ("ceiling", _size(now.ceiling), ceiling, ceiling),
    )
    for name, has, wanted, asked in sizes:
        differs = _differ(has, wanted)
        if differs:
            sentences.append(f"{name}: {'-' if has is None else has} -> {'-' if wanted is None else wanted}")
        # A minimum that was asked for as a share would follow the nominal size. A ceiling goes with the priority that
        # needed it.
        if asked is not None and (differs or (name == "minimum" and "nominal" in fields)):
            fields[name] = PartialVector.model_validate(asked.as_dict())
    for name in ("priority", "on_preemption", "preemption_notice_s", "steady"):
        before, after = getattr(now, name), getattr(spec, name)
        if before != after:
            sentences.append(f"{name}: {before} -> {after}")
            fields[name] = after
    labels: dict[str, str | None] = {}
    # A file that says nothing of labels leaves them alone.
    if "labels" in spec.model_fields_set and spec.labels != vm.labels:
        labels = {key: spec.labels.get(key) for key in sorted({*spec.labels, *vm.labels})}
        labels = {key: value for key, value in labels.items() if value != vm.labels.get(key)}
        sentences += [f"labels.{key}: {vm.labels.get(key, '-')} -> {value or '-'}" for key, value in labels.items()]
    under_way = "it is being placed" if vm.state == "placing" else ""
    return Change(spec.name, tuple(sentences), fields, labels, under_way, version=vm.version or None)


def _differ(has: ResourceVector | None, wanted: ResourceVector | None) -> bool:
    if has is None or wanted is None:
        return has is not wanted
    # What is read back is rounded.
    return not (has.fits_in(wanted) and wanted.fits_in(has))


def _size(vector: Vector | None) -> ResourceVector | None:
    return None if vector is None else vector.vector()
