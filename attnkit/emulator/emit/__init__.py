"""Writes Python code for PTX instructions: kernels of `ptx` come in, functions go out as text.

The text calls `ops` and `numerics` by name; `execution` compiles it.
"""
