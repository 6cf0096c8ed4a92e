"""Find Python source that recreates the functions and masks of a variant."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import textwrap
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, TypeVar

from attnkit import masks
from attnkit.errors import AttnkitError
from attnkit.sparsity.block_mask import BlockMask
from attnkit.testing import target_expressions
from attnkit.tracing.mask import Mask

T = TypeVar("T")

_MOST = 4096
# id of an object -> (the object, the source that created it).
_sources: OrderedDict[int, tuple[object, Source]] = OrderedDict()


@dataclass(frozen=True)
class Source:
    """Holds Python source that defines an object.

    Attributes:
        name: expression for the object, valid after `text`.
        text: statements to run first.
    """

    name: str
    text: str = ""


def remember(x: T, source: Source) -> T:
    """Store the source that created the object `x` and return `x`; only recent objects are kept."""
    _sources[id(x)] = (x, source)
    _sources.move_to_end(id(x))
    if len(_sources) > _MOST:
        _sources.popitem(last=False)
    return x


def source_of(x: Any, what: str) -> Source:
    """Return Python source that recreates a function or mask.

    Args:
        x: the function or mask.
        what: name to use in the source if the object cannot be imported.

    Returns:
        The source. If an object cannot be imported, the source shows its definition in a comment
        and raises an error.
    """
    if isinstance(x, BlockMask):
        return remembered(x) or _block_mask(x, what)
    if isinstance(x, Mask) and x.op:
        return remembered(x) or _joined(x, what)
    if isinstance(x, Mask):
        inner = remembered(x.function) or _imported(x.function)
        wrapped = inner and Source(f"Mask({inner.name})", f"from attnkit import Mask\n{inner.text}")
        return remembered(x) or wrapped or _labelled(x) or _unknown(x.function, what)
    return remembered(x) or _imported(x) or _unknown(x, what)


def remembered(x: Any) -> Source | None:
    """Return the source that `remember` stored for the object `x`, or None."""
    entry = _sources.get(id(x))
    return entry[1] if entry is not None and entry[0] is x else None


def _block_mask(x: BlockMask, what: str) -> Source:
    inner = source_of(x.mask_mod, what)
    sizes = ", ".join(str(n) for n in x.shape)
    device = f"device={str(x.device)!r}, BLOCK_SIZE={x.BLOCK_SIZE}"
    text = f"from attnkit import create_block_mask\n{inner.text}"
    return Source(f"create_block_mask({inner.name}, {sizes}, {device})", text)


def _joined(mask: Mask, what: str) -> Source:
    """Return source of a mask that combines other masks with `&`, `|`, `^` or `~`."""
    parts = [source_of(part, f"{what}_{i}") for i, part in enumerate(mask.parts)]
    shown = [
        f"({p.name})" if part.op else p.name for p, part in zip(parts, mask.parts, strict=True)
    ]
    sign = {"and": " & ", "or": " | ", "xor": " ^ "}.get(mask.op)
    text = "\n".join(dict.fromkeys(p.text for p in parts if p.text))
    return Source(f"~{shown[0]}" if sign is None else sign.join(shown), text)


def _imported(x: Any) -> Source | None:
    """Return source that imports `x` by name from its module or file; None if not possible."""
    module = sys.modules.get(getattr(x, "__module__", None) or "")
    name = getattr(x, "__qualname__", "")
    if module is None or not name.isidentifier() or getattr(module, name, None) is not x:
        return None
    file = getattr(module, "__file__", None)
    try:
        spec = importlib.util.find_spec(module.__name__)
    except (ImportError, ValueError):  # __main__ has no spec
        spec = None
    if spec is not None and spec.origin == file:
        return Source(name, f"from {module.__name__} import {name}")
    if file is None:
        return None
    loading = f"from attnkit.testing import load_object\n{name} = load_object({f'{file}:{name}'!r})"
    return Source(name, loading)


def _labelled(x: Mask) -> Source | None:
    """Return source of a library mask, whose label is the call that creates it; else None."""
    try:
        evaluated = target_expressions.evaluate(x.label, vars(masks), "a label")
    except AttnkitError:
        return None
    if not isinstance(evaluated, Mask) or evaluated.label != x.label:
        return None
    return Source(f"masks.{x.label}", "from attnkit import masks")


def _unknown(x: Any, what: str) -> Source:
    """Return source that shows the definition of `x` in a comment and raises an error."""
    try:
        body = textwrap.dedent(inspect.getsource(x))
    except (OSError, TypeError):
        body = repr(x)
    message = f"put the definition of {what} here: it cannot be imported"
    shown = textwrap.indent(body.strip(), "#   ")
    return Source(what, f"# {what} is\n{shown}\nraise NotImplementedError({message!r})")
