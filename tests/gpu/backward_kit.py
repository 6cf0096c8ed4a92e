"""Compare gradients of the GPU kernels, on poisoned memory, with dense attention in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit.runtime import reference
from attnkit.runtime.variant import Variant
from attnkit.schedule.targets import SM90
from attnkit.splice import BackwardInputs
from attnkit.splice import backward as splice_backward
from attnkit.splice.backward_call import BackwardCall
from attnkit.splice.replay import Replay
from attnkit.testing import Case
from attnkit.testing.quantities import (
    DenseCall,
    Quantities,
    captured_leaves,
    differentiate,
    oracle,
    run,
)
from attnkit.testing.rounding import SAMPLES, perturbed
from attnkit.testing.shuffled import shuffled
from attnkit.testing.tolerance import compare
from tests.gpu import cute_kit as kit


@contextmanager
def poisoned(*, ordered: bool = False) -> Iterator[None]:
    """Poison memory as `cute_kit.poisoned` does, with deterministic sums only if `ordered`."""
    with kit.poisoned(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: ordered)
        yield


@contextmanager
def counted() -> Iterator[list[bool]]:
    """Yield a list to which each run of the backward kernels appends whether it has semaphores.

    They fix the order of sums.
    """
    seen: list[bool] = []
    plain, again = BackwardCall.__call__, Replay.__call__

    def recorded(call: BackwardCall, inputs: BackwardInputs) -> Any:
        seen.append(call.deterministic)
        return plain(call, inputs)

    def repeated(relaunch: Replay, inputs: Sequence[Tensor]) -> Any:
        found = again(relaunch, inputs)
        seen.extend([] if found is None else [bool(relaunch.copied)])  # semaphores alone are copied
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BackwardCall, "__call__", recorded)
        patch.setattr(Replay, "__call__", repeated)
        yield seen


def gradients(variant: Variant, case: Case, **options: Any) -> Quantities:
    """Return output, LSE and all gradients of the GPU kernels, through output and through LSE."""
    inputs = case.inputs(kit.DEVICE)
    out, lse = variant(
        *inputs,
        scale=case.scale,
        enable_gqa=case.heads != case.kv_heads,
        return_lse=True,
        **{"backend": kit.BACKEND} | options,
    )
    captured = captured_leaves(variant.trace(torch.device(kit.DEVICE))[0])
    return differentiate(case, {"out": out, "lse": lse}, inputs, captured)


def kept_by(variant: Variant, case: Case) -> Tensor | None:
    """Return the dense mask [B, Hq, Sq, Skv], or None if everything is kept."""
    mask = variant.trace(torch.device(kit.DEVICE))[1]
    if mask is None:
        return None
    with torch.no_grad():
        return reference.dense_mask(mask, *case.inputs(kit.DEVICE)[:2]).expand(case.dense_shape)


def wrong(found: Quantities, variant: Variant, case: Case) -> list[str]:
    """Return descriptions of wrong gradients.

    While an error is above its limit, further samples of the dtype's own error are drawn.
    """
    device = torch.device(kit.DEVICE)
    score, kept = variant.trace(device)[0], kept_by(variant, case)
    captured = captured_leaves(score)
    call = DenseCall(variant.score_mod, kept, case, captured, device)
    gold = oracle(call)
    del gold["max_scores"]
    samples = [
        run(variant, case, captured, backend="eager", device=device),
        perturbed(call, 0),
    ]
    for i in range(1, SAMPLES + 2):
        bad = [row for row in compare(found, gold, samples, case, kit.BACKEND) if not row.ok]
        if not bad or i > SAMPLES:
            break
        samples += [sample(call, i) for sample in (shuffled, perturbed)]
    said = [f"{r.quantity}: error {r.error:.3g} at {r.where}, {r.allowed:.3g} allowed" for r in bad]
    return said + _dead(found, gold, kept, case)


def _dead(found: Quantities, gold: Quantities, kept: Tensor | None, case: Case) -> list[str]:
    """Return a message for each nonzero gradient of a fully masked row or key."""
    said = []
    dead = gold["lse"] == -torch.inf
    for through in ("", " through lse"):
        if found[f"dquery{through}"][dead].any():
            said.append(f"dquery{through} is not 0 where a row keeps nothing")
        if kept is None:
            continue
        seen = kept.any(2).unflatten(1, (case.kv_heads, -1)).any(2)
        unseen = ~(seen.any(0, keepdim=True) if case.kv_batch == 1 else seen)
        for name in ("dkey", "dvalue"):
            if found[name + through][unseen].any():
                said.append(f"{name}{through} is not 0 where nobody keeps the key")
    return said


def check(variant: Variant, case: Case, **options: Any) -> Quantities:
    """Check that the backward kernels run for supported head dims and all gradients are exact."""
    ordered = bool(options.get("deterministic"))
    dims = case.head_dim, case.value_dim
    runs = 2 if splice_backward.backward_template(SM90).widths(dims) is not None else 0
    with poisoned(ordered=ordered), counted() as seen:
        found = gradients(variant, case, **options)
    assert seen == [ordered] * runs, (
        f"the backward kernels ran {len(seen)} times: {case}\n{variant}"
    )
    said = wrong(found, variant, case)
    assert not said, "\n".join([str(case), str(variant), *said])
    return found
