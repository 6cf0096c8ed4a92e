"""Check that a call with cached kernels does not import the DSL, which takes 0.3 s."""

from __future__ import annotations

import subprocess
import sys

import pytest

PREPARED = """
import sys
import torch
from attnkit import masks, mods
from attnkit.splice import (
    BackwardInputs, Captured, ForwardInputs, KernelCall, Program, backward, forward, workers,
)
from attnkit.schedule.targets import ORDERED, SM90, SM100
from attnkit.tracing.tracer import trace
from attnkit.schedule.work_list import full_runs

target = {"sm90": SM90, "sm100": SM100}[sys.argv[1]]
class Refused:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] != "cutlass", "the DSL is imported"
sys.meta_path.insert(0, Refused())

workers.sm_count = lambda device: 132
slopes = torch.rand(4)
alibi = lambda score, b, h, q, kv: score - slopes[h] * (q - kv)
cpu, length = torch.device("cpu"), 512
causal = trace(lambda b, h, q, kv: q >= kv, "mask", cpu)
for dim in (64, 128, 256):
    for own in (None, alibi, mods.softcap(20.0)):
        for kv_heads in (4, 2):
            score = None if own is None else trace(own, "score", cpu)
            program = Program(None if own is None else score.root, causal.root)
            captured = Captured((), ()) if score is None else Captured(score.tensors, ())
            query, out = (torch.zeros(1, 4, length, dim, dtype=torch.bfloat16) for _ in range(2))
            key, value = torch.zeros(2, 1, kv_heads, length, dim, dtype=torch.bfloat16)
            runs, lse = full_runs(length, length, (128, 128), cpu), torch.zeros(1, 4, length)
            forward.prepare(
                KernelCall(target.name, program, runs),
                ForwardInputs(query, key, value, captured, 1.0),
            )
            if backward.backward_template(target).widths((dim, dim)) is None:
                continue
            for deterministic in (False, True):
                for learned in (False, True)[: 1 + len(captured[0])]:
                    name = target.name + (ORDERED if deterministic else "")
                    inputs = BackwardInputs(
                        query, key, value, out, lse, out, None,
                        captured, [learned] * len(captured.scores), 1.0,
                    )
                    backward.prepare(KernelCall(name, program, runs), inputs)
assert not [name for name in sys.modules if name.partition(".")[0] == "cutlass"]
print("prepared")
"""


@pytest.mark.parametrize("target", ["sm90", "sm100"])
def test_what_is_cached_needs_no_dsl(target: str) -> None:
    command = [sys.executable, "-c", PREPARED, target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "prepared", done.stderr
