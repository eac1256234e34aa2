"""`ebb guest`: what guests on this machine need for Ebbtide's agent."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from ebbtide.cli.commands.options import Printing
from ebbtide.cli.guest_channel import enable as enable_channel
from ebbtide.cli.output import shown

VM = Annotated[str, typer.Argument(metavar="VM", help="A VM, or any domain of libvirt on this machine.")]
Uri = Annotated[str, typer.Option("--uri", help="libvirt of this machine.")]
NEXT = (
    "Install ebbtide-guest in it, if that is not done: once its agent answers, `ebb vm doctor {vm}` says what it "
    "gives.\n"
    "Until then nothing is taken of its memory, since a channel on which nobody answers tells nothing."
)


def enable(vm: VM, uri: Uri = "qemu:///system", *, to: Printing) -> None:
    """Give a VM the channel of the guest agent, without a restart where libvirt can plug it live."""
    done = enable_channel(vm, uri)
    to.say(dataclasses.asdict(done), lambda: print(f"{shown(done.sentence)}\n{NEXT.format(vm=shown(vm))}"))
