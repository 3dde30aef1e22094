"""The topology graph, and the plan that it is compiled to. Data and checks: nothing here runs in a task.

| module | question that it answers |
| --- | --- |
| `topology` | how are spouts, bolts, aggregates, joins and sinks added; who subscribes to whom |
| `components` | what is a component, an output stream; which task gets a tuple, by which grouping |
| `join` | which joins of two streams are there |
| `aggregation` | what is computed of groups: built-in aggregations, and users' combiners and reducers |
| `checks` | what is refused as a component is added |
| `plan` | how is a topology cut into stages at its exchanges; what does a stage consist of: nodes, edges, entries |
"""
