"""Check what `import attnkit` loads, and that no file of the package is loaded twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("mods", "masks", "templates")

# Modules that need the DSL or torchtitan are skipped where these are not installed.
IMPORT_ALL = """
import importlib, pkgutil, attnkit
for module in pkgutil.walk_packages(attnkit.__path__, "attnkit."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name not in ("cutlass", "spmd_types", "torchtitan"):
                raise
"""


def _modules_after(code: str) -> dict[str, str]:
    """Run `code` in a fresh interpreter; return the modules loaded afterwards as {name: file}."""
    report = (
        "\nimport json, sys\n"
        "print(json.dumps({n: getattr(m, '__file__', None) or '' "
        "for n, m in list(sys.modules.items())}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code + report],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    loaded: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
    return loaded


@pytest.fixture(scope="module")
def loaded() -> dict[str, str]:
    return _modules_after("import attnkit")


# torch._dynamo costs a second of import time and loads sympy: torch.compiler.disable and the first
# call of a torch.library.custom_op import it, torch.library.Library does not.
@pytest.mark.parametrize(
    "library", ["cutlass", "sympy", "matplotlib", "hypothesis", "torch._dynamo"]
)
def test_import_attnkit_leaves_heavy_libraries_alone(loaded: dict[str, str], library: str) -> None:
    assert "attnkit" in loaded
    assert library not in loaded


def test_integrations_import_no_other_library() -> None:
    names = ("transformers", "flash_attn", "torch_attention", "diffusers", "torchtitan")
    loaded = _modules_after("".join(f"import attnkit.integrations.{name}\n" for name in names))
    assert {f"attnkit.integrations.{name}" for name in names} <= set(loaded)
    others = {"transformers", "flash_attn", "diffusers", "torchtitan"}
    others |= {"torch.nn.attention.varlen", "torch._dynamo"}
    assert not others & set(loaded)


def test_import_attnkit_loads_what_a_call_needs_alone(loaded: dict[str, str]) -> None:
    """`import attnkit` does not load the emulator, inspection, testing, CLI, masks or mods."""
    rooms = {name.split(".")[1] for name in loaded if name.startswith("attnkit.")}
    assert rooms & {"emulator", "inspection", "testing", "cli", "masks", "mods"} == set()
    # The compiler modules load at the first call that finds no kernel in the disk cache.
    assert not {"attnkit.jit.build", "attnkit.jit.cubin", "attnkit.jit.sass_checks"} & set(loaded)
    assert not [n for n in loaded if n.startswith(("attnkit.splice.sm", "attnkit.splice.back"))]
    # `util.environment` tells whether a log is wanted; what writes one is not loaded.
    assert not {"attnkit.util.log", "attnkit.util.status_line"} & set(loaded)
    assert sum(name.startswith("attnkit.") for name in loaded) <= 129


def test_lazy_attributes_are_there() -> None:
    program = """
import attnkit
assert attnkit.masks.causal and attnkit.mods.alibi and attnkit.testing.check_variant
assert attnkit.explain is attnkit.inspection.explain.explain
assert {"masks", "mods", "testing", "explain", "Explanation"} <= set(dir(attnkit))
for name in attnkit.__all__:
    getattr(attnkit, name)
try:
    attnkit.nothing
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "module 'attnkit' has no attribute 'nothing'", done.stderr


def test_every_module_imports_once() -> None:
    """Each file of the package is imported under one name.

    A module `mods` besides `attnkit.mods`, for example, would be a second copy.
    """
    everything = _modules_after(IMPORT_ALL)
    assert not everything.keys() & set(LINKS)

    names: dict[Path, list[str]] = {}
    for name, file in everything.items():
        path = Path(file).resolve() if file else None
        if path is not None and path.is_relative_to(ROOT) and "site-packages" not in path.parts:
            names.setdefault(path, []).append(name)
    assert ROOT / "attnkit" / "__init__.py" in names
    assert {path: found for path, found in names.items() if len(found) > 1} == {}


def test_first_call_loads_neither_sympy_nor_the_emulator() -> None:
    """Only calls that emulate load the emulator."""
    code = (
        "import sys, torch, attnkit\n"
        "q = torch.randn(1, 2, 64, 8, requires_grad=True)\n"
        "t = torch.rand(2, 3)\n"
        "mod = lambda s, b, h, i, j: s + t[h, :2].sum() * (j - i)\n"
        "out = attnkit.flex_attention(q, q, q, mod, lambda b, h, i, j: i >= j)\n"
        "out.sum().backward()\n"
        "heavy = 'sympy', 'torch._dynamo', 'cutlass', 'attnkit.flex', 'attnkit.emulator'\n"
        "print(q.grad is not None, [n for n in heavy if n in sys.modules])\n"
        "import attnkit.splice\n"
        "print('attnkit.emulator' in sys.modules)\n"
        "from attnkit.jit import emulator_runs\n"
        "print('attnkit.emulator' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["True []", "False", "True"]
