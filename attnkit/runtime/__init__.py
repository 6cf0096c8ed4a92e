"""Run `flex_attention`: validate a call, prepare it once, launch it, and reuse the preparation.

In: the arguments of `attnkit.flex_attention`. Out: tensors. `api` contains the steps of a call.
`inspection`, `testing` and `cli` import this package.
"""
