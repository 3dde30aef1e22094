"""Postgres for every part that speaks to one: which database, connections, and an embedded server."""
