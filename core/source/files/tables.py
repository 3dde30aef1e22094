"""The table of the file sources: the files of each subscription. Pending messages are in the pending store's tables."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, DateTime, Index, LargeBinary, MetaData, Table, Text, text
from sqlalchemy.dialects.postgresql import ARRAY

SCHEMA = "stormproof"

metadata = MetaData(schema=SCHEMA)


file_entry = Table(
    "file_entry",
    metadata,
    Column("source", Text, primary_key=True, comment="the source's name"),
    Column("subscription", Text, primary_key=True, comment="who reads it"),
    Column("number", BigInteger, primary_key=True, autoincrement=False, comment="from 1, as the files were found"),
    Column("path", Text, nullable=False, comment="where the file was found"),
    Column("first_id", BigInteger, nullable=False, comment="number of its first row's message"),
    Column("rows", BigInteger, nullable=False, comment="how many messages it has"),
    Column("size_bytes", BigInteger, nullable=False, comment="of the file"),
    Column("modified_ns", BigInteger, nullable=False, comment="since 1970"),
    Column("fingerprint", Text, nullable=False, comment="SHA-256 of a Parquet file's footer, of another's digests"),
    Column("marks", LargeBinary, nullable=False, comment="where blocks of rows begin: 64-bit numbers, little-endian"),
    Column("digests", LargeBinary, nullable=False, comment="8 bytes of the SHA-256 of each block of rows"),
    Column("digested", ARRAY(Text), nullable=False, comment="the columns of a Parquet file that the digests are of"),
    Column(
        "registered_at",
        DateTime(timezone=True),
        nullable=False,
        server_default=text("clock_timestamp()"),
        comment="when it was found",
    ),
    # Of a digest: a path may be longer than Postgres takes into an index.
    Index("file_entry_path", "source", "subscription", text("md5(path)"), unique=True),
    comment="files as they were when they were found; they must not change any more",
)
