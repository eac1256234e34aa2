"""Trace-driven simulation over the very policy functions of the live system: `inputs`, `generators`, `experiments`."""
