"""Provide caches, argument checks and CSR helpers, which know nothing of attention.

In: tensors, devices and a caller's arguments. Out: checked arguments, caches keyed by tensor
identity and version, CSR helpers, and torch's private names. Every room may import this one; it
imports only `errors`.
"""
