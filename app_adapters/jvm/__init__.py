"""A JVM on this machine: its heap follows its VM's memory (seed 004 §4: collect and reduce the maximum heap size)."""
