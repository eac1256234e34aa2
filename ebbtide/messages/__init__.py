"""Bodies on the wire (pydantic): REST of both daemons, and what passes between host and guest."""
