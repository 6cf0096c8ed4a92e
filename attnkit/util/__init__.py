"""Provide caches, argument checks, device and CSR helpers, and torch's private names.

Every other subpackage may import this one. It imports only `attnkit.errors`.
"""
