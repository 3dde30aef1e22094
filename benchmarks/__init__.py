"""What Stormproof costs: each figure beside its rival, in the same run; see docs/benchmarks.md."""
