"""The lab: a manager, host agents with declared slices, and real guests, all on this machine."""
