"""The package's logger, `app_adapters`. It needs no setting up: Python writes warnings and errors to standard error."""

from __future__ import annotations

import contextlib
from typing import Callable


def say(sentence: str) -> None:
    """What happens to a target, at level INFO: seen where the service lets that level through."""
    import logging  # at the first sentence: a guest pays for every module

    logging.getLogger("app_adapters").info("%s", sentence)


def fault(sentence: str, error: BaseException) -> None:
    """A fault of an adapter, with its traceback."""
    import logging

    with contextlib.suppress(Exception):  # a service's own handler: what is at work goes on without its words
        logging.getLogger("app_adapters").error("%s", sentence, exc_info=error)


def guarded(log: Callable[[str], None]) -> Callable[[str], None]:
    """A service's own log, of which no fault stops what it tells of."""

    def tell(sentence: str) -> None:
        try:
            log(sentence)
        except Exception as error:
            fault(f"the log failed, which was to take: {sentence}", error)

    return tell
