"""Persistent state of the host agent: intents, journal, history, modes."""
