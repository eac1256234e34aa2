"""Execution of plans: requests, instructions to host agents, locks of hosts."""
