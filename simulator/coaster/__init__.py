"""Short and long tasks on servers with queues of their own, and transient servers for short ones (seed 003)."""
