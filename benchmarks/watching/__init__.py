"""Benchmarks of what watching the daemons costs them."""
