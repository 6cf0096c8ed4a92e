"""Run a launch: bind generated code to operations, and let warps take turns.

In: a launch of `machine` with a kernel of `ptx`. Out: counts of what was executed. It reports
deadlocks and unfinished work.
"""
