"""Run a launch: bind generated code to operations, and let warps take turns.

In: a launch of `machine` with a kernel of `ptx`. Out: counts of the executed instructions. It
reports deadlocks, and work that is unfinished at exit.
"""
