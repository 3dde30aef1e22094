"""What a commit to a Delta table says of itself: the transaction identifier, and our metadata beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from deltalake import CommitProperties, Transaction

from stormproof.sinks.delta.log import now_ms

COMMIT_RETRIES_MAX: Final = 15
"""How often a commit is tried again after other writers' commits. After one of our own, delta-rs gives up at once."""


@dataclass(frozen=True, slots=True)
class Label:
    """The label of one commit. `known` is the version of the identifier that the table has already. `retries`: how often
    delta-rs tries the commit again behind other writers' commits.
    """

    application: str
    version: int
    metadata: Mapping[str, str]
    known: int | None = None
    retries: int = COMMIT_RETRIES_MAX

    def for_delta_rs(self) -> CommitProperties:
        """The same as delta-rs takes it."""
        return CommitProperties(
            custom_metadata=dict(self.metadata),
            max_commit_retries=self.retries,
            app_transactions=self.identifiers(),
        )

    def identifiers(self) -> list[Transaction]:
        """The transaction identifier: one. For one without a time, the engines disagree on when it expires."""
        return [Transaction(self.application, self.version, now_ms())]
