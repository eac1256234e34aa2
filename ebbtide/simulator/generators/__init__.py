"""Workloads, capacity and harvest series made by a seeded generator, in the batches of `simulator.inputs.batches`."""
