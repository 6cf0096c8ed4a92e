"""Define every error that attnkit raises on purpose.

Each class also derives from the builtin that a Python user would expect, so `except TypeError`
keeps working. A message names the argument, its value, what was expected and what to do.
"""

from __future__ import annotations


class AttnkitError(Exception):
    """Base of all errors raised by attnkit."""


class TraceError(AttnkitError, TypeError):
    """A `score_mod` or `mask_mod` does something that cannot be traced."""


class ShapeError(AttnkitError, ValueError):
    """A tensor or a mask has the wrong rank, length or head count."""


class DTypeError(AttnkitError, TypeError):
    """A tensor or a returned value has a dtype that the operator does not take."""


class DeviceError(AttnkitError, ValueError):
    """A tensor is on another device than the query."""


class OptionError(AttnkitError, ValueError):
    """An option is unknown, or its value is not allowed."""


class ArgumentError(AttnkitError, TypeError):
    """An argument is of the wrong kind."""


class BoundsError(AttnkitError, IndexError):
    """An index may leave its captured tensor, or integer arithmetic may leave int32."""


class UnsupportedError(AttnkitError, NotImplementedError):
    """A valid request that no backend can serve here."""


class LaunchError(AttnkitError, RuntimeError):
    """CUDA or the linker refused a compiled kernel."""
