"""Task policies of other papers: waiting, intervals, transient servers. Kernels that the simulator compiles."""
