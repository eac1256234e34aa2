"""Trace-driven simulation over the very policy functions of the live system; so far what goes into it: `inputs`."""
