"""REST interface of the host agent."""
