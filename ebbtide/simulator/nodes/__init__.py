"""Search for a node among very many, in simulations: best fit, first fit, random; backfilling. Kernels."""
