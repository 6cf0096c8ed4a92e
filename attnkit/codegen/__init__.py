"""Emit graphs as values of a kernel while the CuTe DSL traces it.

In: a score or mask graph and its staging. Out: hooks that templates call (`forward_hooks`,
`backward_hooks`) and facts about the code that they emit. Imported by `splice` alone; imports
neither `jit` nor `templates`.
"""
