"""What a topology is, and the plan that it is compiled to. Data and checks: nothing here runs in a task.

`components` and their output streams (`aggregation`, `aggregators`, `grouping`, `join` say what is done between them), the
`registry` of one topology's components, `topology`: how one is built, `checks` as it is built, `compiler`: into a `plan`.
"""
