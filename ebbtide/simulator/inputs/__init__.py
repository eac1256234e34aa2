"""Traces in, one form out: readers of public formats, generators, the own format (docs/reference/traces.md)."""
