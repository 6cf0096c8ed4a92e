"""Hypothesis strategies for masks of the library, compositions of masks, and whole variants."""

from __future__ import annotations

import operator

from hypothesis import strategies as st

from attnkit import masks as library
from attnkit.mask import Mask
from attnkit.testing.expressions import mask_mods, score_mods
from attnkit.testing.limits import ANY_SIZE, Limits
from attnkit.testing.names import evaluate
from attnkit.testing.source import Source, remember
from attnkit.variant import Variant

_CALLS = (
    "causal()",
    "sliding_window({n})",
    "sliding_window({n}, {m})",
    "sliding_window(None, {m})",
    "prefix({n})",
    "prefix_lm({n})",
    "block_diagonal({n} + 1)",
    "strided({n} + 1)",
    "dilated({n}, {m} + 1)",
    "streaming_llm({n}, {m})",
    "longformer({n}, {m})",
)


@st.composite
def library_masks(draw: st.DrawFn) -> Mask:
    """Masks of `attnkit.masks` with drawn arguments."""
    call = draw(st.sampled_from(_CALLS))
    n, m = draw(st.integers(0, 70)), draw(st.integers(0, 20))
    call = call.replace("{n} + 1", str(n + 1)).replace("{m} + 1", str(m + 1)).format(n=n, m=m)
    made: Mask = evaluate(call, vars(library), "attnkit.masks")
    return remember(made, Source(f"masks.{call}", "from attnkit import masks"))


def masks(limits: Limits = ANY_SIZE) -> st.SearchStrategy[Mask]:
    """Masks of the library and random expressions, combined with `&`, `|`, `^` and `~`.

    Args:
        limits: the largest sizes that the mask must serve.
    """
    leaves = library_masks() | mask_mods(limits, depth=2).map(Mask)

    def combined(parts: st.SearchStrategy[Mask]) -> st.SearchStrategy[Mask]:
        sign = st.sampled_from([operator.and_, operator.or_, operator.xor])
        pairs = st.builds(lambda how, a, b: how(a, b), sign, parts, parts)
        return pairs | st.builds(operator.invert, parts)

    return st.recursive(leaves, combined, max_leaves=3)


def variants(limits: Limits = ANY_SIZE) -> st.SearchStrategy[Variant]:
    """A random score_mod or none, with a random mask or none.

    Args:
        limits: the largest sizes that the variant must serve.
    """
    score_mod = st.none() | score_mods(limits)
    mask = st.none() | masks(limits)
    return st.builds(Variant, score_mod, mask)
