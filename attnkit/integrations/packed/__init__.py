"""Compute attention on packed sequences, which `flash_attn` and `torch_attention` share.

In: query, key and value [total, heads, head dim] of all sequences one after another, and the
offsets of the sequences in tensors. Out: one call of `attnkit.flex_attention` with a mask of
documents. The masks and score_mods of a packing are made once and found again by the offsets' data.
"""
