"""Find the prepared call of an earlier call, and run it again.

In: a call. Out: its result, by the fast path; or the prepared call of an earlier one with the same
functions, shapes and options; or a miss. `fast_path` compares functions by identity, `call_cache`
also by fingerprint; `backward` is the fast path of the backward. Imported by `runtime.api` and
`runtime.compile`.
"""

from attnkit.runtime.reuse.call_cache import CallKey, key_of, lookup, store
from attnkit.runtime.reuse.fast_path import remember, try_fast_path

__all__ = ["CallKey", "key_of", "lookup", "remember", "store", "try_fast_path"]
