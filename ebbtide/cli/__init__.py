"""The command `ebb`: `main` has the table of its commands, `commands` their functions."""
