"""The stability-aware matcher simulated: harvest pools, its policy and its rivals on `simulator.jobs`."""
