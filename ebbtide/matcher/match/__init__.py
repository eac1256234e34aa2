"""Choice of a machine for each task; tasks as state machines."""
