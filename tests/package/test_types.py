"""Check the types that a user's program gets from attnkit, with mypy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
from typing import assert_type

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput as TorchAuxOutput
from torch.nn.attention.flex_attention import AuxRequest as TorchAuxRequest

import attnkit
from attnkit import AuxOutput, AuxRequest, BlockMask, Mask, Variant, flex, masks
from attnkit.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from attnkit.integrations.torch_attention import varlen_attn

q = k = v = torch.randn(1, 2, 64, 16)
flag = bool(q.sum() > 0)


def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + (i - j)


mask = masks.causal() & masks.sliding_window(8)
assert_type(mask, Mask)
assert_type(attnkit.create_block_mask(mask, None, None, 64, 64), BlockMask)

call = attnkit.flex_attention
assert_type(call(q, k, v), Tensor)
assert_type(call(q, k, v, mod, mask, scale=0.5, enable_gqa=flag, backend="cpu"), Tensor)
assert_type(call(q, k, v, return_lse=False, return_aux=None), Tensor)
assert_type(call(q, k, v, mod, return_lse=True, sink=None), tuple[Tensor, Tensor])
assert_type(call(q, k, v, mod, mask, None, False, True), tuple[Tensor, Tensor])
assert_type(call(q, k, v, return_aux=AuxRequest(lse=True)), tuple[Tensor, AuxOutput])
assert_type(
    call(q, k, v, return_lse=flag), Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]
)

theirs = flex.flex_attention
assert_type(theirs(q, k, v, mod, scale=q.sum()), Tensor)
assert_type(theirs(q, k, v, return_lse=True, deterministic=True), tuple[Tensor, Tensor])
assert_type(theirs(q, k, v, mod, mask, None, False, True), tuple[Tensor, Tensor])
assert_type(theirs(q, k, v, return_aux=TorchAuxRequest(lse=True)), tuple[Tensor, TorchAuxOutput])

variant = Variant(mod, mask)
assert_type(variant(q, k, v, scale=0.5, normalization="softmax1"), Tensor)
assert_type(variant(q, k, v, return_lse=True), tuple[Tensor, Tensor])
assert_type(variant(q, k, v, return_aux=AuxRequest(lse=True)), tuple[Tensor, AuxOutput])

lengths = torch.tensor([0, 64])
assert_type(flash_attn_func(q, k, v, causal=True, mask=mask), Tensor)
assert_type(flash_attn_func(q, k, v, return_softmax_lse=True), tuple[Tensor, Tensor])
assert_type(flash_attn_func(q, k, v, return_attn_probs=True), tuple[Tensor, Tensor, None])
assert_type(
    flash_attn_varlen_func(q, k, v, lengths, lengths, 64, 64, return_softmax_lse=True),
    tuple[Tensor, Tensor],
)
assert_type(varlen_attn(q, k, v, lengths, lengths, 64, 64, scale=0.5), Tensor)
"""

WRONG = """
call(q, k, v, backend=3)
call(q, k, v, bakend="cpu")
variant(q, k, v, return_lse=1)
call(q, k, v, return_lse=True).shape
"""


def mypy(tmp_path: Path, program: str) -> list[str]:
    """Return what mypy says in strict mode about a user's program, a line each."""
    file = tmp_path / "user.py"
    file.write_text(program)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache")]
    command += ["--config-file", str(ROOT / "pyproject.toml"), str(file)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "user.py" in line]


def test_results_have_the_types_that_the_arguments_say(tmp_path: Path) -> None:
    assert mypy(tmp_path, PROGRAM) == []


def test_mistakes_are_found(tmp_path: Path) -> None:
    first = len(PROGRAM.splitlines())
    said = mypy(tmp_path, PROGRAM + WRONG)
    lines = {int(line.split(":")[1]) - first for line in said if ": error:" in line}
    assert lines == {2, 3, 4, 5}, said
