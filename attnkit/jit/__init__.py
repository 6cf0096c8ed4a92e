"""Compile a kernel once, store it in memory and on disk, load it and launch it.

In: a `Source`: a key, an architecture and a function that builds the kernel. Out: a callable
`CompiledKernel`, its machine code and its statistics, or the same kernel in the emulator. Knows
nothing of attention. Imported by `splice` and every room above it.
"""
