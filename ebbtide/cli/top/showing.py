"""Course of `ebb top`: one picture, or a terminal until the user quits."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ebbtide.cli.commands.options import Asking
from ebbtide.cli.top.drawing import Line, text_of
from ebbtide.cli.top.model import Top, View

if TYPE_CHECKING:
    from ebbtide.client import ManagerClient


def show(to: Asking, vms: bool, once: bool) -> None:
    """Show hosts, or VMs: once, or until the user quits. Raises EbbError."""
    view = View.VMS if vms else View.HOSTS
    if once or to.for_programs:
        model = to.ask(lambda client: _once(client, view))
        width = shutil.get_terminal_size((120, 24)).columns
        to.say(model.document(), lambda: _print(model.snapshot(width, time.time())))
        return
    from ebbtide.cli.top.terminal import curses_window

    # Before the manager is asked: without a terminal there is nothing to ask for.
    with curses_window() as window:

        async def watch(client: ManagerClient) -> None:
            from ebbtide.cli.top.reader import Reader
            from ebbtide.cli.top.terminal import Terminal, until_quit

            model = Top(client.url, view)

            def hurried() -> None:
                if model.detail is not None:
                    reader.hurry.set()

            terminal = Terminal(window, model, hurried)
            reader = Reader(client, model, terminal.draw)
            await until_quit(terminal, model, reader.run())

        to.ask(watch)


async def _once(client: ManagerClient, view: View) -> Top:
    from ebbtide.cli.top.reader import Reader

    model = Top(client.url, view)
    reader = Reader(client, model, lambda: None)
    await reader.look()
    await reader.earlier_events()
    return model


def _print(lines: Sequence[Line]) -> None:
    for line in lines:
        print(text_of(line))
