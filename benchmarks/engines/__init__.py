"""Benchmarks of the JVM and of Spark."""
