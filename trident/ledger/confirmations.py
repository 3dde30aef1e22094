"""Confirmations of the page: each form is good for one decision, whichever process gets it, and however often it is sent.

The form's secret is recorded, as a digest, in the transaction of the decision itself: either both are there or neither is.
So a page that was started anew, or another one that serves the same ledger, can tell whether a form was acted on.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from stormproof.core.errors import UsageError
from stormproof.trident.ledger import tables as t


class ConfirmedBefore(UsageError):
    """The form was confirmed before, and acted on; nothing was done now."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A form that was acted on: which decision, by whom, when."""

    action: str
    by: str
    at: datetime

    def __str__(self) -> str:
        return (
            f"It was confirmed before, by {self.by} at {self.at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC, and done then"
        )


@dataclass(frozen=True, slots=True)
class Confirmation:
    """One sending of a form. A decision that takes several transactions records it in the first that changes something."""

    digest: str
    action: str
    by: str
    click: str = field(default_factory=lambda: secrets.token_hex(16))

    @staticmethod
    def of(secret: str, action: str, by: str) -> Confirmation:
        """By the form's secret."""
        return Confirmation(digest_of(secret), action, by)

    def take(self, connection: sa.Connection, incarnation: str, now: datetime) -> None:
        """Record it in this transaction, which holds up another one that does the same until it has ended.

        Raises:
            ConfirmedBefore: another sending of the form was recorded.
        """
        values = {
            "digest": self.digest,
            "incarnation": incarnation,
            "action": self.action,
            "by": self.by,
            "at": now,
            "click": self.click,
        }
        connection.execute(postgresql.insert(t.confirmation).values(values).on_conflict_do_nothing())
        row = connection.execute(sa.select(t.confirmation).where(t.confirmation.c.digest == self.digest)).one()
        if row.click != self.click:
            raise ConfirmedBefore(f"{Confirmed(row.action, row.by, row.at)}: nothing was done now")


def digest_of(secret: str) -> str:
    """Under which a form is known; nobody can confirm a form by what the ledger holds."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def confirmed(connection: sa.Connection, secret: str) -> Confirmed | None:
    """What is recorded of a form; None: it was never acted on, or the record was pruned."""
    row = connection.execute(
        sa.select(t.confirmation).where(t.confirmation.c.digest == digest_of(secret))
    ).one_or_none()
    return None if row is None else Confirmed(row.action, row.by, row.at)
