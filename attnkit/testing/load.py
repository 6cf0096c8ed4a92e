"""Load a variant by name, as in `load("file.py:name")` or `load("masks:sliding_window(64)")`."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from attnkit import masks, mods
from attnkit.errors import ArgumentError, AttnkitError
from attnkit.runtime.variant import Variant
from attnkit.sparsity.block_mask import BlockMask
from attnkit.testing import target_expressions
from attnkit.testing.source import Source, remember
from attnkit.tracing.mask import Mask
from attnkit.util.arguments import check_type

_KINDS = (
    "a Variant, a Mask, a BlockMask, a score_mod(score, b, h, q, kv), a mask_mod(b, h, q, kv), or "
    "a function without arguments that gives one of these"
)


def load(target: str, mask: str | None = None) -> Variant:
    """Load the variant that the string `target` names.

    Args:
        target: "path/to/file.py:name", "masks:name" or "mods:name". The name may be an attribute
            ("make.causal"), a call with literal arguments ("sliding_window(64)") or a combination
            of masks ("causal() & sliding_window(64)"). Its value must be a `Variant`, a `Mask`, a
            `BlockMask`, a score_mod, a mask_mod, or a function without required arguments that
            returns one of these.
        mask: target of a mask to add to the variant, if `target` has no mask.

    Raises:
        ArgumentError: the file or name does not exist, running the file fails, the value has
            another type, or both `target` and `mask` give a mask.

    >>> print(load("masks:causal() & sliding_window(64)"))
    mask(b, h, q, kv) = (kv <= q) & ((q - kv <= 64) & (kv - q <= 0))
    """
    variant = as_variant(load_object(target), target)
    targets = repr(target)
    if mask is not None:
        variant = _with_mask(variant, target, mask)
        targets = f"{target!r}, {mask!r}"
    text = f"from attnkit.testing import load\nvariant = load({targets})"
    return remember(variant, Source("variant", text))


def _with_mask(variant: Variant, target: str, mask: str) -> Variant:
    """Return `variant` with the mask that the target `mask` names; raise if it has a mask."""
    if variant.mask is not None:
        raise ArgumentError(
            f"{target} has a mask already, and the mask {mask!r} came too; join them in one "
            "target, as in 'masks:causal() & sliding_window(64)'"
        )
    other = as_variant(load_object(mask), mask)
    if other.score_mod is not None or other.mask is None:
        raise ArgumentError(f"{mask} is not a mask: it changes scores; expected a mask")
    return Variant(variant.score_mod, other.mask)


def load_object(target: str) -> Any:
    """Load the object that the string `target` names; it may have any type.

    Raises:
        ArgumentError: as documented for `load`.
    """
    value = _evaluated(target)
    name = f"loaded_{hashlib.sha256(target.encode()).hexdigest()[:6]}"
    text = f"from attnkit.testing import load_object\n{name} = load_object({target!r})"
    return remember(value, Source(name, text))


def _evaluated(target: str) -> Any:
    check_type("target", target, str, "a string such as 'file.py:name' or 'masks:causal()'")
    path, colon, name = target.partition(":")
    if path in ("masks", "mods"):
        library: ModuleType = masks if path == "masks" else mods
        public = [n for n in library.__all__ if n.islower() and n != "examples"]
        scope = {n: getattr(library, n) for n in public}
        return target_expressions.evaluate(name, scope, f"attnkit.{path}", factories=True)
    at = target.find(".py:")
    if at < 0:
        hint = "" if colon else "; the name is missing"
        raise ArgumentError(
            f"{target!r} is not a target{hint}; expected path/to/file.py:name, masks:name(...) or "
            "mods:name(...)"
        )
    file, name = Path(target[: at + 3]), target[at + 4 :]
    return target_expressions.evaluate(name, vars(_module(file)), str(file))


def _module(file: Path) -> ModuleType:
    if not file.is_file():
        raise ArgumentError(f"there is no file {str(file)!r}")
    module_name = f"attnkit_target_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file.resolve())
    if spec is None or spec.loader is None:
        raise ArgumentError(f"{str(file)!r} cannot be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(
        0, str(file.resolve().parent)
    )  # so that the file can import modules of its folder, as with `python file.py`
    try:
        spec.loader.exec_module(module)
    except AttnkitError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ArgumentError(
            f"{file} raised {type(error).__name__} when it was run: {error} "
            f"({last.filename}, line {last.lineno})"
        ) from error
    finally:
        sys.path.remove(str(file.resolve().parent))
    return module


def as_variant(x: Any, target: str) -> Variant:
    """Convert an object of any type that `load` accepts to a `Variant`.

    Args:
        x: the object, see `load`.
        target: name of the object, for error messages.

    Raises:
        ArgumentError: the object has another type.
    """
    if isinstance(x, Variant):
        return x
    if isinstance(x, Mask | BlockMask) or hasattr(x, "kv_num_blocks"):
        return Variant(None, x)
    if isinstance(x, type) or not callable(x):
        raise ArgumentError(f"{target} is {_kind(x)}; expected {_KINDS}")
    try:
        parameters = inspect.signature(x).parameters.values()
    except (TypeError, ValueError):
        raise ArgumentError(f"{target} has no signature; expected {_KINDS}") from None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.default is p.empty and p.kind in positional]
    if len(required) == 5:
        return Variant(x, None)
    if len(required) == 4:
        return Variant(None, x)
    if required:
        raise ArgumentError(
            f"{target} takes {len(required)} arguments, {inspect.signature(x)}; expected {_KINDS}. "
            f"Arguments are given as in '{target}(64)'"
        )
    result = target_expressions.guarded(x, f"{target}()")
    if inspect.isroutine(result) and result is x:
        raise ArgumentError(f"{target} gives itself; expected {_KINDS}")
    return as_variant(result, f"{target}()")


def _kind(x: Any) -> str:
    if isinstance(x, type):
        return f"the class {x.__name__}"
    return f"of type {type(x).__name__}" + (f": {x}" if isinstance(x, int | float | str) else "")
