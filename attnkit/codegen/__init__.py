"""Emit score and mask graphs as DSL values while the CuTe DSL traces a kernel.

In: a score or mask graph and its staging levels. Out: hooks that templates call (`forward_hooks`,
`backward_hooks`) and properties of the code that the hooks emit. Only `splice` imports this
package, and it imports neither `jit` nor `templates`.
"""
