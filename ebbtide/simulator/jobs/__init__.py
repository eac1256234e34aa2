"""Batch jobs on machines whose cores come and go: compiled discrete events (docs/internals/jobs.md)."""
