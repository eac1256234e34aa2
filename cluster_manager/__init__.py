"""The central daemon: hosts, placement, plans, preemption as the last resort, reinflation, store and REST."""
