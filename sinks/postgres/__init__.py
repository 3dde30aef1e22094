"""Postgres tables as a sink: rows, guard and evidence in one database transaction.

| module | question that it answers |
| --- | --- |
| `sink`, `session` | how does a topology name a table, what would a start do with it; how does a driver write to it |
| `guard` | which txid does the table hold: commits a txid once |
| `transactional_table` | is the table as it was; which txids does it hold, and how many rows; how appended rows get in |
| `merge` | how do rows by key get in |
| `schema_changes` | how does the table get the columns of its rows |
| `compare` | does it have the rows that were written |
| `connection` | its connection, and the sink's own tables; how is an older driver kept from writing |
| `refusals` | what of the table, beside its columns, can refuse a row or lose one; what a commit asks of it at once |
| `judge` | which rows does the table refuse, and in which order are they put where they exclude each other |
| `columns` | which columns take which text, and give values back as they came; how does a column of Arrow get into one |
| `table` | what can each column hold; which text is a key that a map's table compares as another type |
"""
