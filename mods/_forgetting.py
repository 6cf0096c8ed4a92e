"""Build the forgetting gate: a bias that decays by the gates between a key and a query."""

from __future__ import annotations

from torch import Tensor

from attnkit import Axes, ScoreMod, picklable
from attnkit.mods._check import shape_text, table


@picklable
def forgetting_gate(sums: Tensor) -> ScoreMod:
    """Build a score_mod that adds `sums[b, h, q] - sums[b, h, kv]` to the score.

    With sums of log gates up to each position, this is the logarithm of the product of the gates
    after the key, up to the query: `sums = torch.nn.functional.logsigmoid(gates).cumsum(-1)`. Use
    it with a causal mask. Keep the sums in float32, as they grow with the length.

    Args:
        sums: float [H, S] or [B, H, S], may be learned; S is at least both lengths.

    Returns:
        The score_mod.

    Raises:
        ArgumentError, ShapeError, DTypeError: `sums` is not a float tensor of that shape.

    Source: Lin et al. 2025 (Forgetting Transformer), arXiv:2503.02130.

    >>> import torch
    >>> gates = torch.tensor([[0.5, 0.5, 0.25]])
    >>> mod = forgetting_gate(gates.log().cumsum(-1))
    >>> mod(torch.zeros(3), 0, torch.tensor(0), 2, torch.arange(3)).exp()
    tensor([0.1250, 0.2500, 1.0000])
    """
    rank = table("sums", sums, "[H, S] or [B, H, S]", (2, 3)).ndim

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if rank == 3:
            return score + sums[b, h, q] - sums[b, h, kv]
        return score + sums[h, q] - sums[h, kv]

    axes = Axes("sums", sums, *("b", "h", "len")[3 - rank :])
    return ScoreMod(score_mod, f"forgetting_gate({shape_text(sums)})", axes=[axes])
