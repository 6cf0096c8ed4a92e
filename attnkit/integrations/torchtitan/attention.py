"""Define `FlexAttention`, the inner attention of torchtitan's models, computed by attnkit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import spmd_types
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common import attention

from attnkit.errors import ArgumentError, UnsupportedError
from attnkit.flex import AuxRequest, flex_attention


class FlexAttention(attention.FlexAttention):  # type: ignore[misc]
    """Compute the inner attention of a torchtitan model with attnkit, forward and backward.

    It is an instance of torchtitan's `FlexAttention`, and its configuration of that class's, so
    that models build their block masks as before. Nothing is compiled by `torch.compile` or tuned.
    """

    # torchtitan asks for these two options of dataclasses
    @dataclass(kw_only=True, slots=True)
    class Config(attention.FlexAttention.Config):  # type: ignore[misc]
        """Configures the module.

        Attributes:
            block_size: tile sizes of the block masks that torchtitan builds.
            kernel_options: options of PyTorch's kernels; they are checked and change nothing.
            backend: backend of `attnkit.flex_attention`.
        """

        backend: str = "auto"

    def __init__(self, config: Config) -> None:
        """Create the module of a configuration."""
        super().__init__(config)
        self.backend = config.backend

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: BlockMask | Callable[..., Any],
        score_mod: Callable[..., Any] | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute attention.

        Args:
            q_BLNH: [B, Sq, Hq, D] float16, bfloat16, float32 or float64.
            k_BLNH: [B, Skv, Hkv, D].
            v_BLNH: [B, Skv, Hkv, Dv].
            attention_masks: a `BlockMask`, PyTorch's or attnkit's, a mask of `attnkit.masks`, or a
                `mask_mod(b, h, q, kv) -> bool`.
            score_mod: `score_mod(score, b, h, q, kv) -> score`, or None.
            scale: factor on q k^T; None for 1 / sqrt(D).
            enable_gqa: whether Hkv may be a divisor of Hq.
            out_transform: called with the output [B, Sq, Hq, Dv] and the LSE [B, Sq, Hq], float32,
                natural logarithm; its result is returned. The LSE has its gradient.
            kwargs: arguments for other modules, which torchtitan's module leaves out too.

        Returns:
            out [B, Sq, Hq, Dv], or the result of `out_transform`.

        Raises:
            ArgumentError: `attention_masks` is no mask; several masks by name are for the model.
            UnsupportedError: spmd_types checks the types of this call.
            ShapeError, DTypeError, …: see `attnkit.flex_attention`.
        """
        if not isinstance(attention_masks, BlockMask) and not callable(attention_masks):
            raise ArgumentError(
                "attention_masks must be a BlockMask, a mask of attnkit.masks or a mask_mod, got "
                f"{type(attention_masks).__name__}"
            )
        if get_spmd_backend() == "spmd_types" and spmd_types.is_type_checking():
            raise UnsupportedError(
                "attnkit gives its results no types of spmd_types; switch off type checking, or use "
                "torchtitan's FlexAttention with it"
            )
        out, aux = flex_attention(
            q_BLNH.transpose(1, 2),
            k_BLNH.transpose(1, 2),
            v_BLNH.transpose(1, 2),
            score_mod=score_mod,
            block_mask=attention_masks,
            scale=scale,
            enable_gqa=enable_gqa,
            return_aux=AuxRequest(lse=out_transform is not None),
            kernel_options=self.kernel_options,
            backend=self.backend,
        )
        out = out.transpose(1, 2)
        if out_transform is None:
            return out
        assert aux.lse is not None
        return out_transform(out, aux.lse.transpose(1, 2))
