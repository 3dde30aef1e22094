"""Postgres tables as a sink: rows, guard and evidence in one database transaction.

| module | question that it answers |
| --- | --- |
| `sink`, `session` | how does a topology name a table, and how does a driver write to it |
| `guard` | which txid does the table hold: commits a txid once |
| `fence` | how is an older driver kept from writing |
| `hold` | what does one driver hold: its commits, its evidence, the rows that an audit counts |
| `compare`, `hashed` | does it have the rows that were written; which columns give values back as they came |
| `connection`, `bookkeeping` | its connection; the sink's own tables |
| `facts` | what has a commit to know of the table, asked by one statement while its rows lock it |
| `collations` | are a table's keys equal where a batch's are |
| `rows`, `copying`, `folds` | how do rows get into the table: COPY, upsert, fold |
| `newer_wins` | when does a row of an upsert replace the one that the table holds |
| `in_order` | how do rows get into a table in which rows of several keys exclude each other |
| `parallel` | how do tasks load large files by themselves |
| `refusals`, `row_by_row` | which CHECK, UNIQUE or FOREIGN KEY can refuse a row; how is such a row left out; how many |
| `columns` | which columns take text by the server's own cast, and which of them as keys |
| `table`, `table_key` | what can each column hold; do two names mean one table |
| `evolve` | how does a table get the columns and types that its rows have |
| `preview` | what would a start do with the table, for a dry run |
| `wire`, `json_text` | how does a column of Arrow get into a column of Postgres; nested values as JSON |
| `durable` | do the table's rows survive a crash of the server |
"""

from __future__ import annotations

from stormproof.sinks.postgres.sink import PostgresSink

__all__ = ["PostgresSink"]
