"""Which callers count as one: an address of IPv4, or a network of IPv6."""

from __future__ import annotations

import ipaddress
from typing import Final

#: What one customer or machine gets at least: with each of its addresses counted alone there would be no cap at all.
_NETWORK_BITS: Final = 64


def counted(address: str | None) -> str:
    """What an address is counted as, where callers are capped by address.

    :param address: of the other end; None or empty where it has none.
    """
    try:
        found = ipaddress.ip_address(address or "")
    except ValueError:
        return address or ""
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    # The number leaves out the interface of a link-local address.
    return str(ipaddress.IPv6Network((int(found), _NETWORK_BITS), strict=False))
