"""Adapter of memcached."""
