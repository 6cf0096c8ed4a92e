"""Raise an error that says what to install if hypothesis is missing; imported before its users."""

from __future__ import annotations

import importlib.util

from attnkit.errors import AttnkitError


class MissingPackageError(AttnkitError, ImportError):
    """Says that a package that an optional part of attnkit needs is not installed."""


if importlib.util.find_spec("hypothesis") is None:
    raise MissingPackageError(
        "attnkit.testing needs the package hypothesis, which is not installed; "
        "run: pip install 'attnkit[test]'",
        name="hypothesis",
    )
