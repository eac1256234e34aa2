"""REST interface and dashboard routes of the manager."""
