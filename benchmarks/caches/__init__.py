"""Benchmark of memcached with and without its adapter."""
