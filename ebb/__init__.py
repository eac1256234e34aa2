"""The command line, the lab (a whole cluster on one machine) and the demo. May import every other room."""
