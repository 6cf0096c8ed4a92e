"""Provide flash-attn's functions, computed by attnkit: change one import.

In: the arguments of `flash_attn.flash_attn_func` and `flash_attn_varlen_func`, and besides a
`score_mod` and a `mask`. Out: calls of `attnkit.flex_attention`. The package flash-attn is not
needed and not imported.
"""

from attnkit.integrations.flash_attn.functions import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
