"""Compare a forward of the GPU kernels, on poisoned memory, with dense attention in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from attnkit.runtime import reference
from attnkit.runtime.variant import Variant
from attnkit.testing import Case
from attnkit.testing.quantities import DenseCall, Quantities, captured_leaves, in_dtype
from attnkit.testing.reproducer import definition
from attnkit.testing.rounding import SAMPLES
from attnkit.testing.shuffled import shuffled
from attnkit.testing.tolerance import FACTOR

DEVICE, BACKEND = "cuda", "cute"


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill tensors allocated inside the `with` block with NaN, or with the largest integer."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = before[2]


def forward(variant: Variant, case: Case, **options: Any) -> Quantities:
    """Return output and LSE of the GPU kernel, by name."""
    with torch.no_grad():
        out, lse = variant(
            *case.inputs(DEVICE),
            scale=case.scale,
            enable_gqa=case.heads != case.kv_heads,
            return_lse=True,
            **{"backend": BACKEND} | options,
        )
    return {"out": out, "lse": lse}


@dataclasses.dataclass(frozen=True, eq=False)
class Dense:
    """Hold the reference results of a case.

    Attributes:
        variant: the variant that was computed.
        kept: the dense mask [B, Hq, Sq, Skv], or None if everything is kept.
        gold: output and LSE in float64.
        rough: output and LSE in the case's dtype.
    """

    variant: Variant
    kept: Tensor | None
    gold: Quantities
    rough: Quantities


@torch.no_grad()
def dense(variant: Variant, case: Case) -> Dense:
    """Compute dense attention in float64 and in the case's dtype."""
    score, mask = variant.trace(torch.device(DEVICE))
    inputs = case.inputs(DEVICE)
    kept = None
    if mask is not None:
        kept = reference.dense_mask(mask, *inputs[:2]).expand(case.dense_shape)
    found = []
    for qkv, mod in (
        ([t.double() for t in inputs], score and in_dtype(score, torch.float64)),
        (list(inputs), score),
    ):
        out, lse, *_ = reference.attention(*qkv, mod, scale=case.scale, allowed=kept)
        found.append({"out": out, "lse": lse})
    return Dense(variant, kept, *found)


def dense_row(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Compute output and LSE of one row, with the softmax weights in the inputs' dtype."""
    scores = (query @ key.T).to(torch.promote_types(query.dtype, torch.float32))
    scores = scores * query.shape[-1] ** -0.5
    return (scores.softmax(-1).to(value.dtype) @ value)[0].double(), scores.logsumexp(-1)[0]


def _largest(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


def _typical(t: Tensor) -> float:
    return float(t.square().mean().sqrt()) if t.numel() else 0.0


def _excesses(found: Quantities, gold: Quantities, samples: list[Quantities]) -> list[str]:
    """Return a message for each largest or rms error above twice the dtype's own error.

    If a sample is exact by chance, half a unit in the last place counts as its error.
    """
    said = []
    for name, expected in gold.items():
        alive = expected.isfinite()
        own = found[name].double()[alive]
        half = torch.finfo(found[name].dtype).eps / 2
        for what, size in (("largest", _largest), ("rms", _typical)):
            error = size(own - expected[alive])
            others = [size(s[name].double()[alive] - expected[alive]) for s in samples]
            allowed = FACTOR * max(*others, half * size(expected[alive]))
            if not error <= allowed:
                said.append(f"{what} error of {name}: {error:.3g}, {allowed:.3g} allowed")
    return said


def wrong(found: Quantities, expected: Dense, case: Case) -> list[str]:
    """Return descriptions of wrong results.

    While an error is above its limit, further samples of the dtype's own error are drawn.
    """
    samples = [expected.rough]
    said = _excesses(found, expected.gold, samples)
    for i in range(1, SAMPLES + 1):
        if not said or not found["out"].isfinite().all():
            break
        device, variant = torch.device(DEVICE), expected.variant
        captured = captured_leaves(variant.trace(device)[0])
        call = DenseCall(variant.score_mod, expected.kept, case, captured, device)
        samples.append(shuffled(call, i))
        said = _excesses(found, expected.gold, samples)
    dead = expected.gold["lse"] == -torch.inf
    if not torch.equal(found["lse"] == -torch.inf, dead):
        said.append("LSE is not -inf where, and only where, a row keeps nothing")
    if found["out"][dead].any():
        said.append("output is not 0 where a row keeps nothing")
    return said


def check(variant: Variant, case: Case, **options: Any) -> Quantities:
    """Check that a call is exact and repeatable, and that fully masked rows have LSE -inf."""
    with poisoned():
        found = forward(variant, case, **options)
    again = forward(variant, case, **options)
    said = wrong(found, dense(variant, case), case)
    assert not said, "\n".join([str(case), str(variant), *said])
    query = case.inputs(DEVICE)[0]
    assert found["out"].shape == (*query.shape[:3], case.value_dim)
    for name, t in found.items():
        assert torch.equal(t, again[name]), f"{name} changes from run to run: {case}\n{variant}"
    return found


def on_device(variant: Variant) -> Variant:
    """Rebuild a drawn variant with its captured tensors on the device.

    The source that drawn variants keep is executed again with the device as default.
    """
    text = definition(variant).replace("torch.Generator()", f"torch.Generator({DEVICE!r})")
    scope: dict[str, Any] = {"torch": torch, "Variant": Variant, "__name__": __name__}
    with torch.device(DEVICE):
        exec(compile(text, "<drawn>", "exec"), scope)
    made: Variant = scope["variant"]
    return made


def _negative(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return query.abs(), -key.abs()


def _steep(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return 6 * query, 6 * key


def _grown(key: Tensor) -> Tensor:
    factors = torch.linspace(0.01, 8, key.shape[2], device=key.device, dtype=torch.float64)
    return factors[:, None].to(key.dtype)


# ways in which the running maximum of a row can move along the keys
DATA: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "negative": _negative,  # every score far below zero
    "steep": _steep,  # scores of a few hundred: almost all weight on one key
    "rising": lambda query, key: (query, key * _grown(key)),
    "falling": lambda query, key: (query, key * _grown(key).flip(0)),
    "constant": lambda query, key: (torch.ones_like(query), torch.ones_like(key)),
    "zero": lambda query, key: (torch.zeros_like(query), key),
}


@dataclasses.dataclass(frozen=True)
class Shaped(Case):
    """Case whose scores are of one of the kinds in `DATA`."""

    data: str = "steep"

    def inputs(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().inputs(device)
        with torch.no_grad():
            query, key = DATA[self.data](query, key)
        return query.requires_grad_(), key.requires_grad_(), value
