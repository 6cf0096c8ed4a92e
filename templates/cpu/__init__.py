"""Compute block-sparse attention exactly with torch operators, on any device, in any float dtype.

`forward` and `backward` iterate over the block runs of a mask strip by strip. A strip is a range of
query rows with the scores of only those kv positions that the mask touches, for many heads at once.
`column_sums` and its backward do so in a second pass.
"""

from __future__ import annotations

from attnkit.templates.cpu.backward import backward
from attnkit.templates.cpu.column_sums import column_sums, column_sums_backward
from attnkit.templates.cpu.forward import forward
from attnkit.templates.cpu.hooks import Hooks, Tile

__all__ = ["Hooks", "Tile", "backward", "column_sums", "column_sums_backward", "forward"]
