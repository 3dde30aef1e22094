"""The graph of a topology, its checks, and the plan that it is compiled to."""
