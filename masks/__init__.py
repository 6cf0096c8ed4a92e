"""Build attention masks from the literature; combine masks with `&`, `|`, `^` and `~`.

Each function returns a `Mask`. `examples()` returns instances of all masks, for tests and
benchmarks. This package uses only the public API, as a user would.
"""

from __future__ import annotations

from attnkit.masks._bigbird import bigbird
from attnkit.masks._block_diagonal import block_diagonal
from attnkit.masks._block_diffusion import block_diffusion
from attnkit.masks._causal import causal
from attnkit.masks._chunked import chunked
from attnkit.masks._dilated import dilated
from attnkit.masks._document import document, document_from_cu_seqlens, document_from_lengths
from attnkit.masks._examples import Example, examples
from attnkit.masks._grid import tile_order
from attnkit.masks._image_spans import image_spans
from attnkit.masks._longformer import longformer
from attnkit.masks._natten import natten
from attnkit.masks._padding import padding, padding_from_mask, zero_padding
from attnkit.masks._paged import paged
from attnkit.masks._prefix import prefix, prefix_lm
from attnkit.masks._shared_prefix import shared_prefix
from attnkit.masks._sliding_tile import sliding_tile
from attnkit.masks._sliding_window import sliding_window
from attnkit.masks._streaming_llm import streaming_llm
from attnkit.masks._strided import fixed, strided
from attnkit.masks._topk_blocks import topk_blocks
from attnkit.masks._tree import tree, tree_from_table

__all__ = [
    "Example",
    "bigbird",
    "block_diagonal",
    "block_diffusion",
    "causal",
    "chunked",
    "dilated",
    "document",
    "document_from_cu_seqlens",
    "document_from_lengths",
    "examples",
    "fixed",
    "image_spans",
    "longformer",
    "natten",
    "padding",
    "padding_from_mask",
    "paged",
    "prefix",
    "prefix_lm",
    "shared_prefix",
    "sliding_tile",
    "sliding_window",
    "streaming_llm",
    "strided",
    "tile_order",
    "topk_blocks",
    "tree",
    "tree_from_table",
    "zero_padding",
]
