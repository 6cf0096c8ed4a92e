"""Provide hypothesis strategies for library masks and mods, mask combinations and variants."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from attnkit.runtime.variant import Variant
from attnkit.testing.drawn_source import run_drawn
from attnkit.testing.expressions import mask_mods, score_mods
from attnkit.testing.limits import ANY_SIZE, Limits, check_limits
from attnkit.tracing.mask import Mask

# (call, source of the captured tensor `t` that the call reads). N is the largest length, B the
# batch size and H the number of heads; n and m are random numbers.
Calls = Sequence[tuple[str, str]]

_MASKS: Calls = (
    ("causal()", ""),
    ("sliding_window({n})", ""),
    ("sliding_window({n}, {m})", ""),
    ("sliding_window(None, {m})", ""),
    ("prefix({n})", ""),
    ("prefix_lm({n})", ""),
    ("block_diagonal({n} + 1)", ""),
    ("strided({n} + 1)", ""),
    ("dilated({n}, {m} + 1)", ""),
    ("streaming_llm({n}, {m})", ""),
    ("longformer({n}, {m})", ""),
    ("document(t)", "torch.randint(0, 4, ({N},), generator=random)"),
    ("document(t)", "torch.randint(0, 4, ({B}, {N}), generator=random).sort(-1).values"),
    ("padding(t)", "torch.randint(0, {N}, ({B},), generator=random)"),
    ("prefix_lm(t)", "torch.randint(0, {N}, ({B},), generator=random)"),
    ("longformer({m}, t)", "torch.rand({N}, generator=random) < 0.1"),
)

_MODS: Calls = (
    ("softcap({n} / 10 + 1)", ""),
    ("alibi({H})", ""),
    ("alibi({H}, symmetric=True)", ""),
    ("log_sigmoid(-{m} / 4)", ""),
    ("log_length({n} + 2)", ""),
    ("alibi(t)", "torch.rand({H}, generator=random, requires_grad=True)"),
    ("head_scale(t)", "torch.randn({H}, generator=random, requires_grad=True)"),
    ("head_gate(t)", "torch.randn({H}, generator=random, requires_grad=True)"),
    ("distance_decay(t)", "torch.rand({H}, generator=random, requires_grad=True)"),
    ("relative_bias(t)", "torch.randn({H}, 2 * {N} - 1, generator=random, requires_grad=True)"),
    ("full_bias(t)", "torch.randn({H}, {N}, {N}, generator=random, requires_grad=True)"),
)


# Tables have the largest batch size and head count. attnkit refuses a declared table for smaller
# sizes, so these lines hide the declaration.
_UNDECLARED = {
    "mods": "return {}.function",
    "masks": (
        "from attnkit import Mask\n"
        "drawn = {}\n"
        "return Mask(lambda b, h, q, kv: drawn(b, h, q, kv), repr(drawn))"
    ),
}


def _library(draw: st.DrawFn, name: str, calls: Calls, limits: Limits) -> Any:
    """Draw a call of `attnkit.<name>` from `calls`, run it, and return the mask or mod."""
    check_limits(limits)
    call, table = draw(st.sampled_from(calls))
    holes = {
        "N": max(limits.q_len[1], limits.kv_len[1]),
        "B": limits.batch[1],
        "H": limits.heads[1],
        "n": draw(st.integers(0, 70)),
        "m": draw(st.integers(0, 20)),
    }
    tables = [f"t = {table.format(**holes)}"] if table else []
    seed = draw(st.integers(0, 99)) if table else 0
    made = f"{name}.{call.format(**holes)}"
    lines = [f"return {made}"]
    if "{H}" in call + table or "{B}" in call + table:
        lines = _UNDECLARED[name].format(made).splitlines()
    return run_drawn(f"{name}_drawn", tables, seed, lines)


@st.composite
def library_masks(draw: st.DrawFn, limits: Limits = ANY_SIZE) -> Mask:
    """Draw masks of `attnkit.masks` with random arguments.

    Args:
        limits: sizes of the calls that the mask must support.
    """
    mask: Mask = _library(draw, "masks", _MASKS, limits)
    return mask


@st.composite
def library_mods(draw: st.DrawFn, limits: Limits = ANY_SIZE) -> Callable[..., Any]:
    """Draw mods of `attnkit.mods` with random arguments; learned tensors require grad.

    Args:
        limits: sizes of the calls that the mod must support.
    """
    mod: Callable[..., Any] = _library(draw, "mods", _MODS, limits)
    return mod


def masks(limits: Limits = ANY_SIZE) -> st.SearchStrategy[Mask]:
    """Draw combinations of library masks and random masks with `&`, `|`, `^` and `~`.

    Args:
        limits: sizes of the calls that the mask must support.
    """
    leaves = library_masks(limits) | mask_mods(limits, depth=2).map(Mask)

    def combined(parts: st.SearchStrategy[Mask]) -> st.SearchStrategy[Mask]:
        sign = st.sampled_from([operator.and_, operator.or_, operator.xor])
        pairs = st.builds(lambda how, a, b: how(a, b), sign, parts, parts)
        return pairs | st.builds(operator.invert, parts)

    return st.recursive(leaves, combined, max_leaves=3)


def variants(limits: Limits = ANY_SIZE) -> st.SearchStrategy[Variant]:
    """Draw variants with a library mod, a random score_mod or none, and with a mask or none.

    Args:
        limits: sizes of the calls that the variant must support.
    """
    score_mod = st.none() | library_mods(limits) | score_mods(limits)
    return st.builds(Variant, score_mod, st.none() | masks(limits))
