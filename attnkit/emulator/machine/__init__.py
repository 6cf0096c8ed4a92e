"""Model the state of a GPU: memories, barriers, CTAs, clusters, a launch, and warps in lockstep.

State changes only through calls from `ops`, which defines what instructions do, and `execution`.
"""
