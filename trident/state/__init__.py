"""State: what a topology keeps in stores that know nothing of transactions, or in its own tables, txid by txid."""
