"""Run the public operator: validate a call, prepare it once, launch it, reuse it.

In: the arguments of `attnkit.flex_attention`. Out: tensors. `api` shows the steps of a call on
one screen. Imported by `inspection`, `testing` and `cli`.
"""
