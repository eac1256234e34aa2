"""What is parsed from outside, each with a small corpus, and what it may say of bytes that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from app_adapters.errors import BadBody
from app_adapters.messages import parse_target
from cluster_manager.errors import SettingsError
from cluster_manager.store.database import database_of
from ebbtide.client import ClientError
from ebbtide.client.connection import Managers, check_path
from ebbtide.deflation.errors import InvalidField
from ebbtide.matcher.engines.records import _claim, _end
from ebbtide.matcher.engines.settings import read_settings
from ebbtide.matcher.engines.slurm_json import document, jobs_of, machines_of, other_gres_of
from ebbtide.matcher.errors import EngineSettingsError, EngineUnreachable
from ebbtide.messages.commands import TargetCommand
from ebbtide.messages.common import problem_of
from ebbtide.messages.guest import NOTICES, CpusSet, GuestStatus, Hello
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.requests import VMRequest
from ebbtide.messages.tasks import TaskRequest
from ebbtide.rest.errors import AccessError
from ebbtide.rest.pages import cursor_of, key_of
from ebbtide.rest.tokens import read_token, read_tokens
from guestagent.errors import DropInError, ParseError
from guestagent.hooks import read_drop_in
from guestagent.rpc import InvalidRequest, cleaned, parse_json, parse_request
from hostagent.domain_xml.xml_allow_list import Rights, XMLRefused, check, parse
from hostagent.errors import GuestUnreachable
from hostagent.vm.guest_link import _checked, _cleaned, _parsed


@dataclass(frozen=True, slots=True)
class Target:
    """A parser: ``corpus`` is what fits, or nearly; ``refusals`` is all that it may raise."""

    parse: Callable[[bytes], object]
    corpus: tuple[bytes, ...]
    refusals: tuple[type[Exception], ...] = ()


def _text(data: bytes) -> str:
    """As texts come from JSON and command lines: surrogates and all."""
    return data.decode("utf-8", errors="surrogateescape")


def _guest_line(data: bytes) -> None:
    message = _cleaned(_parsed(data))
    json.dumps(message, ensure_ascii=False).encode()
    for kind in (Hello, GuestStatus, CpusSet):
        try:
            _checked(kind, message.get("result"))
        except GuestUnreachable as error:
            str(error).encode()
    for notice in NOTICES.values():
        try:
            notice.model_validate(message.get("params"))
        except ValidationError:
            continue


def _body(form: type[BaseModel]) -> Callable[[bytes], None]:
    def parse_body(data: bytes) -> None:
        try:
            form.model_validate_json(data, strict=True).model_dump_json()
        except ValidationError as error:
            # What the answer of 400 is made of.
            problem_of(error).model_dump_json().encode()

    return parse_body


def _xml(data: bytes) -> None:
    check(parse(_text(data)), Rights(("/srv/images",)))


def _record(data: bytes) -> None:
    text = data[:4096].decode(errors="replace")
    for found in (_claim(text).begun_at, _claim(text).machine, _end(text)):
        json.dumps(found, allow_nan=False)


def _slurm_says(data: bytes) -> None:
    found = document("squeue", data.decode(errors="replace"))
    said = [asdict(job) for job in jobs_of(found)], [asdict(machine) for machine in machines_of(found)]
    json.dumps((*said, other_gres_of(found)), ensure_ascii=False, allow_nan=False).encode()


def _in_file(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def parse_file(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return parse_file


def _hook_answer(data: bytes) -> None:
    json.dumps(cleaned(parse_json(data)), ensure_ascii=False).encode()


def _address(data: bytes) -> None:
    Managers(_text(data))
    check_path(_text(data))


VECTOR = b'{"cpu_cores": 1.5, "memory_mib": 512.0}'
XML = b"""<domain type='kvm'><name>web</name><memory unit='MiB'>512</memory><vcpu>2</vcpu><os><type>hvm</type>
<kernel>/srv/images/vmlinuz</kernel></os><devices><disk type='file' device='disk'><driver name='qemu' type='qcow2'/>
<source file='/srv/images/web.qcow2'/><target dev='vda' bus='virtio'/></disk><serial type='pty'/></devices></domain>"""
REPORT = (
    b'{"id": "host-a", "url": "http://127.0.0.1:7101", "incarnation": "a", "capacity": %b, "free": %b, '
    b'"deflatable": %b, "vm_overhead_mib": 10.0, "accelerator": "kvm", "vms": [], "core_changes": [{"sequence": 1, '
    b'"machine": "web", "at": 1.5, "cores_before": 2.0, "cores_after": 1.0, "cause": "x"}]}' % (VECTOR, VECTOR, VECTOR)
)
#: As Slurm 22.05 prints them, and newer versions' numbers.
SLURM = (
    b'{"errors": [], "jobs": [{"job_id": 7, "name": "ebb.train.0a.1", "user_id": 0, "job_state": "RUNNING", "cpus": 2, '
    b'"nodes": "n[1-2]", "job_resources": {"allocated_nodes": {"0": {"nodename": "n1", "cores": {"0": "allocated"}}}}},'
    b'{"job_id": 8, "name": "x", "user_id": {"set": true, "number": 5}, "job_state": ["FAILED"], "exit_code": 256, '
    b'"state_reason": "NonZeroExitCode"}, {"job_id": 9, "job_state": "PENDING", "priority": 0, "required_nodes": ""}]}',
    b'{"nodes": [{"name": "n1", "cpus": 4, "gres": "gpu:1,vcore:3", "state": "idle", "reason": "gres/vcore count '
    b'changed", "state_flags": ["DRAIN"]}]}',
    b'{"errors": [{"error": "Unable to contact slurm controller", "description": ""}], "jobs": []}',
)
ENGINE = b"""engine = "none"
[prediction]
form = "landmark"
window_s = 3600.0
"""


def targets(directory: Path) -> dict[str, Target]:
    """All of them; what is a file is made in this directory."""
    return {
        "guest lines": Target(
            _guest_line,
            (
                b'{"jsonrpc": "2.0", "id": "1", "result": {"protocol": 1, "version": "0.1", "boot_id": "x"}}',
                b'{"jsonrpc": "2.0", "method": "pressure", "params": {"total_mib": 1.0, "available_mib": 2e3}}',
                b'{"id": "1", "error": {"code": -32002, "message": "\\ud800"}}',
            ),
        ),
        "lines to the guest": Target(
            parse_request,
            (b'{"jsonrpc": "2.0", "id": 1, "method": "status", "params": {}}', b'{"id": null}'),
            (InvalidRequest,),
        ),
        "answers of hooks": Target(
            _hook_answer, (b'{"state": "done", "released": %b, "reason": "\\ud83d"}' % VECTOR,), (ParseError,)
        ),
        "bodies to hooks": Target(
            parse_target,
            (b'{"request_id": "a", "target": %b, "deadline_s": 1.5, "mode": "ask"}' % VECTOR, b"{}"),
            (BadBody,),
        ),
        "records of tasks": Target(_record, (b"begun 1700000000.123456789 n1\n", b"0 1700000000.5\n", b"sealed\n")),
        "Slurm's JSON": Target(_slurm_says, SLURM, (EngineUnreachable,)),
        "reports": Target(_body(HostReport), (REPORT,)),
        "requests for VMs": Target(
            _body(VMRequest),
            (b'{"request_id": "a", "vm": {"name": "web", "nominal": %b, "xml": "<domain/>"}}' % VECTOR,),
        ),
        "targets": Target(
            _body(TargetCommand),
            (b'{"request_id": "a", "generation": 1, "target": %b, "deadline_s": 60.0, "mode": "ask"}' % VECTOR,),
        ),
        "tasks": Target(
            _body(TaskRequest),
            (b'{"request_id": "a", "task": {"name": "t", "command": ["x", "\\u0000"], "cores": 2}}',),
        ),
        "cursors": Target(
            lambda data: key_of("list", _text(data), (str, int, float)),
            (cursor_of("list", ("web", 3, 1.5)).encode(), cursor_of("list", ("\ud800", 2**70, 1e300)).encode()),
            (InvalidField,),
        ),
        "domain XML": Target(
            _xml, (XML, b"<?xml version='1.0' encoding='utf-8'?><!DOCTYPE x><domain/>"), (XMLRefused,)
        ),
        "engine files": Target(_in_file(directory / "engine.toml", read_settings), (ENGINE,), (EngineSettingsError,)),
        "token files": Target(_in_file(directory / "token", read_token), (b"secret\n",), (AccessError,)),
        "tokens files": Target(
            _in_file(directory / "tokens.toml", read_tokens),
            (b'[[token]]\nname = "ci"\nrole = "operator"\nsha256 = "%b"\n' % (b"0e" * 32),),
            (AccessError,),
        ),
        "drop-ins": Target(
            _in_file(directory / "a.json", lambda path: read_drop_in(str(path), path.stat().st_uid)),
            (
                b'{"name": "redis", "url": "http://127.0.0.1:7110"}',
                b'{"name": "a", "url": "unix:/run/x", "user": "root"}',
            ),
            (DropInError,),
        ),
        "addresses": Target(
            _address,
            (b"http://127.0.0.1:7100,https://[::1]:1", b"/v1/vms/web"),
            (ClientError,),
        ),
        "databases": Target(
            lambda data: str(database_of(_text(data))),
            (b"postgresql://ebb@db-1,db-2/ebb?sslmode=verify-full", b"postgresql:///x?host=/run"),
            (SettingsError,),
        ),
    }
