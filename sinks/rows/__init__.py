"""What rows are, whichever store takes them.

| module | question that it answers |
| --- | --- |
| `by_key` | which row of a key is the last; how are columns folded; does a key come twice |
| `merge_sql` | how does SQL say which row of a key is the last, and how a column is folded |
| `limits` | what can a column hold, and what lies inside a nested one |
| `content` | the digest of rows whatever file they are in; what a table by key must hold, by the record of its commits |
| `comparison` | does a table hold the rows that were written |
"""
