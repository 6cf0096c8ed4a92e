"""Model the state of a GPU: memories, barriers, CTAs, clusters, a launch, and warps in lockstep.

It changes state only as its callers ask; `ops` defines what instructions do.
"""
