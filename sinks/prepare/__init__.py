"""What tasks do for a sink: rows become prepared files.

| module | question that it answers |
| --- | --- |
| `writer` | how does a task write a prepared file, for which partition |
| `statistics` | which statistics has it |
| `staging` | how are prepared files named, checked, read and removed |
| `misfits` | which rows does a task leave out, since their columns cannot hold them; which messages does a row have |
"""
