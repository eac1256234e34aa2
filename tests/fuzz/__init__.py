"""Random bytes for everything that is parsed from outside."""
