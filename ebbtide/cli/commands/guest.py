"""`ebb guest`: what guests on this machine need for Ebbtide's agent."""

from __future__ import annotations

from typing import Annotated

import typer

from ebbtide.cli.commands.options import Json
from ebbtide.cli.guest_channel import enable as enable_channel
from ebbtide.cli.output import print_json, shown

VM = Annotated[str, typer.Argument(metavar="VM", help="A VM, or any domain of libvirt on this machine.")]
Uri = Annotated[str, typer.Option("--uri", help="libvirt of this machine.")]
NEXT = (
    "Install ebbtide-guest in it, if that is not done: once its agent answers, `ebb doctor {vm}` says what it gives.\n"
    "Until then nothing is taken of its memory, since a channel on which nobody answers tells nothing."
)


def enable(vm: VM, uri: Uri = "qemu:///system", json: Json = False) -> None:
    """Give a VM the channel of the guest agent, without a restart where libvirt can plug it live."""
    done = enable_channel(vm, uri)
    if json:
        print_json(
            {"domain": done.domain, "live": done.live, "at_next_start": done.at_next_start, "sentence": done.sentence}
        )
    else:
        print(shown(done.sentence))
        print(NEXT.format(vm=shown(vm)))
