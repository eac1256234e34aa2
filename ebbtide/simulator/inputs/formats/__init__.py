"""Trace formats, one module a family; `registry.ALL` has them all."""
