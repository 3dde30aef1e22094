"""Postgres for every part that uses it: which database, connections, and an embedded server.

| module | question that it answers |
| --- | --- |
| `database` | which database does a URL name, how is it shown without secrets, how do we connect |
| `session` | which settings does a session of ours need, whatever the role's or the database's defaults |
| `columns` | how is a column of our own tables declared |
| `store` | how does a source run statements, in its own transaction or in the ledger's |
| `rights`, `role` | which right does the role lack, and which GRANT gives it; which kinds of roles are there |
| `embedded` | how is the embedded server started by its first user, shared, and stopped by its last |
| `binaries` | where are Postgres's programs, and as which user do they run; where are a server's data, log and socket |
| `data_lock` | what keeps a second server off the same data |
"""
