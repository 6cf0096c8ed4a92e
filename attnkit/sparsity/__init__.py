"""Classify tiles of the score matrix as EMPTY, PARTIAL or FULL, and prove facts about indices.

In: a traced mask and the lengths of a call. Out: `BlockRuns` (`block_runs`), the sparse format of
all rooms; `BlockMask` (`block_mask`); the interval form of a mask (`intervals`); and proofs that
indices stay in bounds (`index_bounds`). Imported by `schedule` and every room above it; imports
`tracing`, `graph`, `util` and `errors`. Nothing here depends on the kernel that uses the tiles.

Three engines classify tiles. All are exact, so they give the same tiles; `mask_runs.mask_runs`
chooses.

1. Row intervals (`intervals`). The solver converts the mask to a union of few kv intervals per row.
   If every row keeps one interval and neither end decreases from row to row, `intervals.tiles`
   computes all tiles from the ends, with a few dozen operators on [rows]. Used for GPU calls of
   causal masks, windows, prefixes, packed documents. The kernels also test scores against these
   intervals.
2. Hierarchical boxes (`classify`, `hierarchical`, `ranges`). Interval arithmetic
   computes, for each box of positions, whether the mask must or may hold in it; one-sided
   expressions come from exact tables. It starts with squares of tiles and evaluates single tiles
   only in squares that are neither EMPTY nor FULL as a whole. Used for every other mask, and for
   all masks on the CPU. `mask_rewrites` rewrites masks so that this engine decides more tiles.
3. Witnesses and positions (`witness`, `subdivide`). A tile that interval arithmetic leaves
   undecided is PARTIAL if the mask keeps one of a few critical positions and drops another. If
   there is no such pair of witnesses, the tile is cut into boxes; the last undecided boxes are
   evaluated at every position. Used inside engine 2, for the undecided tiles only.
"""
