"""Run a small program with an installed attnkit: `make try-wheel` does, in a fresh environment.

Prints what was tried. The attnkit that it imports must not lie in the checkout.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

import attnkit
from attnkit import Variant, flex, masks, mods

CHECKOUT = Path(__file__).resolve().parents[2]


def attention() -> str:
    """Compare forward and backward with PyTorch's dense function, through both modules."""
    q, k, v = (torch.randn(2, 4, 96, 16, requires_grad=True) for _ in "qkv")
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    grads = torch.autograd.grad(expected.sum(), (q, k, v))
    for call in (attnkit.flex_attention, flex.flex_attention):
        out = call(q, k, v, block_mask=masks.causal())
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), (q, k, v)), grads)
    return "forward and backward agree with SDPA"


def variants() -> str:
    """Explain a variant of both libraries."""
    variant = Variant(mods.alibi(4), masks.causal() & masks.sliding_window(16))
    text = str(attnkit.explain(variant, q_len=256, heads=4))
    assert "mask(b, h, q, kv)" in text
    return f"explained {len(masks.__all__)} masks' and {len(mods.__all__)} mods' library"


def commands() -> Iterator[str]:
    """Run the command, and compile a kernel where the DSL is, which needs every template."""
    lines = [["doctor"], ["show", "masks:causal", "--q-len", "256"]]
    if importlib.util.find_spec("hypothesis") is not None:
        lines.append(["check", "mods:softcap(5.0)", "--mask", "masks:causal", "--examples", "2"])
    if importlib.util.find_spec("cutlass") is not None:
        lines += [
            ["compile", "masks:causal", "--backward", "--arch", a] for a in ("sm_90a", "sm_100a")
        ]
    program = Path(sys.executable).with_name("attnkit")
    for line in lines:
        done = subprocess.run([program, *line], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"attnkit {' '.join(line)}: {done.stdout}{done.stderr}"
        yield f"attnkit {' '.join(line)}"


def main() -> None:
    folder = Path(attnkit.__file__).resolve().parent
    assert not folder.is_relative_to(CHECKOUT / "attnkit"), f"{folder} is the checkout"
    assert (folder / "py.typed").is_file()
    version = f"Python {sys.version.split()[0]}, torch {torch.__version__}"
    print(f"attnkit {attnkit.__version__} in {folder}, {version}")
    for text in (attention(), variants(), *commands()):
        print(f"  {text}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:  # so that kernels are compiled
        os.environ["ATTNKIT_CACHE_DIR"] = cache
        main()
