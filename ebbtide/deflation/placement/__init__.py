"""Choice of a host for a VM: placement policies, fitness, order of hosts, and what a placement does next."""
