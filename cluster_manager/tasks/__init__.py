"""Tasks and the machines they run on; what was learned of the machines."""
