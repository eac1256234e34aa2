"""Control loops of the host agent: survey, admission of starts, harvest, pressure, reports."""
