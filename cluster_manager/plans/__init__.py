"""Plans as pure state machines: placement, preemption, migration, lifecycle."""
