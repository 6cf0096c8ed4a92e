"""Locate this copy of attnkit on disk."""

from __future__ import annotations

import os

# The package's folder with a trailing separator: a prefix of the path of each of its files.
FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
