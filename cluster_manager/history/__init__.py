"""History of hosts and VMs: sampled from reports, kept in steps that grow coarser with age."""
