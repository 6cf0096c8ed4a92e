"""Make `attn_implementation="attnkit"` work in Hugging Face transformers.

In: the arguments of transformers' `AttentionInterface` and `AttentionMaskInterface`. Out: calls of
`attnkit.flex_attention`. The modules inside import transformers when `register` is called.
"""

from __future__ import annotations

import functools

from attnkit.errors import ArgumentError, UnsupportedError

__all__ = ["register"]

_OLDEST = 5  # major version of transformers whose interfaces this package follows


def register(name: str = "attnkit", *, backend: str = "auto") -> None:
    """Register attnkit as an attention implementation of transformers.

    After it, `from_pretrained(..., attn_implementation="attnkit")` and
    `model.set_attn_implementation("attnkit")` run every attention layer that uses transformers'
    interface with `attnkit.flex_attention`. Models are not changed. Calling it again is harmless.
    In `torch.compile` the graph breaks at each attention, so `fullgraph=True` is an error of torch.

    Args:
        name: name of the implementation; one of transformers' own names is replaced by attnkit.
        backend: backend of `attnkit.flex_attention`.

    Raises:
        ArgumentError: `name` is no string, or is empty.
        UnsupportedError: transformers is missing, or older than 5.
    """
    if not isinstance(name, str) or not name:
        raise ArgumentError(f"name must be a string such as 'attnkit', got {name!r}")
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            f"attnkit.integrations.transformers needs transformers 5, which cannot be imported "
            f"({error}); run: pip install 'attnkit[transformers]'"
        ) from error
    if int(transformers.__version__.partition(".")[0]) < _OLDEST:
        raise UnsupportedError(
            f"attnkit.integrations.transformers needs transformers {_OLDEST} or newer, found "
            f"{transformers.__version__}; run: pip install 'transformers>=5'"
        )
    import torch

    from attnkit.integrations.transformers.attention import attention
    from attnkit.integrations.transformers.mask_function import attention_mask

    # A graph of torch.compile would be bound to one mask, and be compiled again for the next one.
    run = torch.compiler.disable(functools.partial(attention, backend=backend))
    transformers.AttentionInterface.register(name, run)
    transformers.AttentionMaskInterface.register(name, torch.compiler.disable(attention_mask))
