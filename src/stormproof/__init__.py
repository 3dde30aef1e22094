"""Storm's guarantees for pipelines on Spark."""
