"""Reuse the prepared call of an earlier call with the same functions, shapes and options.

In: a call. Out: its result, from the fast path; or the prepared call of an earlier call; or None.
`fast_path` compares functions by identity, `call_cache` also by fingerprint. `backward` is the fast
path of the backward. `runtime.api` and `runtime.compile` import this package.
"""

from attnkit.runtime.reuse.call_cache import (
    CallKey,
    key_of,
    lookup,
    reason_without_key,
    store,
)
from attnkit.runtime.reuse.fast_path import remember, try_fast_path

__all__ = [
    "CallKey",
    "key_of",
    "lookup",
    "reason_without_key",
    "remember",
    "store",
    "try_fast_path",
]
