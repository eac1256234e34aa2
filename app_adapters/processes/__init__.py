"""Processes: memory, limits, programs as adapters."""
