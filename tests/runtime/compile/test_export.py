"""Check programs of torch.export and of AOTInductor that hold calls of flex_attention."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from attnkit import create_block_mask, flex_attention, masks, mods
from attnkit.util.package import FOLDER

LENGTH = 48
KINDS = ["plain", "mask", "block mask", "mod and sink", "documents", "lse"]


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Parameter(torch.randn(2, 2 * LENGTH))
        self.sink = nn.Parameter(torch.randn(2))
        self.register_buffer("ids", torch.arange(LENGTH) // 20)
        self.block_mask = create_block_mask(masks.causal(), None, None, LENGTH, LENGTH)

    def mod(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + self.table[h, q - kv + LENGTH]

    def mask(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (self.ids[q] == self.ids[kv]) & (q >= kv)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Any:
        qkv = query, key, value
        if self.kind == "mask":
            return flex_attention(*qkv, mods.alibi(2), masks.sliding_window(7))
        if self.kind == "block mask":
            return flex_attention(*qkv, block_mask=self.block_mask)
        if self.kind == "mod and sink":
            return flex_attention(*qkv, self.mod, self.mask, sink=self.sink)
        if self.kind == "documents":
            mask = masks.document_from_lengths(lengths) & masks.causal()
            return flex_attention(*qkv, None, mask)
        if self.kind == "lse":
            return flex_attention(*qkv, mods.softcap(5.0), return_lse=True)
        return flex_attention(*qkv)


def inputs(length: int = LENGTH) -> tuple[Tensor, ...]:
    qkv = [torch.randn(1, 2, length, 16) for _ in range(3)]
    return *qkv, torch.tensor([10, length - 10])


def exported(layer: Layer, made: tuple[Tensor, ...], strict: bool) -> ExportedProgram:
    size = Dim("size", min=20, max=LENGTH)
    names = ("query", "key", "value")
    shapes: Any = {name: {2: size} for name in names} | {"lengths": None}
    fixed = layer.kind == "block mask"  # it was built for one length
    return torch.export.export(layer, made, dynamic_shapes=None if fixed else shapes, strict=strict)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_is_saved_and_loaded(kind: str, strict: bool) -> None:
    layer, made = Layer(kind), inputs()
    file = io.BytesIO()
    torch.export.save(exported(layer, made, strict), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for example in (made, made if kind == "block mask" else inputs(31)):
        pairs = zip(as_tuple(loaded(*example)), as_tuple(layer(*example)), strict=True)
        for ours, expected in pairs:
            assert torch.equal(ours, expected)


RUN = """
import sys, torch, attnkit.masks  # masks that read data are operators too
run = torch._inductor.aoti_load_package(sys.argv[1])
for made, expected in torch.load(sys.argv[2]):
    torch.testing.assert_close(run(*made), expected, rtol=1e-5, atol=1e-6)
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
@pytest.mark.exhaustive  # of every kind: a compiler of C++ takes most of the time
@pytest.mark.parametrize("kind", ["mod and sink", "documents"])
def test_a_package_of_aotinductor_runs_in_another_process(kind: str, tmp_path: Path) -> None:
    layer, made = Layer(kind), inputs()
    with torch.no_grad():
        program = exported(layer, made, strict=False)
        package = str(tmp_path / "layer.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=package)
        examples = [(example, layer(*example)) for example in (made, inputs(31))]
    torch.save(examples, tmp_path / "examples.pt")
    command = [sys.executable, "-c", RUN, package, str(tmp_path / "examples.pt")]
    done = subprocess.run(
        command, cwd=Path(FOLDER).parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
