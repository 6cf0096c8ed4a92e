"""Compile a kernel once, cache it in memory and on disk, load it and launch it.

In: a `Source`: a key, an architecture and a function that builds the kernel. Out: a callable
`CompiledKernel` with its machine code and statistics, or the same kernel for the emulator. This
package does not depend on attention. `splice` and every package above it import it.
"""
