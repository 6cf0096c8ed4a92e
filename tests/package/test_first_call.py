"""Check what the first call on a GPU imports when its kernels are in the disk cache."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys

import pytest

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("without the DSL no call is planned for a kernel", allow_module_level=True)

# The tensors are on the CPU. The script simulates a GPU of the given compute capability, a disk
# cache that has every kernel, and launches that do nothing.
CALL = """
import json, sys, types
import torch, attnkit
from attnkit.util import devices
before = set(sys.modules)

from attnkit.jit import disk_cache
from attnkit.jit.abi import Signature
from attnkit.jit.artifact import Artifact
from attnkit.jit.kernel import CompiledKernel

capability = tuple(map(int, sys.argv[1:]))
devices.compute_capability = lambda device: capability
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=132)
artifact = Artifact("f", "sm_90a", Signature(()), (), (), 0.0, b"code", b"image", b"")
disk_cache.KernelCache.get = lambda self, key: artifact.dump()
CompiledKernel.__call__ = lambda self, *arguments: None
CompiledKernel.relauncher = lambda self, arguments, changing: None

def added():
    return sorted(set(sys.modules) - before)

q = torch.zeros(1, 2, 512, 128, dtype=torch.bfloat16, requires_grad=True)
causal = lambda b, h, q, kv: q >= kv
out = attnkit.flex_attention(q, q, q, block_mask=causal, backend="cute")
forward = added()
torch.Tensor.is_cuda = True  # where it is False, torch operators compute the backward
out.sum().backward()
names = {name for name in forward if name.startswith("attnkit.")}
classes = {c for n in names for c in vars(sys.modules[n]).values() if isinstance(c, type)}
compiled = sorted(
    c.__name__ for c in classes if c.__module__ in names and "__dataclass_fields__" in vars(c)
)
print(json.dumps([forward, added(), compiled]))
"""

CARDS = {"sm90": "9 0", "sm100": "10 0"}


@functools.cache
def first_call(card: str) -> tuple[list[str], list[str], list[str]]:
    """Run a first call with kernels for `card` in a fresh process.

    Returns:
        The modules that the forward adds to those of `import attnkit`, the modules that forward and
        backward add, and the dataclasses defined in the attnkit modules that the forward adds.
    """
    command = [sys.executable, "-c", CALL, *CARDS[card].split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    forward, both, dataclasses = json.loads(done.stdout.splitlines()[-1])
    return forward, both, dataclasses


@pytest.mark.parametrize("card", CARDS)
def test_a_first_call_loads_its_own_architecture(card: str) -> None:
    for loaded in first_call(card)[:2]:
        assert f"attnkit.splice.{card}" in loaded
        others = [other for other in CARDS if other != card]
        assert [n for n in loaded if any(other in n for other in others)] == []


@pytest.mark.parametrize("card", CARDS)
def test_a_first_forward_loads_no_backward(card: str) -> None:
    forward, both, _ = first_call(card)
    assert [n for n in forward if "backward" in n] == []
    assert f"attnkit.splice.{card}_backward" in both


@pytest.mark.parametrize("card", CARDS)
def test_kernels_from_the_disk_cache_load_nothing_that_compiles_or_emulates(card: str) -> None:
    compilers = ("cutlass", "attnkit.jit.build", "attnkit.jit.cubin", "attnkit.jit.sass_checks")
    others = ("sympy", "attnkit.emulator", "attnkit.inspection", "attnkit.templates.cpu")
    for loaded in first_call(card)[:2]:
        assert [n for n in loaded if n.startswith((*compilers, *others))] == []


def test_a_first_forward_loads_few_modules() -> None:
    """A first forward imports at most 9 modules beyond `import attnkit`, and no template."""
    forward, *_ = first_call("sm90")
    assert [n for n in forward if n.startswith("attnkit.templates")] == []
    assert len(forward) <= 9


def test_a_first_forward_defines_few_dataclasses() -> None:
    """The attnkit modules that a first forward imports define at most 10 dataclasses.

    Python compiles up to six functions for a dataclass, in 0.3 ms; a named tuple takes a quarter of
    that.
    """
    *_, dataclasses = first_call("sm90")
    assert len(dataclasses) <= 10, dataclasses
