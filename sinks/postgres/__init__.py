"""Postgres tables as a sink: rows, guard and evidence in one database transaction."""

from __future__ import annotations

from stormproof.sinks.postgres.sink import PostgresSink

__all__ = ["PostgresSink"]
