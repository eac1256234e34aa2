"""A word to the people who are logged in, where there are any: `wall`, or their terminals themselves."""

from __future__ import annotations

import contextlib
import os
import stat

WALL_LIMIT_S = 5.0
TERMINALS = "/dev/pts"


def tell_people(sentence: str) -> None:
    """Say a sentence on every terminal that takes messages. A guest without terminals has nobody to tell."""
    import shutil  # seldom needed

    wall = shutil.which("wall")
    if wall is None or not _through(wall, sentence):
        write_to_terminals(sentence)


def _through(wall: str, sentence: str) -> bool:
    import subprocess  # seldom needed

    text = sentence.encode("utf-8", "replace") + b"\n"
    quiet = subprocess.DEVNULL
    try:
        done = subprocess.run([wall], input=text, stdout=quiet, stderr=quiet, timeout=WALL_LIMIT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def write_to_terminals(sentence: str, directory: str = TERMINALS) -> int:
    """Write a sentence to the terminals below a directory whose users take messages; returns how many took it."""
    taken = 0
    try:
        names = [name for name in os.listdir(directory) if name.isdigit()]
    except OSError:
        return 0
    for name in names:
        with contextlib.suppress(OSError):  # it was closed meanwhile, or nobody reads it
            fd = os.open(os.path.join(directory, name), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                info = os.fstat(fd)
                # As `mesg n` has it: its group may not write.
                if stat.S_ISCHR(info.st_mode) and info.st_mode & stat.S_IWGRP:
                    os.write(fd, ("\r\n" + sentence + "\r\n").encode("utf-8", "replace"))
                    taken += 1
            finally:
                os.close(fd)
    return taken
