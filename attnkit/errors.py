"""Define every error that attnkit raises on purpose.

Each class also derives from the builtin that a Python user would expect, so `except TypeError`
keeps working. A message names the argument, its value, what was expected and what to do.
"""

from __future__ import annotations


class AttnkitError(Exception):
    """Base class of all errors that attnkit raises."""


class TraceError(AttnkitError, TypeError):
    """Raised when a `score_mod` or `mask_mod` does something that cannot be traced."""


class ShapeError(AttnkitError, ValueError):
    """Raised when a tensor or a mask has the wrong rank, length or head count."""


class DTypeError(AttnkitError, TypeError):
    """Raised when a tensor or a returned value has a dtype that the operator does not take."""


class DeviceError(AttnkitError, ValueError):
    """Raised when a tensor is on another device than the query."""


class OptionError(AttnkitError, ValueError):
    """Raised when an option is unknown, or its value is not allowed."""


class ArgumentError(AttnkitError, TypeError):
    """Raised when an argument has the wrong type."""


class BoundsError(AttnkitError, IndexError):
    """Raised when an index may leave its captured tensor, or integer arithmetic may leave int32."""


class UnsupportedError(AttnkitError, NotImplementedError):
    """Raised when a request is valid, but no backend can run it here."""


class LaunchError(AttnkitError, RuntimeError):
    """Raised when CUDA or the linker refuses a compiled kernel."""


class StaleDataError(AttnkitError, RuntimeError):
    """Raised when captured data was changed in a way that torch's version counter does not see.

    A result of an earlier call may be wrong: the one that ran first after the write.
    """
