"""Engines that run tasks: Slurm and Dask behind one interface. Only here does task_matcher touch the world."""
