"""Offer attnkit as the inner attention of torchtitan's models, in the place of its `FlexAttention`.

`FlexAttention` is a subclass of torchtitan's module of that name, with its configuration and call
form. `SelectiveAC` is torchtitan's selective activation checkpointing, which saves the outputs of
attnkit too.

In: the tensors, masks and score_mods of torchtitan's modules. Out: calls of
`attnkit.flex.flex_attention`. torchtitan is imported when one of the two names is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from attnkit.errors import UnsupportedError

if TYPE_CHECKING:
    from attnkit.integrations.torchtitan.attention import FlexAttention
    from attnkit.integrations.torchtitan.checkpointing import SelectiveAC

__all__ = ["FlexAttention", "SelectiveAC"]

_MODULES = {"FlexAttention": "attention", "SelectiveAC": "checkpointing"}


def __getattr__(name: str) -> Any:
    """Import torchtitan and return a class.

    Raises:
        UnsupportedError: torchtitan cannot be imported.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except ImportError as error:
        raise UnsupportedError(
            f"attnkit.integrations.torchtitan needs torchtitan 0.3, which cannot be imported ({error})"
        ) from error
    return getattr(module, name)
