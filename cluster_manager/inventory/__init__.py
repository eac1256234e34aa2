"""Hosts, their reports and what placement may count on; lists and events."""
