"""Score mods of the distance stay expressions of q - kv, where sequences start alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import attnkit
from attnkit import mods
from attnkit.integrations.flash_attn import flash_attn_varlen_func
from attnkit.integrations.packed import packing
from attnkit.integrations.packed.positions import takes_token_positions
from attnkit.integrations.torch_attention import varlen_attn
from tests.integrations import packed_reference
from tests.integrations.flash_attn.test_packed import compare, draw_tensors, offsets

LONGEST, HEADS = 12, 4
CPU = torch.device("cpu")
SHORT = torch.randn(2 * LONGEST + 1)  # distances within a sequence
LONG = torch.randn(2001)
PER_SEQUENCE = torch.randn(9)

# (score_mod, whether it may read the positions of tokens)
MODS: dict[str, tuple[Any, bool]] = {
    "softcap": (mods.softcap(2.0), True),
    "head_scale": (lambda s, b, h, q, kv: s * (h + 1), True),
    "alibi": (mods.alibi(HEADS), True),
    "symmetric alibi": (mods.alibi(torch.rand(HEADS), symmetric=True), True),
    "t5": (mods.t5_bias(torch.randn(HEADS, 32)), True),
    "kerple": (mods.kerple(torch.rand(HEADS), torch.rand(HEADS)), True),
    "long table": (lambda s, b, h, q, kv: s + LONG[q - kv + 1000], True),
    "clamped": (lambda s, b, h, q, kv: s * SHORT[(kv - q).clamp(-3, 3) + 3], True),
    "parity": (lambda s, b, h, q, kv: torch.where((q - kv) % 2 == 0, s, 0.5 * s), True),
    "product with the score": (lambda s, b, h, q, kv: s * 0.1 * (q - kv), True),
    "composed": (mods.compose(mods.softcap(2.0), mods.alibi(HEADS)), True),
    # the distance of two tokens of different sequences is outside of the table
    "short table": (lambda s, b, h, q, kv: s + SHORT[q - kv + LONGEST], False),
    "sum": (lambda s, b, h, q, kv: s + 0.01 * (q + kv), False),
    "query": (lambda s, b, h, q, kv: s * (1 + 0.1 * q), False),
    "twice": (lambda s, b, h, q, kv: s + 0.01 * (2 * q - kv), False),
    "floats": (lambda s, b, h, q, kv: s + (0.1 * q - 0.1 * kv), False),
    "sequence": (lambda s, b, h, q, kv: s + PER_SEQUENCE[b] * (q - kv), False),
}


def ask(mod: Any, starts_agree: bool = True) -> bool:
    return takes_token_positions(
        mod, starts_agree=starts_agree, lengths=(60, 60), heads=HEADS, device=CPU
    )


@pytest.mark.parametrize("name", MODS)
def test_which_mods_take_token_positions(name: str) -> None:
    mod, expected = MODS[name]
    assert ask(mod) is expected
    assert ask(mod, starts_agree=False) is (name in ("softcap", "head_scale"))


@given(
    name=st.sampled_from(sorted(MODS)),
    lengths=st.lists(st.integers(0, LONGEST), min_size=1, max_size=5),
    one_tensor=st.booleans(),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equal_lengths(
    name: str, lengths: list[int], one_tensor: bool, causal: bool, seed: int
) -> None:
    cu_q = offsets(lengths)
    cu_k = cu_q if one_tensor else offsets(lengths)
    mod = MODS[name][0]
    tensors = draw_tensors(seed, int(cu_q[-1]), int(cu_k[-1]))[:3]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_varlen_func(
            *(q, k, v, cu_q, cu_k, LONGEST, LONGEST),
            causal=causal,
            score_mod=mod,
            return_softmax_lse=True,
        )

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Any:
        ends = cu_q.tolist(), cu_k.tolist()
        return packed_reference.attend(
            q, k, v, *ends, window=(-1, 0 if causal else -1), score_mod=mod
        )

    compare(run, reference, tensors)


def test_used_keys_move_the_places_of_queries() -> None:
    """As many used keys as queries are no equal starts, and equal starts are no equal places."""
    q, k, v, _ = draw_tensors(0, 6, 10, kv_heads=4)
    mod = mods.alibi(4, symmetric=True)
    for q_lengths, k_lengths, used in (([3, 3], [5, 5], [3, 3]), ([3, 3], [3, 3], [2, 1])):
        cu_q, cu_k = offsets(q_lengths), offsets(k_lengths)
        total = int(cu_k[-1])
        out = varlen_attn(
            *(q, k[:total], v[:total], cu_q, cu_k, 5, 5),
            seqused_k=torch.tensor(used, dtype=torch.int32),
            score_mod=mod,
        )
        rows = [int(cu_k[n]) + i for n in range(2) for i in range(used[n])]
        ends = cu_q.tolist(), offsets(used).tolist()
        exact, _ = packed_reference.attend(q, k[rows], v[rows], *ends, score_mod=mod)
        torch.testing.assert_close(out, exact)


def test_a_mod_that_changes_is_asked_again() -> None:
    """A number that the mod captures decides what it reads."""
    factors = [1]
    mod = lambda s, b, h, q, kv: s + 0.1 * (factors[0] * q - kv)
    cu = offsets([5, 7])
    q, k, v, _ = draw_tensors(0, 12, 12, kv_heads=4)
    for factors[0] in (1, 2, 1, 0):
        out = flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, score_mod=mod)
        exact, _ = packed_reference.attend(q, k, v, cu.tolist(), cu.tolist(), score_mod=mod)
        torch.testing.assert_close(out, exact)


def test_the_mod_itself_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """No table of positions is made for it, and attnkit sees the caller's own function."""
    attnkit.clear_caches()
    monkeypatch.delattr(packing.Packing, "columns")
    cu = offsets([5, 7])
    q, k, v, _ = draw_tensors(0, 12, 12, kv_heads=4)
    flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, score_mod=mods.alibi(4), softcap=3.0)
    with pytest.raises(AttributeError, match="columns"):
        flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, score_mod=MODS["sum"][0])
