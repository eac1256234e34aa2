"""Sections of docs/research/matching-simulated.md, a module for each group."""
