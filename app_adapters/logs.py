"""The package's logger, `app_adapters`. It needs no setting up: Python writes warnings and errors to standard error."""

from __future__ import annotations


def say(sentence: str) -> None:
    """What happens to a target, at level INFO: seen where the service lets that level through."""
    import logging  # at the first sentence: a guest pays for every module

    logging.getLogger("app_adapters").info("%s", sentence)


def fault(sentence: str, error: BaseException) -> None:
    """A fault of an adapter, with its traceback."""
    import logging

    logging.getLogger("app_adapters").error("%s", sentence, exc_info=error)
