"""Write attnkit's log to stderr if ATTNKIT_LOG asks for it, and log a message once.

Every room logs under `attnkit.<room>` by Python's `logging`, so a program's own configuration
applies. INFO has what happens once: kernels that are compiled, and why calls take torch operators
instead. DEBUG has each preparation and each reuse of one. The fast path of repeated calls logs
nothing. This module is imported only when something is logged.
"""

from __future__ import annotations

import logging
import warnings

from attnkit.util import caches, environment

LEVELS = {"info": logging.INFO, "debug": logging.DEBUG}
_MOST = 1024  # messages that `once` remembers

_said: dict[tuple[str, str], None] = {}
caches.register(_said.clear)


def to_stderr(variable: str = "ATTNKIT_LOG") -> None:
    """Write the log to stderr, at the level that an environment variable names.

    If the root logger has handlers, the program has configured logging itself. Then its handlers
    write the messages, and stderr gets no second copy. A value that is no level is ignored with a
    RuntimeWarning.

    Args:
        variable: name of the environment variable, "info" or "debug" in any case.
    """
    value = environment.read(variable)
    level = LEVELS.get(value.strip().lower())
    if level is None:
        warnings.warn(
            f"{variable}={value!r} is ignored; expected {' or '.join(LEVELS)}",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    handler.addFilter(lambda record: not logging.getLogger().handlers)
    logger = logging.getLogger("attnkit")
    logger.addHandler(handler)
    logger.setLevel(level)


def once(logger: logging.Logger, message: str, level: int = logging.INFO) -> None:
    """Log a message at `level` the first time, and at DEBUG again.

    Args:
        logger: the logger of the room.
        message: the message.
        level: level of the first time.
    """
    key = logger.name, message
    if key in _said:
        level = logging.DEBUG
    elif logger.isEnabledFor(level):
        if len(_said) >= _MOST:
            caches.drop_oldest(_said)
        _said[key] = None
    logger.log(level, message)
