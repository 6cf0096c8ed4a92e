"""Define `SelectiveAC`, selective activation checkpointing that saves what attnkit computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.distributed import activation_checkpoint


class SelectiveAC(activation_checkpoint.SelectiveAC):  # type: ignore[misc]
    """Save the outputs of expensive operators, attnkit's attention among them, and recompute others.

    torchtitan lists operators by their names, and has those of PyTorch's attention in its list.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(activation_checkpoint.SelectiveAC.Config):  # type: ignore[misc]
        """Configures the checkpointing, with the fields of torchtitan's class."""

    def get_save_ops(self) -> set[Any]:
        """Return the operators to save: torchtitan's, and attnkit's attention."""
        return {*super().get_save_ops(), torch.ops.attnkit.attention.default}
