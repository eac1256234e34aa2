"""Hosts, guests and cgroups that benchmarks measure on."""
