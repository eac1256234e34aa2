"""Hosts and VMs on a terminal as they change: `ebb top`."""
