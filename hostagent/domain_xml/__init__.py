"""Domain XML: templates on the host, and the allow-list for XML in requests."""
