"""What the command line, the page and the reference are made from: each question and each decision, declared once.

| module | declares |
| --- | --- |
| `questions` | the audit's questions, as `migrations/views.sql` has them |

Nothing here needs a database or Spark: `--help` reads it.
"""
