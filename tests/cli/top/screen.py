"""A terminal that can be looked at: tmux of the test's own."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.manager.cluster import TOKEN, Cluster


class Screen:
    """A tmux of the test's own with one window, in which a shell runs."""

    def __init__(self, directory: Path) -> None:
        self._socket = str(directory / "tmux")
        self.tmux("-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", "env PS1='$ ' /bin/sh")

    def tmux(self, *words: str) -> str:
        environment = {**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        done = subprocess.run(
            ["tmux", "-S", self._socket, *words], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    def press(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def text(self) -> str:
        return self.tmux("capture-pane", "-p")

    async def shows(self, *words: str) -> str:
        """What is on the screen, once all of these are."""
        try:
            async with asyncio.timeout(40):
                text = ""
                while not text or not all(word in text for word in words):
                    text = await asyncio.to_thread(self.text)
                return text
        except TimeoutError:
            pytest.fail(f"never shown: {words}\n{self.text()}")


def command(cluster: Cluster, directory: Path, *words: str) -> list[str]:
    token = directory / "token"
    token.write_text(TOKEN)
    reach = ["--manager", cluster.url, "--token-file", str(token)]
    return [sys.executable, "-m", "ebbtide.cli.main", "top", *words, *reach]


def start(screen: Screen, cluster: Cluster, directory: Path, *words: str) -> None:
    """Type the command, with what the terminal is set to before and afterwards."""
    line = shlex.join(command(cluster, directory, *words))
    (directory / "run").write_text(
        f"stty -a > {directory}/before\n{line}\necho ended with $?\nstty -a > {directory}/after\n"
    )
    screen.press(f". {directory}/run", "Enter")
