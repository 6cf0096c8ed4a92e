"""Translate PTX instructions into Python code.

In: kernels of `ptx`. Out: the source text of Python functions, one per basic block. The text calls
functions of `ops` and `numerics` by name; `execution` compiles it.

Functions named after a PTX instruction return the lines of Python code for it ("emit" it).
"""
