"""Adapter of PostgreSQL."""
