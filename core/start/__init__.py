"""What is read and tried before a run.

| module | question that it answers |
| --- | --- |
| `settings` | what can be set; is a secret in a variable or in a file |
| `preflight` | can every machine run a task, and read and write a folder in an object store |
"""
