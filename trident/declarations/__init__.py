"""What the command line, the page and the reference are made from: each question and each decision, declared once.

| module | declares |
| --- | --- |
| `questions` | the audit's questions, as `migrations/views.sql` has them |
| `decisions` | what a person decides: fields, warning, and which functions look and do |

Nothing here needs a database or Spark: `--help` reads it.
"""
