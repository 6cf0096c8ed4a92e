"""Run generated Python source and remember the source of the object that it returns."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from attnkit.testing.source import Source, remember

IMPORTS = "import torch\nfrom attnkit import masks, mods\n"


def run_drawn(what: str, tables: Sequence[str], seed: int, lines: Sequence[str]) -> Any:
    """Wrap lines of source in a function, run the function and return its result.

    Args:
        what: first part of the function's name.
        tables: lines that define captured tensors with the torch generator `random`.
        seed: seed of that generator.
        lines: the other lines; the last one is a return statement.

    Returns:
        The function's result. `source.remembered` returns the source of this object.
    """
    seeded = [f"random = torch.Generator().manual_seed({seed})"] if tables else []
    inner = "\n".join(f"    {line}" for line in [*seeded, *tables, *lines])
    name = f"{what}_{hashlib.sha256(inner.encode()).hexdigest()[:6]}"
    text = f"{IMPORTS}\n\ndef make_{name}():\n{inner}\n\n\n{name} = make_{name}()"
    scope: dict[str, Any] = {"__name__": "attnkit.testing.drawn"}
    exec(compile(text, f"<{name}>", "exec"), scope)
    return remember(scope[name], Source(name, text))
