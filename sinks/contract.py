"""What a sink does where rows and table do not have the same columns: the schema contract."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from stormproof.core.arguments import shown
from stormproof.core.errors import TopologyError


class SchemaContract(StrEnum):
    """What becomes of a column, or of a value, that the table cannot hold."""

    FREEZE = "freeze"
    """The table stays as it is. A column that it lacks is refused, and a value that does not fit fails its message."""
    EVOLVE = "evolve"
    """Columns are added to the table, and widened, with the first batch that has them; values are treated as by `freeze`."""
    DISCARD_VALUE = "discard_value"
    """A value that its column cannot hold is NULL in the table, and counted; columns are treated as by `freeze`."""
    DISCARD_ROW = "discard_row"
    """A row with such a value rejects its message at this sink; columns are treated as by `freeze`."""

    @classmethod
    def given(cls, where: str, contract: SchemaContract | str) -> SchemaContract:
        """The contract that a sink's argument names.

        Raises:
            TopologyError: it names none, or one that is not served.
        """
        try:
            return cls(contract)
        except ValueError:
            known = ", ".join(repr(kind.value) for kind in cls)
            raise TopologyError(f"{where}: schema_contract={shown(contract)} is none of {known}") from None


BY_DELTA_RS: Final = (SchemaContract.EVOLVE, SchemaContract.DISCARD_ROW)
"""The contracts that a Delta table has only where delta-rs commits to it."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a table's schema: a column that is added (`was` None), or widened from the type `was` to `becomes`."""

    column: str
    was: str | None
    becomes: str

    def __str__(self) -> str:
        if self.was is None:
            return f"added column {self.column!r} {self.becomes}"
        return f"widened column {self.column!r} from {self.was} to {self.becomes}"
