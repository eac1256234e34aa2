"""The memcached inside a lab guest, filled and read through the lab channel, apart from all agents."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ebbtide.demo.errors import DemoFailed
from ebbtide.lab.errors import LabError
from ebbtide.lab.guest_link import LabLink, value_digest
from ebbtide.lab.readings import Gauge

PREFIX = "demo-"
VALUE_BYTES = 32 * 1024
#: Keys stored by one request: a request must be answered within the channel's time limit, also in emulation.
BATCH = 500


class Cache:
    """One guest's cache. ``keys``: how many keys of ``VALUE_BYTES`` it is filled with."""

    def __init__(self, name: str, gauge: Gauge, keys: int) -> None:
        self.name = name
        self.keys = keys
        self._gauge = gauge

    async def fill(self, progress: Callable[[float], None]) -> None:
        """Store all keys; progress gets the fraction done. Raises DemoFailed if memcached did not take them."""
        link = await self._link()
        try:
            for start in range(0, self.keys, BATCH):
                count = min(BATCH, self.keys - start)
                done = await link.call(
                    "memcached.fill", prefix=PREFIX, count=count, value_bytes=VALUE_BYTES, start=start
                )
                if done["stored"] != count:
                    raise DemoFailed(f"memcached in {self.name} stored {done['stored']} of {count} keys")
                progress((start + count) / self.keys)
        except LabError as error:
            raise DemoFailed(f"the cache of {self.name} could not be filled: {error}") from error
        finally:
            await link.close()

    async def digests(self, keys: Sequence[str]) -> dict[str, str]:
        """SHA-256 of the values of those keys that answer."""
        link = await self._link()
        try:
            found: dict[str, str] = (await link.call("memcached.get", keys=list(keys)))["found"]
            return found
        except LabError as error:
            raise DemoFailed(f"the cache of {self.name} does not answer: {error}") from error
        finally:
            await link.close()

    def latest(self, count: int) -> dict[str, str]:
        """The keys stored last, with the SHA-256 that their values must have."""
        return {
            key: value_digest(key, VALUE_BYTES) for key in (f"{PREFIX}{i}" for i in range(self.keys - count, self.keys))
        }

    async def _link(self) -> LabLink:
        try:
            return await self._gauge.link()
        except LabError as error:
            raise DemoFailed(f"the guest of {self.name} does not answer: {error}") from error
