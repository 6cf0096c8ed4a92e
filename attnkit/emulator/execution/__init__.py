"""Runs launches: takes a `machine` launch and a kernel of `ptx`, and returns what was executed.

Binds generated code to the operations, lets warps take turns, and reports deadlocks and
unfinished work.
"""
