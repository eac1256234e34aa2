"""The agent inside a guest: CPUs, memory and the applications' hooks, told to the host over one virtio-serial port.

Standard library only, Python 3.8: it has to run in guests that were not prepared for it.
"""

__version__ = "0.2.0.dev0"
