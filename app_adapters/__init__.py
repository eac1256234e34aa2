"""The hook that a service embeds so that its VM can be deflated, and ready adapters.

Standard library only, Python 3.8: services embed it in guests that were not prepared for it.
"""

__version__ = "0.2.0.dev0"
