"""How delta-rs is given a table by its address: a local folder, or a URL with the options of its store."""

from __future__ import annotations

from deltalake import DeltaTable

from stormproof.core.storage.address import is_url, storage_options


def load_table(address: str) -> DeltaTable:
    """The table at its newest version. Raises as delta-rs does."""
    return DeltaTable(address, storage_options=options_of(address))


def is_table(address: str) -> bool:
    """Whether there is a Delta table. Raises as delta-rs does."""
    return DeltaTable.is_deltatable(address, storage_options=options_of(address))


def options_of(address: str) -> dict[str, str] | None:
    """What delta-rs takes as `storage_options`; None for a local folder."""
    return dict(storage_options(address)) if is_url(address) else None
