"""What each idea of the Hopper forward is worth: `python benchmarks/ablation.py [--save FILE]`.

The kernel of attnkit with one thing changed at a time, all measured in turn: B=2 H=16 S=8192 D=128
bfloat16, causal, 16 causal documents, and causal with ALiBi for staging.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu_machine import describe_gpu
from gpu_timing import MODES, CudaTimer, in_turn
from gpu_variants import documents

from attnkit import cute_stages, masks, mods
from attnkit.expr import arg, const
from attnkit.rewrite import build
from attnkit.schedule import schedule_forward
from attnkit.score_form import LOG2E, ScoreForm, unscaled
from attnkit.splice import forward, sm90
from attnkit.targets import SM90
from attnkit.variant import Variant

LENGTH = 8192


@dataclass(frozen=True)
class Change:
    """One change: settings of the kernel, of the schedule, and whether mods are staged."""

    settings: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    staged: bool = True


CHANGES = {
    "as it is": Change(),
    "no overlap of Q K with P V": Change({"overlap": False}),
    "no ping-pong": Change({"pingpong": False}),
    "each tile by itself": Change({"chain": False}),
    "own maximum, not the last": Change({"softmax": "online"}),
    "own maximum, P packed late": Change({"softmax": "online", "early": False}),
    "masks on every tile": Change({"skip_masks": False}),
    "tiles by turns, no counter": Change({"dynamic": False}),
    "grid order": Change({}, {"order": "grid"}),
    "longest first, not split": Change({}, {"split": False}),
}
STAGING = {"as it is": Change(), "no staging": Change(staged=False)}


def _unstaged(root: Any) -> ScoreForm:
    """A score_mod as it is written, for every element."""
    x = build("mul", unscaled(arg("score") if root is None else root), const(LOG2E))
    return ScoreForm(None, x, None, None, None)


@contextlib.contextmanager
def _changed(change: Change) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        patch = lambda *a: stack.enter_context(mock.patch.object(*a))
        whole = sm90.config_of
        patch(sm90, "config_of", lambda *a: {**whole(*a), **change.settings})
        order = lambda *a, **k: schedule_forward(*a, **{**k, **change.schedule})
        patch(forward, "schedule_forward", order)
        if not change.staged:
            patch(forward, "score_form", _unstaged)
            patch(cute_stages, "level_of", lambda n: "element")
        for known in (forward._source, forward.spliced):
            known.cache_clear()
        forward._lists.clear()
        yield
    for known in (forward._source, forward.spliced):
        known.cache_clear()
    forward._lists.clear()


def _call(change: Change, score_mod: Any, mask: Any, qkv: Any) -> Callable[[], Any]:
    """The kernel of a variant with a change, ready to be called."""
    query, key, _ = qkv
    with _changed(change):
        bound = Variant(score_mod, mask).bind(query, key, (128, 128))
        captured = tuple(list(t.tensors) if t else [] for t in (bound.score, bound.mask))
        options = True, False, SM90, False, forward._sms(query.device)
        call = forward._prepare(bound.program, qkv, captured, bound.runs, query.stride(), *options)
        scale = 1 / math.sqrt(query.shape[-1])
        call(*qkv, captured, scale)
        torch.cuda.synchronize()
    return lambda: call(*qkv, captured, scale)


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mode", choices=MODES, default="burst")
    parser.add_argument("--save", type=Path, help="append the rows to this file")
    parser.add_argument("--commit", help="to record, where the checkout has no git")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda")
    qkv = tuple(
        torch.randn(2, 16, LENGTH, 128, device=device, dtype=torch.bfloat16) for _ in range(3)
    )
    packed = documents(LENGTH, device)
    cases = {
        "causal": (None, masks.causal(), CHANGES),
        "causal, 16 documents": (None, packed, CHANGES),
        "causal + ALiBi": (mods.alibi(16), masks.causal(), STAGING),
    }
    rows = []
    for name, (score_mod, mask, changes) in cases.items():
        calls = {what: _call(change, score_mod, mask, qkv) for what, change in changes.items()}
        found = in_turn(calls, CudaTimer(MODES[options.mode], device), rounds=options.rounds)
        base = found["as it is"].times.median
        print(f"{name}, {options.mode}")
        for what, series in found.items():
            print(f"  {what:30} {series.times.median:8.4f} ms  x {series.times.median / base:.3f}")
            rows.append(
                {
                    **describe_gpu(device, options.commit),
                    "benchmark": "hopper forward ablation",
                    "case": name,
                    "change": what,
                    "mode": options.mode,
                    "ms": series.times.median,
                    "ratio": series.times.median / base,
                }
            )
    if options.save:
        with options.save.open("a") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
