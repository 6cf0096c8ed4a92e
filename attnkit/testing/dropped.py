"""Compute which elements dropout keeps, one by one, from the definition that the docs publish.

It shares no code with the backends: here each element computes its own random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators within the context, and restore them after it."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def survivor_factors(
    dropout_p: float, seed: int, shape: tuple[int, int, int, int], device: torch.device
) -> Tensor:
    """Return the factor of each element of the softmax: 0, or 1 / (probability of keeping it).

    Args:
        dropout_p: the probability of dropping one, before it is rounded to a multiple of 1 / 256.
        seed: seed of torch's generator before the call draws from it.
        shape: [B, Hq, Sq, Skv].
        device: device of the query.

    Returns:
        float64 of this shape.
    """
    threshold = int(dropout_p * 256 + 0.5)
    low = threshold << 55
    with seeded(seed, device):
        state = torch.randint(low, min(low + 2**55, 2**63 - 1), (2,), device=device)
    words = (int(x) for x in state)
    random, offset = next(words), next(words)
    b, h, q, kv = (
        torch.arange(n, device=device).view([-1 if i == axis else 1 for i in range(4)])
        for axis, n in enumerate(shape)
    )
    counter = [q & ~9, kv & ~9, b * shape[1] + h, torch.full_like(b, offset & _LOW)]
    key = [random & _LOW, random >> 32]
    for _ in range(7):  # Philox-4x32
        high, lower = zip(
            *(_product(x, m) for x, m in ((counter[0], 0xD2511F53), (counter[2], 0xCD9E8D57))),
            strict=True,
        )
        counter = [high[1] ^ counter[1] ^ key[0], lower[1], high[0] ^ counter[3] ^ key[1], lower[0]]
        key = [(k + w) & _LOW for k, w in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)]
    chosen = (q & 1) + 2 * (kv & 1)
    byte_of = (q >> 3 & 1) + 2 * (kv >> 3 & 1)
    word = torch.zeros(shape, dtype=torch.int64, device=device)
    for i, x in enumerate(counter):
        word = torch.where(chosen == i, x, word)
    kept = (word >> 8 * byte_of & 255) >= threshold
    return kept.double() * (256 / (256 - threshold))


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower word of a product of 32-bit words, by two halves of 16 bits."""
    low, high = (x & 0xFFFF) * factor, (x >> 16) * factor
    total = (high & 0xFFFF_FFFF_FFFF) + (low >> 16)
    return total >> 16, (total & 0xFFFF) << 16 | low & 0xFFFF
