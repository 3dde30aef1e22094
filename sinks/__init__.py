"""Where results go, idempotently: Delta tables, Postgres tables, and memory for tests."""
