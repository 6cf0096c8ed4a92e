"""Make the programs in docs/scripts importable."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
for folder in ("docs/scripts", "benchmarks"):
    sys.path.append(str(ROOT / folder))
