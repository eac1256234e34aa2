"""The daemon of one KVM host: it deflates and reinflates the VMs of its slice and tells the manager the result."""
