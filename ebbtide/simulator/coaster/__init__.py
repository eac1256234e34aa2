"""Short and long tasks on servers with queues of their own; transient servers for short ones (Ogden and Guo 2019)."""
