"""Writes Python code for PTX instructions: kernels of `ptx` come in, the text of functions goes out.

The text calls `ops` and `numerics` by name; `execution` compiles it.
"""
