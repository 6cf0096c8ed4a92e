"""Models the state of a GPU: memories, barriers, CTAs, clusters, a launch, and warps in lockstep.

Changes state only as its callers ask; `ops` gives instructions their meaning.
"""
