"""Parts that the REST servers of manager and host agent share."""
