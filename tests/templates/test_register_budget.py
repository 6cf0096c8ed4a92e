"""Check that warpgroups never ask for more registers than a kernel was launched with.

A consumer warpgroup that raises its registers beyond what the producer warpgroup has given up waits
forever on a GPU. The emulator does not count registers.
"""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.templates.sm90.backward_config import BackwardConfig
from attnkit.templates.sm90.backward_hd192_config import Hd192Config
from attnkit.templates.sm90.backward_hd256_config import Hd256Config
from attnkit.templates.sm90.backward_hd256_roles_config import Hd256RolesConfig
from attnkit.templates.sm90.backward_hd512_config import Hd512Config as Hd512BackwardConfig
from attnkit.templates.sm90.config import ForwardConfig
from attnkit.templates.sm90.forward_hd512_config import Hd512Config

REGISTERS = 65536  # of an SM
LARGEST = 255  # registers of a thread at launch
WARPGROUP = 128  # threads


def at_launch(warpgroups: int) -> int:
    """Return the registers of a thread with which a kernel of one CTA per SM is launched."""
    return min(REGISTERS // (warpgroups * WARPGROUP), LARGEST) // 8 * 8


def check(consumers: int, consumer: int, producer: int) -> None:
    """Check the registers per thread of a number of consumer warpgroups and of one producer."""
    warpgroups = consumers + 1
    assert consumers * consumer + producer <= warpgroups * at_launch(warpgroups)
    assert consumer % 8 == producer % 8 == 0


@pytest.mark.parametrize(
    ("dims", "warpgroups"),
    list(itertools.product([(64, 64), (128, 128), (192, 128), (256, 256)], (1, 2, 3))),
)
def test_forward(dims: tuple[int, int], warpgroups: int) -> None:
    config = ForwardConfig(head_dim=dims[0], head_dim_v=dims[1], warpgroups=warpgroups)
    check(warpgroups, *config.registers)


def test_forward_that_copies_a_bias() -> None:
    check(2, *ForwardConfig(bias_first=True, bias_stages=2).registers)


@pytest.mark.parametrize("value_columns", [128, 256])
def test_forward_above_256(value_columns: int) -> None:
    config = Hd512Config(head_dim=512, head_dim_v=value_columns)
    check(config.warpgroups, *config.registers)


@pytest.mark.parametrize(
    "config",
    [
        BackwardConfig(),
        BackwardConfig(head_dim=64, head_dim_v=64, block_q=128),
        BackwardConfig(bias_first=True),
        Hd192Config(),
        Hd256Config(),
        Hd256Config(head_dim=192, head_dim_v=192),
        Hd256RolesConfig(),
        Hd512BackwardConfig(),
    ],
)
def test_backward(config: BackwardConfig) -> None:
    check(2, config.consumer_registers, config.producer_registers)
