"""Files where they are: on a disk of this machine, or in an object store.

| module | question that it answers |
| --- | --- |
| `address` | what is an address in an object store, and with which options is it reached |
| `protocol` | what is asked of any place that has files |
| `files`, `object_files` | which place has the files at an address: on a disk, in memory, or in an object store |
"""
