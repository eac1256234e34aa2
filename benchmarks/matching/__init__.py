"""Benchmarks of the matcher: decisions by the second, tasks on a real Slurm."""
