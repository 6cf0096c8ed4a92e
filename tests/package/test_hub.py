"""Check the folder that `make hub` writes, loaded as the package `kernels` loads it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What kernels 0.17 does: the file of the variant, under the id of its metadata, and no sys.path.
LOAD = """
import importlib.util, json, pathlib, sys
{before}
path = pathlib.Path({path!r})
name = json.loads((path / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, path / "__init__.py")
kernel = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
"""

PROGRAM = """
import torch
import torch.nn.functional as F

q, k, v = torch.randn(3, 1, 2, 64, 16)
expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
out = kernel.flex_attention(q, k, v, block_mask=kernel.masks.causal())
torch.testing.assert_close(out, expected)
q, k, v = (t.transpose(1, 2) for t in (q, k, v))
out = kernel.flash_attn_func(q, k, v, causal=True)
torch.testing.assert_close(out.transpose(1, 2), expected)
assert all(hasattr(kernel, name) for name in kernel.__all__)
import attnkit
print(attnkit.__file__)
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory"]
    subprocess.run([*command, str(folder / "dist")], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (folder / "dist").iterdir()
    writer = [sys.executable, str(ROOT / "hub" / "write.py"), str(wheel), str(folder / "kernel")]
    for _ in range(2):  # the second time it replaces the first folder
        subprocess.run(writer, check=True, capture_output=True)
    return folder / "kernel"


def run(path: Path, program: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = LOAD.format(path=str(path), before=before) + program
    return subprocess.run(  # isolated: neither PYTHONPATH nor the working directory
        [sys.executable, "-I", "-c", code], cwd="/", capture_output=True, text=True, check=False
    )


def test_the_layout_is_that_of_the_hub(hub: Path) -> None:
    assert {p.name for p in hub.iterdir()} == {"README.md", "build"}
    found = {}
    for path in (hub / "build").iterdir():
        assert {p.name for p in path.iterdir()} == {"__init__.py", "attnkit", "metadata.json"}
        assert not list(path.rglob("*.pyc"))
        found[path.name] = json.loads((path / "metadata.json").read_text())
    assert set(found) == {"torch-cuda", "torch-universal"}
    assert found["torch-cuda"]["python-depends"] == ["nvidia-cutlass-dsl"]
    assert found["torch-universal"]["python-depends"] == []
    for variant, metadata in found.items():
        assert metadata["name"] == "attnkit"
        assert metadata["id"].startswith(f"_attnkit_{variant.replace('-', '_')}_")
        assert metadata["version"] == 1
    card = (hub / "README.md").read_text()
    assert 'get_kernel("<this repository>", version=1, trust_remote_code=True)' in card


@pytest.mark.parametrize("variant", ["torch-cuda", "torch-universal"])
def test_a_variant_runs_from_outside_of_the_path(hub: Path, variant: str) -> None:
    path = hub / "build" / variant
    done = run(path, PROGRAM)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == path / "attnkit" / "__init__.py"


def test_another_version_in_the_process_is_refused(hub: Path) -> None:
    path = hub / "build" / "torch-universal"
    before = (
        "import types\n"
        "other = sys.modules['attnkit'] = types.ModuleType('attnkit')\n"
        "other.__version__, other.__file__ = '0.0.1', 'elsewhere'\n"
    )
    done = run(path, "", before)
    assert done.returncode == 1
    assert "and attnkit 0.0.1 of elsewhere is imported already" in done.stderr
    assert "import this kernel first" in done.stderr


def test_a_wheel_of_something_else_is_refused(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("hub_write", ROOT / "hub" / "write.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(ValueError, match="is not a wheel of attnkit"):
        module.write(tmp_path / "other-1.0-py3-none-any.whl", tmp_path / "kernel")
    assert not (tmp_path / "kernel").exists()


def test_kernels_can_be_tested_in_a_process_of_their_own(hub: Path) -> None:
    """A GPU whose kernels are not proven runs `python -m attnkit.testing.selfcheck`."""
    program = (
        "import subprocess, torch\n"
        "from attnkit.runtime.hardware_gate import run_selfcheck\n"
        "from attnkit.schedule.targets import TARGETS\n"
        "started = subprocess.Popen\n"
        "subprocess.Popen = lambda *a, **k: print(k['cwd']) or started(*a, **k)\n"
        "print(run_selfcheck(TARGETS[-1], torch.device('cpu')).reason)\n"
    )
    path = hub / "build" / "torch-universal"
    done = run(path, program)
    assert done.returncode == 0, done.stderr
    folder, reason = done.stdout.splitlines()
    assert Path(folder) == path  # where `python -m` looks first
    assert "query is not on a CUDA device" in reason
