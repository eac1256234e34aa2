"""One managed VM: its guest link, the execution of instructions, drift repair."""
