"""Postgres for every part that uses it: which database, connections, and an embedded server.

| module | question that it answers |
| --- | --- |
| `database` | which database does a URL name, how is it shown without secrets, how do we connect, with which settings |
| `columns` | how is a column of our own tables declared |
| `store` | how does a source run statements, in its own transaction or in the ledger's |
| `rights`, `role` | which right does the role lack, and which GRANT gives it; which kinds of roles are there |
| `embedded` | how is the embedded server started by its first user, shared, and stopped by its last |
| `binaries` | where are Postgres's programs; as which user does it run |
| `server_folder` | where are its data, log and socket; what locks the data |
"""
