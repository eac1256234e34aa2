"""The memory limit that swap backs, on a real guest: refused without swap, kept with it, lifted when swap goes."""

from __future__ import annotations

from tests.guests.solo import SoloGuest, eventually

#: Holds memory that compresses well, and touches all of it whenever it is told to.
HOLDER = """
import mmap, os, sys, time
size = int(sys.argv[1]) << 20
held = mmap.mmap(-1, size)
for page in range(0, size, 4096):
    held[page:page + 8] = page.to_bytes(8, "little")
open("/run/held", "w").close()
while True:
    time.sleep(0.1)
    if os.path.exists("/run/touch"):
        wrong = 0
        for page in range(0, size, 4096):
            wrong += held[page:page + 8] != page.to_bytes(8, "little")
            held[page + 8] = (held[page + 8] + 1) % 256
        with open("/run/touched.new", "w") as file:
            file.write(str(wrong))
        os.rename("/run/touched.new", "/run/touched")
        os.unlink("/run/touch")
"""


async def hold(guest: SoloGuest, mib: int) -> None:
    """Have an application in the guest hold so much memory, which it will not give."""
    await guest.put("/run/holder.py", HOLDER)
    await guest.run("sh", "-c", f"python3 -S /run/holder.py {mib} </dev/null >/dev/console 2>&1 &")

    async def held() -> bool:
        return "held" in await guest.run("ls", "/run")

    await eventually(held, "the application never held its memory")


async def touch(guest: SoloGuest) -> int:
    """Have the application read and write all its memory; returns how many pages were not as it left them."""
    await guest.run("sh", "-c", "rm -f /run/touched; : >/run/touch")

    async def touched() -> bool:
        return "touched" in (await guest.run("ls", "/run")).split()

    await eventually(touched, "the application never got through its memory")
    return int(await guest.run("cat", "/run/touched"))
