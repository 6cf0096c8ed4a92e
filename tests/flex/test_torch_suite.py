"""The runner of PyTorch's own tests swaps the import, runs on a CPU, and tells what it left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "expecttest", reason="PyTorch's own tests need expecttest: pip install expecttest"
)

from tests.flex import torch_suite

ROOT = Path(__file__).parents[2]
# In the form of PyTorch's file: its imports, decorators and classes for each device.
SUITE = """
import unittest
from unittest import skipUnless

import torch
from torch._inductor.test_case import TestCase as InductorTestCase
from torch._inductor.utils import run_and_get_code
from torch.nn.attention.flex_attention import (
    _DEFAULT_SPARSE_BLOCK_SIZE,
    BlockMask,
    create_block_mask,
    flex_attention,
)
from torch.testing._internal import common_utils
from torch.testing._internal.common_device_type import (
    flex_attention_supported_platform as supported_platform,
    instantiate_device_type_tests,
    largeTensorTest,
    skipCPUIf,
)

DEVICE_SUPPORTS_BACKWARDS = type("Devices", (), {"items": {"cuda"}})()
needs_triton = unittest.skipUnless(torch.cuda.is_available(), "Requires Triton + A100")


def causal(b, h, q, kv):
    return q >= kv


class TestAttention(InductorTestCase):
    def read(self, function):
        return run_and_get_code(function)

    @supported_platform
    @skipCPUIf(True, "Not supported on CPU")
    @largeTensorTest("2000GB", "cpu")
    @common_utils.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_gradients(self, device, dtype):
        self.assertIn(device, DEVICE_SUPPORTS_BACKWARDS.items)
        q = torch.randn(1, 2, 128, 16, device=device, dtype=dtype, requires_grad=True)
        mask = create_block_mask(causal, 1, 1, 128, 128, device=device)
        eager = flex_attention(q, q, q, block_mask=mask)
        compiled = torch.compile(flex_attention, mode="max-autotune", fullgraph=True)
        out = compiled(q, q, q, block_mask=mask)
        torch.testing.assert_close(out, eager)
        out.sum().backward()
        self.assertTrue(q.grad.isfinite().all())

    @supported_platform
    def test_code(self, device):
        self.read(None)

    @supported_platform
    def test_invalid_block_size(self, device):
        self.fail("left out")

    @supported_platform
    def test_wording(self, device):
        mask = create_block_mask(causal, 1, 1, 128, 128, device=device)
        q = torch.randn(1, 2, 256, 16, device=device)
        with self.assertRaisesRegex(ValueError, "words of PyTorch"):
            flex_attention(q, q, q, block_mask=mask)

    @unittest.skipIf(True, "one GPU")
    def test_skipped(self, device):
        self.fail("skipped")


@needs_triton
class TestMask(InductorTestCase):
    @supported_platform
    def test_names_are_those_of_attnkit(self, device):
        import torch.nn.attention.flex_attention as module
        from torch.nn.attention.flex_attention import create_mask

        for thing in (BlockMask, create_block_mask, flex_attention, create_mask):
            self.assertTrue(thing.__module__.startswith("attnkit"))
        self.assertEqual(module.__name__, "attnkit.flex")
        self.assertEqual(_DEFAULT_SPARSE_BLOCK_SIZE, 128)

    @supported_platform
    def test_a_fault(self, device):
        self.assertEqual(1, VALUE)


instantiate_device_type_tests(TestAttention, globals(), only_for=("cuda",), allow_xpu=True)
instantiate_device_type_tests(TestMask, globals(), only_for=("cuda",), allow_xpu=True)
"""


def run(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.flex.torch_suite", str(path), "--device", "cpu"]
    return subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


def test_tests_pass_and_the_rest_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "test_flex_attention.py"
    path.write_text(SUITE.replace("VALUE", "1"))
    done = run(path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "    1 left out: reads the code that Inductor generates" in lines
    assert "    1 left out: attnkit takes any block size" in lines
    assert "    1 skipped by the test: one GPU" in lines
    assert lines[-1].startswith("5 passed, 0 failed, 1 skipped, 2 left out, on cpu, torch ")


@pytest.mark.exhaustive
def test_a_fault_is_named(tmp_path: Path) -> None:
    path = tmp_path / "test_flex_attention.py"
    path.write_text(SUITE.replace("VALUE", "2"))
    done = run(path, "--only", "fault")
    assert done.returncode == 1
    assert "FAILED test_a_fault_cpu: AssertionError" in done.stdout
    assert "0 passed, 1 failed" in done.stdout
    assert run(path, "--only", "no such test").returncode == 2


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        torch_suite.main([str(tmp_path / "none.py")])
    assert "test/inductor/test_flex_attention.py" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["flex-tests", "TORCH_TESTS"])
def test_make_has_a_target(word: str) -> None:
    assert word in (ROOT / "Makefile").read_text()
