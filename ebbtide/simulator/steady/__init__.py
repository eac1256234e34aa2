"""Room before it is asked for: steady mode beside none and beside a rule like Proxmox VE's, over a trace of VMs."""
