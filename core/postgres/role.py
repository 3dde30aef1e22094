"""The three kinds of database roles; `stormproof.trident.cli.ledger` lists the rights of each."""

from __future__ import annotations

from enum import StrEnum


class RoleKind(StrEnum):
    """What a role is for; this decides which rights it needs."""

    PRODUCER = "producer"
    """Puts messages into queues that are there; reads no ledger."""
    DRIVER = "driver"
    """Runs topologies and operators' commands, after `ledger migrate` by the schema's owner; makes and owns its queues."""
    AUDITOR = "auditor"
    """Reads everything, changes nothing."""
