"""Raise `MissingPackageError` on import if hypothesis is not installed."""

from __future__ import annotations

import importlib.util

from attnkit.errors import AttnkitError


class MissingPackageError(AttnkitError, ImportError):
    """Raised when an optional part of attnkit needs a package that is not installed."""


if importlib.util.find_spec("hypothesis") is None:
    raise MissingPackageError(
        "attnkit.testing needs the package hypothesis, which is not installed; "
        "run: pip install 'attnkit[check]'",
        name="hypothesis",
    )
