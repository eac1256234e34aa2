"""`ebb demo`: two VMs with filled caches give CPU and memory to a third one, and get it back."""
