"""The Hopper forward kernel: its settings for a variant, and what it is built from."""

from __future__ import annotations

from typing import Any

from attnkit.compiled import Build
from attnkit.kernel_table import Kernel, width
from attnkit.score_form import ScoreForm
from attnkit.splice.forward import Spliced
from attnkit.splice.layout import Layout, Role

# |x| in log2 up to which no maximum is needed: sums of float32 and P of bfloat16 hold 2**48 safely
CEILING = 48.0


def config_of(
    form: ScoreForm,
    chosen: Kernel,
    dtype: str,
    head_dims: tuple[int, int],
    need_max: bool,
    arch: str = "sm_90a",
) -> dict[str, Any]:
    """The arguments of a `ForwardConfig`."""
    config: dict[str, Any] = {
        "dtype": dtype,
        "width": width(head_dims[0]),
        "value_width": width(head_dims[1]),
        "block_kv": chosen.block[1],
        "warpgroups": chosen.block[0] // 64,
        "softmax": chosen.softmax,
        "early": chosen.early,
        "pingpong": chosen.pingpong,
        "alias": chosen.alias,
        "need_max": need_max,
    }
    if chosen.alias:  # the output tile takes the place of the query tile
        config["width"] = max(config["width"], config["value_width"])
    if (
        form.ceiling is not None
        and form.ceiling <= CEILING
        and dtype == "bfloat16"
        and not need_max
    ):
        # no maximum at all; then the exponential unit is the limit, with a tanh before it
        config |= {"softmax": "bounded", "early": False, "hold": True, "poly": 4}
    elif form.slope is not None and config["softmax"] == "stale":
        # the columns' terms are held in registers that a second P would need
        config |= {"softmax": "online", "early": False}
    return config


def tile_of(chosen: Kernel, head_dims: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of a tile of the output."""
    return chosen.block[0], width(head_dims[1])


def layout_of(config: dict[str, Any]) -> Layout:
    """The inside of the kernel."""
    from attnkit.templates.sm90.config import ForwardConfig

    settings = ForwardConfig(**config)
    consumer, producer = settings.registers
    groups = range(settings.warpgroups)
    consumers = (Role(f"consumer {w}", range(4 + 4 * w, 8 + 4 * w), consumer) for w in groups)
    roles = (Role("load", range(1), producer), *consumers)
    return Layout(roles, (), settings.smem_bytes, 2 * settings.stages)


def build(
    variant: Spliced,
    config: dict[str, Any],
    head_dims: tuple[int, int],
    captured: tuple[tuple[str, int, bool], ...],
    positive: bool,
) -> Build:
    """The kernel with stand-ins of its arguments."""
    from attnkit.splice.fakes import forward_arguments
    from attnkit.templates.sm90.config import ForwardConfig
    from attnkit.templates.sm90.forward import Forward

    settings = ForwardConfig(**config)
    tile = settings.block_q, settings.value_width
    arguments = forward_arguments(settings.dtype, *head_dims, tile, captured)
    return Build(Forward(settings, variant.hooks(positive)), arguments)
