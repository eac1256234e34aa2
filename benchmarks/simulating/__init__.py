"""Benchmark of the job simulator."""
