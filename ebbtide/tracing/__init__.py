"""Traces: spans of an operation through manager, host agent, guest and hook, off unless `--tracing` is given."""
