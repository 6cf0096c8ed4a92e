"""Define the exception classes that attnkit raises.

Each class also derives from the matching builtin exceptions, so `except TypeError` keeps working.
Where PyTorch's FlexAttention raises another builtin exception for the same mistake, the class
derives from that one too, so that code written for PyTorch catches it. A message names the
argument, its value, the expected value and what to do.
"""

from __future__ import annotations

import pickle


class AttnkitError(Exception):
    """Base class of all errors that attnkit raises."""


class TraceError(AttnkitError, TypeError):
    """Raised when a `score_mod` or `mask_mod` does something that cannot be traced."""


class ArityError(TraceError, AssertionError):
    """Raised when a mask_mod or score_mod takes another number of arguments."""


class ShapeError(AttnkitError, ValueError):
    """Raised when a tensor or a mask has the wrong rank, length or head count."""


class RankError(ShapeError, NotImplementedError):
    """Raised when query, key or value does not have 4 dimensions."""


class DTypeError(AttnkitError, TypeError, ValueError):
    """Raised when a tensor or a returned value has a dtype that the operator does not take."""


class DeviceError(AttnkitError, ValueError, RuntimeError):
    """Raised when tensors are on different devices, or when a named device does not exist."""


class OptionError(AttnkitError, ValueError):
    """Raised when an option is unknown or its value is not allowed."""


class ArgumentError(AttnkitError, TypeError):
    """Raised when an argument has the wrong type."""


class FunctionError(ArgumentError, RuntimeError):
    """Raised when a mask_mod is missing or cannot be called."""


class ConflictError(OptionError, RuntimeError):
    """Raised when two options exclude each other."""


class BoundsError(AttnkitError, IndexError):
    """Raised when an index may leave its captured tensor, or integer arithmetic may leave int32."""


class UnsupportedError(AttnkitError, NotImplementedError):
    """Raised when a request is valid but no backend on this machine supports it."""


class LaunchError(AttnkitError, RuntimeError):
    """Raised when a compiled kernel fails to link, load or launch."""


class StaleDataError(AttnkitError, RuntimeError):
    """Raised when captured data was changed in a way that torch's version counter does not see.

    The result of the first call after that write may be wrong.
    """


class PicklingError(AttnkitError, pickle.PicklingError):
    """Raised when a mask, score_mod or BlockMask reads a function that `pickle` cannot store."""
