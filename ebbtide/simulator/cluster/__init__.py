"""The deflation cluster: VMs that come and go on nodes, placed, deflated and preempted by the live policies."""
