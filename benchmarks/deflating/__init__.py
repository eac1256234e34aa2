"""Benchmarks of deflation on real guests."""
