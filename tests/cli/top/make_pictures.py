"""Maker of the pictures of `ebb top` in docs/assets: ``python -m tests.cli.top.make_pictures``.

What tmux has captured of the real command against a manager and made-up hosts, as SVG without web fonts.
"""

from __future__ import annotations

import asyncio
import io
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.cli.top.screen import Screen, start
from tests.manager.cluster import Cluster, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.with_agent import lab_of

ASSETS = Path(__file__).parents[3] / "docs" / "assets"
#: rich's own, but with the fonts that are there.
SVG = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px }}
{styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}"
height="{terminal_height}" /></clipPath>{lines}</defs>
<rect width="{width}" height="{height}" rx="6" fill="#1e1e1e"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""


async def main() -> None:
    """Make all pictures."""
    agents = [FakeAgent(f"host-{letter}", cpu_cores=16.0, memory_mib=12_000.0) for letter in "bcd"]
    with tempfile.TemporaryDirectory(prefix="ebb-top-") as path:
        async with lab_of(Path(path)) as lab:
            cluster = lab.cluster
            assert cluster.server is not None
            cluster.agents = agents
            for agent in agents:
                agent.manager = lab.url
                await agent.start()
            await cluster.ready()
            # As in a small lab: the last ones take from the first ones.
            for number in range(14):
                await cluster.create(vm(f"batch-{number:02}", cpu_cores=3.0, memory_mib=1000.0))
            for name in ("db", "web", "mail"):
                await cluster.create(vm(name, "fixed", cpu_cores=5.0, memory_mib=2000.0))
            for width, height, words in ((80, 24, ()), (80, 24, ("--vms",)), (160, 40, ("--vms",))):
                with tempfile.TemporaryDirectory(prefix="ebb-top-") as own:
                    await picture(cluster, Path(own), width, height, words)
            for agent in agents:
                await agent.close()


async def picture(cluster: Cluster, directory: Path, width: int, height: int, words: tuple[str, ...]) -> None:
    """One of them."""
    assert cluster.server is not None
    screen = Screen(directory)
    try:
        screen.tmux("resize-window", "-x", str(width), "-y", str(height))
        start(screen, cluster, directory, *words)
        await screen.shows("17 VMs", "events", "placed mail")
        if width > 80:
            screen.press("/", *"host-a", "Enter")
            await screen.shows("filter 'host-a'")
            screen.press("Home", "Enter")
            await screen.shows("layers of", "can still give")
        text = screen.tmux("capture-pane", "-p", "-e").replace(f"127.0.0.1:{cluster.server.port}", "127.0.0.1:7100")
    finally:
        screen.tmux("kill-server")
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text))
    svg = console.export_svg(title="", code_format=SVG, unique_id="top")
    (ASSETS / f"top-{'vms' if words else 'hosts'}-{width}.svg").write_text(svg, encoding="utf-8")
    print(Text.from_ansi(text).plain)


if __name__ == "__main__":
    asyncio.run(main())
