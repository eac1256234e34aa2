"""Base of all errors that end a command of `ebb`; each package derives its own from it."""

from __future__ import annotations


class EbbError(Exception):
    """Ends the command with 1; the text is one sentence for the user."""
