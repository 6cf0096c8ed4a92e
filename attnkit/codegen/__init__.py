"""From graphs to the values of a kernel that is being traced by the CuTe DSL.

In: a score or mask graph and its staging. Out: hooks that templates call (`forward_hooks`,
`backward_hooks`) and facts about the code that they emit. Imported by `splice` alone; imports
neither `jit` nor `templates`.
"""
