"""Files where they are: on a disk of this machine, or in an object store.

| module | question that it answers |
| --- | --- |
| `protocol` | what is asked of any place that has files; what is an address, and with which options is it reached |
| `files`, `object_files` | which place has the files at an address: on a disk, in memory, or in an object store |
"""
