"""Deflation mechanisms that a domain has, and what to change where one is missing."""
