"""Engines that run tasks: Slurm and Dask behind one interface. Only here does ebbtide.matcher touch the world."""
