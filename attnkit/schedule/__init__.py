"""Which kernel with which tiles runs a call, and in which order its work tiles are taken.

In: head dims, dtype, device and `BlockRuns`. Out: a `Plan`, a longest-first `Schedule`, split-KV
decisions, work lists, and the order of a deterministic backward. Imported by `splice` and every
room above it; compiles and launches nothing.
"""
