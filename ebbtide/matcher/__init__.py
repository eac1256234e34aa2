"""Policies that find a machine that keeps its cores long enough for a task. Pure: no clock, no I/O."""
