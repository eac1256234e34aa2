"""Spark on its standalone cluster manager: the policy, the service beside the master, the adapter of a worker's VM."""
