"""Make `model.set_attention_backend("attnkit")` work in Hugging Face diffusers.

In: the arguments of diffusers' attention dispatcher. Out: calls of `attnkit.flex_attention`. The
modules inside import diffusers when `register` is called.
"""

from __future__ import annotations

import functools

from attnkit.errors import ArgumentError

__all__ = ["register"]


def register(name: str = "attnkit", *, backend: str = "auto") -> None:
    """Register attnkit as an attention backend of diffusers.

    After it, `model.set_attention_backend("attnkit")` and `diffusers.attention_backend("attnkit")`
    run every attention layer that uses diffusers' dispatcher with `attnkit.flex_attention`, forward
    and backward. Models are not changed. Calling it again is harmless. It must run before a model
    asks for the backend, so the environment variable DIFFUSERS_ATTN_BACKEND cannot name attnkit.

    Args:
        name: name of the backend, in lower case; one of diffusers' own names, such as "flex", is
            replaced by attnkit.
        backend: backend of `attnkit.flex_attention`.

    Raises:
        ArgumentError: `name` is no string in lower case, or is empty.
        UnsupportedError: diffusers is missing, or has no dispatcher that attnkit knows.
    """
    if not isinstance(name, str) or not name or name != name.lower():
        raise ArgumentError(
            f"name must be a string in lower case such as 'attnkit', because diffusers looks names "
            f"up in lower case; got {name!r}"
        )
    from attnkit.integrations.diffusers.attention import attention
    from attnkit.integrations.diffusers.dispatcher import add_backend

    # diffusers passes the arguments that the signature names
    add_backend(name, functools.partial(attention, backend=backend))
