"""Generate the Python program that reproduces a failed case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnkit.runtime.variant import Variant
from attnkit.testing.case import Case
from attnkit.testing.source import Source, remembered, source_of


def program(
    variant: Variant,
    case: Case,
    device: torch.device,
    code: str = "",
    reference: Callable[..., Any] | None = None,
) -> str:
    """Return the source of a Python program that checks a variant for a case.

    Args:
        variant: the variant to check.
        case: sizes, dtype, strides and seed.
        device: where to run.
        code: source that defines `variant`; if empty, the result of `definition(variant)`.
        reference: the user's dense attention to compare too, or None.
    """
    where = "" if device.type == "cpu" else f", device={str(device)!r}"
    theirs = None if reference is None else source_of(reference, "reference")
    also = "" if theirs is None else f", reference={theirs.name}"
    return "\n".join(
        [
            "import torch",
            "from attnkit import Variant",
            "from attnkit.testing import Case, check_case",
            "",
            code or definition(variant),
            *([] if theirs is None or not theirs.text else [theirs.text]),
            f"case = {case.code()}",
            f"query, key, value = case.inputs({where.removeprefix(', ')})  # what the check uses",
            f"print(check_case(variant, case{where}{also}))",
        ]
    )


def definition(variant: Variant) -> str:
    """Return Python source that defines a variable `variant` equal to the argument."""
    known = remembered(variant)
    if known is not None:
        return known.text
    parts = [
        Source("None") if x is None else source_of(x, what)
        for x, what in ((variant.score_mod, "score_mod"), (variant.mask, "mask"))
    ]
    text = "\n".join(dict.fromkeys(p.text for p in parts if p.text))
    return f"{text}\nvariant = Variant({parts[0].name}, {parts[1].name})".strip()
