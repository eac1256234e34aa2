"""The hypervisor port and its implementation over libvirt."""
