"""Benchmarks: medians of several runs, as ratios to something measured in the same run (`benchmarks.runner`).

See docs/research/benchmarks.md. Nothing is imported here: processes of a benchmark have memory that is measured.
"""
