"""Adapter of Redis."""
