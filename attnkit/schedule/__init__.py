"""Choose the kernel and the tile sizes of a call, and order its work tiles.

In: head dims, dtype, device and `BlockRuns`. Out: a `Plan`, a longest-first `Schedule`, split-KV
decisions, work lists, and the order of a deterministic backward. Imported by `splice` and every
room above it; compiles and launches nothing.
"""
