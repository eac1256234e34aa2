"""Which machine keeps its cores long enough for a task: pure functions over core changes, no clock, no I/O."""
