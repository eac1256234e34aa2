"""Which callers count as one."""

from __future__ import annotations

import pytest

from ebbtide.rest.rates import counted


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("2001:db8:0:1:ffff:ffff:ffff:ffff", "2001:db8:0:1::/64"),
        ("2001:db8:0:2::1", "2001:db8:0:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("a name", "a name"),
        ("", ""),
        (None, ""),
    ],
)
def test_an_address_counts_as_itself_or_as_its_network(address: str | None, expected: str) -> None:
    assert counted(address) == expected
