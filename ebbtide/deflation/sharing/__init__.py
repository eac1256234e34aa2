"""Division of a need and of free room among the VMs of one host."""
