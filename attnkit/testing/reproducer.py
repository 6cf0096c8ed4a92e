"""Write a program that repeats a failed case."""

from __future__ import annotations

import torch

from attnkit.runtime.variant import Variant
from attnkit.testing.case import Case
from attnkit.testing.source import Source, remembered, source_of


def program(variant: Variant, case: Case, device: torch.device, code: str = "") -> str:
    """Write Python source that checks a variant for a case.

    Args:
        variant: what to check.
        case: sizes, dtype, strides and seed.
        device: where to run.
        code: source that defines `variant`; if empty, the result of `definition(variant)`.
    """
    where = "" if device.type == "cpu" else f", device={str(device)!r}"
    return "\n".join(
        [
            "import torch",
            "from attnkit import Variant",
            "from attnkit.testing import Case, check_case",
            "",
            code or definition(variant),
            f"case = {case.code()}",
            f"query, key, value = case.inputs({where.removeprefix(', ')})  # what the check uses",
            f"print(check_case(variant, case{where}))",
        ]
    )


def definition(variant: Variant) -> str:
    """Write Python source that defines `variant`."""
    known = remembered(variant)
    if known is not None:
        return known.text
    parts = [
        Source("None") if x is None else source_of(x, what)
        for x, what in ((variant.score_mod, "score_mod"), (variant.mask, "mask"))
    ]
    text = "\n".join(dict.fromkeys(p.text for p in parts if p.text))
    return f"{text}\nvariant = Variant({parts[0].name}, {parts[1].name})".strip()
