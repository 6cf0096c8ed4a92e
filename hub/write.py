"""Write the folder that the Hugging Face hub takes as a kernel: `make hub`.

    python hub/write.py dist/attnkit-0.1.0-py3-none-any.whl build/hub

The layout is that of https://huggingface.co/docs/kernels/kernel-requirements: build/<variant> with
an `__init__.py` and a `metadata.json`, and here the package of the wheel beside them. The variant
torch-cuda asks for the CuTe DSL; torch-universal, which runs everywhere else, has no dependency.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
LICENSE = "Apache-2.0"
VERSION = 1  # of the names that the kernel exports, which `get_kernel(..., version=1)` asks for

# Variant -> backend in its metadata, Python packages that it needs.
VARIANTS: dict[str, tuple[str, list[str]]] = {
    "torch-cuda": ("cuda", ["nvidia-cutlass-dsl"]),
    "torch-universal": ("cpu", []),
}

CARD = """---
license: apache-2.0
tags: [kernels, attention]
---

# attnkit {version}

Exact, block-sparse, differentiable attention from a `score_mod` and a `mask_mod`, in FlexAttention's terms, and with
flash-attn's signatures.

```python
from kernels import get_kernel

attnkit = get_kernel("<this repository>", version={number}, trust_remote_code=True)
out = attnkit.flex_attention(query, key, value, block_mask=attnkit.masks.causal())
```

On Hopper it compiles its kernels with the CuTe DSL (`nvidia-cutlass-dsl`); elsewhere it runs torch operators. The
package is loaded under the name `attnkit`, so a process can have one version of it.
"""


def write(wheel: Path, folder: Path) -> list[Path]:
    """Write the kernel's folder from a wheel, replacing what is there; return the variants' paths.

    Args:
        wheel: a wheel of attnkit.
        folder: the folder to write, which holds build/<variant> and README.md afterwards.
    """
    named = re.fullmatch(r"attnkit-([^-]+)-py3-none-any\.whl", wheel.name)
    if named is None:
        raise ValueError(f"{wheel} is not a wheel of attnkit")
    version, digest = named[1], hashlib.sha256(wheel.read_bytes()).hexdigest()[:7]
    init = (HERE / "variant_init.py.in").read_text().format(version=version)
    shutil.rmtree(folder, ignore_errors=True)
    paths = []
    for variant, (backend, depends) in VARIANTS.items():
        path = folder / "build" / variant
        path.mkdir(parents=True)
        with zipfile.ZipFile(wheel) as archive:
            package = [n for n in archive.namelist() if n.startswith("attnkit/")]
            archive.extractall(path, package)
        (path / "__init__.py").write_text(init)
        metadata = {
            "name": "attnkit",
            "id": f"_attnkit_{variant.replace('-', '_')}_{digest}",
            "version": VERSION,
            "license": LICENSE,
            "python-depends": depends,
            "backend": {"type": backend},
        }
        (path / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        paths.append(path)
    (folder / "README.md").write_text(CARD.format(version=version, number=VERSION))
    return paths


def main() -> int:
    """Write the folder that the arguments name, and print the variants."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    for path in write(options.wheel, options.folder):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
