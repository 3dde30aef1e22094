"""The topology graph, and the plan that it is compiled to. Data and checks: nothing here runs in a task.

| module | question that it answers |
| --- | --- |
| `topology` | how are spouts, bolts, aggregates, joins and sinks added |
| `components` | what is a component, an output stream, a subscription |
| `grouping` | which task gets a tuple, and what does each grouping promise |
| `join` | which joins are there, and what is the schema of one |
| `aggregation`, `aggregators` | what is computed of groups: built-in aggregations, and users' combiners and reducers |
| `checks`, `fields` | what is refused as a component is added; which fields can be keys |
| `registry` | which components does a topology have, and who subscribes to whom |
| `compiler` | how is a topology cut into stages at its exchanges |
| `plan` | what does a stage consist of: nodes, edges, entries |
"""
