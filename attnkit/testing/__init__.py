"""Test attention variants against dense float64 attention, on random calls: `check_variant`.

In: a score_mod, a mask or a `Variant`. Out: a `Report`, with a program that reproduces a failure.
The hypothesis strategies `variants`, `masks`, `library_masks`, `library_mods`, `mask_mods` and
`score_mods` draw variants. The strategies `cases`, `lengths`, `layouts` and `dtypes` draw calls.
`contest.measure` times a variant beside PyTorch's functions. `cli` imports this package. `python -m attnkit.testing.selfcheck` runs once on every GPU model on
which the kernels have not been verified.

>>> from attnkit.masks import sliding_window
>>> from attnkit.testing import check_variant
>>> report = check_variant(None, sliding_window(20), examples=2)
>>> report.ok, report.cases
(True, 2)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from attnkit.testing.case import LAYOUTS, Case
from attnkit.testing.examine import check_case
from attnkit.testing.limits import Limits
from attnkit.testing.load import load, load_object
from attnkit.testing.report import CheckError, Report, Row

if TYPE_CHECKING:
    from attnkit.testing.check import check_variant
    from attnkit.testing.compositions import library_masks, library_mods, masks, variants
    from attnkit.testing.expressions import mask_mods, score_mods
    from attnkit.testing.sizes import cases, dtypes, layouts, lengths

__all__ = [
    "LAYOUTS",
    "Case",
    "CheckError",
    "Limits",
    "Report",
    "Row",
    "cases",
    "check_case",
    "check_variant",
    "dtypes",
    "layouts",
    "lengths",
    "library_masks",
    "library_mods",
    "load",
    "load_object",
    "mask_mods",
    "masks",
    "score_mods",
    "variants",
]

# These names need hypothesis, an optional package. `check_case`, which reproduces a failure, does
# not need it.
_WITH_HYPOTHESIS = {
    **dict.fromkeys(("cases", "dtypes", "layouts", "lengths"), "sizes"),
    "check_variant": "check",
    **dict.fromkeys(("mask_mods", "score_mods"), "expressions"),
    **dict.fromkeys(("library_masks", "library_mods", "masks", "variants"), "compositions"),
}


def __getattr__(name: str) -> object:
    """Import a name of `_WITH_HYPOTHESIS` at its first access and return its value."""
    if name not in _WITH_HYPOTHESIS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module("attnkit.testing._require")
    value = getattr(importlib.import_module(f"{__name__}.{_WITH_HYPOTHESIS[name]}"), name)
    globals()[name] = value
    return value
