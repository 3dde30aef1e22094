"""The engines that run a batch: Spark, and one process without a JVM."""
