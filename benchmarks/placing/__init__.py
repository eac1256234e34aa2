"""Benchmarks of placement and of the pure policies."""
