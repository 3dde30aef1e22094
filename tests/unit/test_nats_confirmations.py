"""What the subject says on which a NATS server waits for a confirmation."""

from __future__ import annotations

import pytest

from stormproof.core.source.nats.client import said_in


@pytest.mark.parametrize(
    ("before", "behind"),
    [("lines.reader", ""), ("hub.ACCOUNT.lines.reader", ""), ("hub.ACCOUNT.lines.reader", ".random")],
)
def test_a_delivery_is_read_from_it_with_a_domain_and_without(before: str, behind: str) -> None:
    reply = f"$JS.ACK.{before}.2.17.5.1700000000123456789.3{behind}"
    assert said_in(reply) == (2, 17, 1_700_000_000_123_456, 3)
