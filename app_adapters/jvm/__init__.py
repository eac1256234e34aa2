"""A JVM on this machine: its heap follows its VM's memory (Sharma et al. 2019, §4: collect, then a smaller heap)."""
