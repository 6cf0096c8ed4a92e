"""The kernel that compares data with fingerprints: it reports each difference and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

from attnkit import emulator
from attnkit.jit.kernel import kernel
from attnkit.splice import fingerprint_check
from attnkit.splice.fingerprint_check import fingerprint_source, grid, kernel_words, words_kind
from attnkit.templates.common import fingerprint as template
from attnkit.util import fingerprint as host
from attnkit.util.fingerprint import fingerprint


def compare(
    tensors: list[Tensor], expected: list[Tensor], most: int = 3, check: bool = False
) -> int:
    """Run the kernel in the emulator; return what it reports."""
    words = [w for t in tensors for w in kernel_words(t)]
    source = fingerprint_source(tuple(map(words_kind, words)), "sm_90a")
    report = torch.zeros(1, dtype=torch.int64)
    codes = [100 + i for i in range(len(words))]
    arguments: list[Any] = [*words, *expected, report, *codes, grid(expected, most)]
    run = emulator.check if check else emulator.run
    run(kernel(source).executable(), *arguments)
    return int(report)


def strided() -> list[Tensor]:
    """A tensor of each kind that a kernel is compiled for."""
    wide = torch.randint(-(2**60), 2**60, (6, 5, 4))
    return [
        torch.arange(5000, dtype=torch.int32),
        wide[:, ::2, 1],
        torch.randint(-100, 100, (40, 7), dtype=torch.int8)[:, :3],
    ]


def test_the_constants_are_those_of_the_definition() -> None:
    for name in ("CHUNK", "KEY", "MIX_A", "MIX_B"):
        assert getattr(template, name) == getattr(host, name)
    assert template.WARPS == fingerprint_check._WARPS


def test_equal_data_is_not_reported_and_every_edit_is() -> None:
    tensors = strided()
    expected = [fingerprint(t) for t in tensors]
    assert compare(tensors, expected, check=True) == 0
    for which, t in enumerate(tensors):
        flat = torch.arange(t.numel()).view(t.shape)
        for at in (0, t.numel() // 2, t.numel() - 1):
            place = flat == at
            before = t.clone()
            t[place] += 1
            assert compare(tensors, expected) == 100 + which
            t.copy_(before)
    assert compare(tensors, expected, most=1) == 0
