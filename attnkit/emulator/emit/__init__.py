"""Translate PTX instructions into Python code.

In: kernels of `ptx`. Out: functions as text. The text calls `ops` and `numerics` by name;
`execution` compiles it.
"""
