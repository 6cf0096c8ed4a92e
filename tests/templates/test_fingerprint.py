"""Check that the fingerprint kernel reports each difference of data, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

from attnkit import emulator
from attnkit.jit.kernel import kernel
from attnkit.splice import fingerprint_check
from attnkit.splice.fingerprint_check import (
    FingerprintCheck,
    decode,
    fingerprint_source,
    grid,
    kernel_words,
    words_kind,
)
from attnkit.templates.common import fingerprint as template
from attnkit.util import fingerprint as host
from attnkit.util.fingerprint import fingerprint


def compare(
    tensors: list[Tensor], expected: list[Tensor], most: int = 3, check: bool = False
) -> int:
    """Run the fingerprint kernel in the emulator; return the code that it reports (0: none)."""
    words = [w for t in tensors for w in kernel_words(t)]
    source = fingerprint_source(tuple(map(words_kind, words)), "sm_90a")
    report = torch.zeros(1, dtype=torch.int64)
    codes = [100 + i for i in range(len(words))]
    arguments: list[Any] = [*words, *expected, report, *codes, 0, grid(expected, most)]
    run = emulator.check if check else emulator.run
    run(kernel(source).executable(), *arguments)
    return int(report)


def test_the_kernel_computes_the_fingerprints_of_the_definition() -> None:
    for t in strided():
        (words,) = kernel_words(t)
        sums = torch.zeros_like(fingerprint(t))
        report = torch.zeros(1, dtype=torch.int64)
        source = fingerprint_source((words_kind(words),), "sm_90a")
        exe = kernel(source).executable()
        emulator.check(exe, words, emulator.Undefined(sums), report, 5, 1, grid([sums], 3))
        assert torch.equal(sums, fingerprint(t))
        assert int(report) == 0


def strided() -> list[Tensor]:
    """Return one tensor for each layout that the kernel is compiled for."""
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


def test_a_launch_passes_the_address_of_the_report_in_host_memory() -> None:
    """A launch accepts the report, which is in host memory, among GPU tensors.

    Other CPU tensors are refused there, so the report declares the GPU as its device.
    """
    words = kernel_words(strided()[1])[0]
    signature = kernel(fingerprint_source((words_kind(words),), "sm_90a")).signature
    report = torch.zeros(1, dtype=torch.int64)
    arguments = (words, fingerprint(strided()[1]), fingerprint_check._OnDevice(report, -1), 7, 0, 1)
    values, device = signature.gather(arguments, lambda device: 0)
    assert device == -1
    assert report.data_ptr() in values
    assert words.data_ptr() in values


@pytest.mark.parametrize("count", [1, 3, 40])
def test_codes_name_the_tensor(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(FingerprintCheck, "_relauncher", lambda self, pieces: made.append(pieces))
    monkeypatch.setattr(fingerprint_check, "LARGEST", 2 * host.CHUNK)
    t = torch.arange(5 * host.CHUNK + 3, dtype=torch.int32)
    FingerprintCheck({i: (t, fingerprint(t)) for i in range(5, 5 + count)}, 9)
    pieces = [piece for group in made for piece in group]
    expected = [(9, i) for i in range(5, 5 + count) for _ in range(3)]  # three pieces each
    assert [decode(code) for _, _, code in pieces] == expected
    for words, sums, _ in pieces:
        assert torch.equal(fingerprint(words), sums)
