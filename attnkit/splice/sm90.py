"""Choose the settings of the Hopper forward kernel for a variant and build the kernel."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnkit.codegen.instruction_cost import instructions
from attnkit.codegen.score_form import ScoreForm
from attnkit.graph import ir
from attnkit.graph.ir import Node
from attnkit.graph.staging import is_relative
from attnkit.jit.artifact import Build
from attnkit.schedule.kernel_table import (
    TALL_TILE_LIMIT,
    Kernel,
    fitting_kernel,
    padded_head_dims,
)
from attnkit.schedule.work_list import retile
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.splice.copied_bias import copied_bias
from attnkit.splice.forward_template import ForwardTemplate
from attnkit.splice.forward_variant import ForwardVariant

if TYPE_CHECKING:
    from torch import Tensor

    from attnkit.splice.kernel_layout import Layout
    from attnkit.templates.sm90.config import ForwardConfig

# Bound on |score| in log2 units below which the softmax needs no row maximum: float32 sums and
# bfloat16 P can represent 2**48.
CEILING = 48.0
WIDEST = (128, 80)  # tile sizes for the widest head dims
NARROW = 64  # columns of that tile with a score_mod
EXTRA_STEPS = "slope_in_mma", "columns_in_mma"  # switches of the config for scales above 0
LIGHT_TERM = 24  # most instructions of a term that one warp computes for all columns of a block


def choose_kernel(
    candidates: Sequence[Kernel],
    head_dims: tuple[int, int],
    runs: BlockRuns | None,
    lists_override_mask: bool,
    form: ScoreForm,
) -> tuple[Kernel, str]:
    """Choose the kernel with the mask's tile sizes, else the best that fits; return the reason too.

    `runs` holds the tiles to visit; None for all. If they can be joined to the tiles of several
    kernels, the taller tiles are chosen unless they visit too many scores.
    """
    if runs is None:
        return candidates[0], "nothing is masked"
    joined = [k for k in candidates if _joins(runs.block, k.block)]
    if lists_override_mask or not joined or any(k.block == runs.block for k in candidates):
        return fitting_kernel(
            candidates, runs.block, lists_override_mask
        ), "its tiles fit those of the mask"
    best, *others = joined
    if not others:
        return best, "its tiles are joined from those of the mask"
    scores, fewer = visited_scores(runs, best.block), visited_scores(runs, others[0].block)
    more = f"{scores / fewer - 1:.0%} more scores" if fewer else "nothing either"
    if scores > TALL_TILE_LIMIT * fewer:
        return others[0], f"tiles of {best.block[0]} rows would visit {more}"
    return best, f"tiles of {others[0].block[0]} rows are slower; these visit {more}"


def _joins(block: tuple[int, int], larger: tuple[int, int]) -> bool:
    """Return whether several tiles of size `block`, one below the other, make one of size `larger`."""
    return block[1] == larger[1] and block[0] < larger[0] and larger[0] % block[0] == 0


def visited_scores(runs: BlockRuns, block: tuple[int, int]) -> int:
    """Count the scores that a kernel with tiles of size `block` computes, masked ones included."""
    _, partial, full = retile(runs, block).counts()
    return (partial + full) * block[0] * block[1]


def fit_registers(kernel: Kernel, form: ScoreForm, masked: bool, dropout: bool) -> Kernel:
    """Adapt the tile size and the softmax of a kernel to the registers that a variant needs.

    The accumulator of S is initialised to a full bias, unless dropout needs registers. Otherwise the
    columns of a tile are halved if the score_mod loads a value for each score. They are also
    halved at wide head dims with a mask if it computes log1p, and at the widest head dims, with or
    without a mask, if it loads a value for each q - kv. At the widest head dims with a mask, the
    bounds of the mask leave no registers for double buffering of P.
    """
    if kernel.block[0] > 128 and form.slope is not None and not form.only_slope:
        # planned as a mod that adds a slope alone, but a number is read at run time
        kernel = Kernel((128, 128))
    if masked and kernel.block == WIDEST:
        kernel = replace(kernel, softmax="online", double_buffer_p=False)
    parts = (n for n in (form.factor, form.bias, form.slope) if n is not None)
    tight = masked and kernel.lacks_o_smem
    narrow = kernel.lacks_o_smem and kernel.block[1] == NARROW
    if form.full_bias and not (kernel.lacks_o_smem or dropout):
        return replace(kernel, bias_first=True)
    if not any(_loads(n, narrow) or (tight and n.op == "log1p") for n in ir.topo(*parts)):
        return kernel
    rows, columns = kernel.block
    return replace(kernel, block=(rows, columns // 2))


def _loads(n: Node, relative: bool) -> bool:
    """Return whether a node loads a value for each score, or for each q - kv if `relative`."""
    return n.op == "load" and {"q", "kv"} <= ir.reads(n) and (relative or not is_relative(n))


def config_of(
    form: ScoreForm,
    kernel: Kernel,
    dtype: str,
    head_dims: tuple[int, int],
    need_max: bool,
    need_entropy: bool,
    arch: str = "sm_90a",
) -> dict[str, Any]:
    """Return the arguments of the `ForwardConfig` of `templates.sm90` for a variant.

    Those for head dims above 256 are of an `Hd512Config`, see `settings_of`.
    """
    head_dim, head_dim_v = padded_head_dims(head_dims, kernel.value_parts)
    wide = max(head_dims) > 256
    config: dict[str, Any] = {
        "dtype": dtype,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "block_kv": kernel.block[1],
        "warpgroups": kernel.block[0] // 64,
        "softmax": kernel.softmax,
        "double_buffer_p": kernel.double_buffer_p,
        "store_from_registers": kernel.lacks_o_smem,
        "need_max": need_max,
        "need_entropy": need_entropy,
    }
    if wide:
        config["value_parts"] = kernel.value_parts
    if form.weight:
        # a second P buffer would serialise the products: no branch separates them from its writes
        kind = "sigmoid" if form.weight == "sigmoid" else "none"
        config |= {"softmax": kind, "double_buffer_p": False}
    elif form.only_slope and max(head_dim, head_dim_v) <= 128:
        # at larger head dims the operands fit neither in shared memory nor in registers
        config["slope_in_mma"] = True
    elif _adds_columns_in_mma(form) and max(head_dim, head_dim_v) <= 128:
        config["columns_in_mma"] = True
    elif kernel.bias_first:
        config["bias_first"] = True
        if kernel.bias_stages:
            config |= {"bias_stages": kernel.bias_stages, "bias_bytes": kernel.bias_bytes}
        if need_entropy:  # its exponents occupy the registers that a second P would need
            config |= {"softmax": "online", "double_buffer_p": False}
    elif (
        form.ceiling is not None
        and form.ceiling <= CEILING
        and dtype == "bfloat16"
        and not need_max
    ):
        # without a row maximum the exponential unit is the limit, as the mod has a tanh
        config |= {
            "softmax": "no-max",
            "double_buffer_p": False,
            "exp_before_wait": True,
            "poly": 4,
        }
    elif (
        form.slope is not None and (wide or config["head_dim"] > (64 if need_entropy else 128))
    ) or (need_entropy and (wide or kernel.block == WIDEST)):
        # the terms per column, or exponents, occupy the registers that a second P would need
        config |= {"softmax": "online", "double_buffer_p": False}
    return config


def _adds_columns_in_mma(form: ScoreForm) -> bool:
    """Return whether one warp has time and registers for the term of each column.

    The addresses of a second table of floats spilled registers.
    """
    if form.bias is None or not form.only_column:
        return False
    loads = [n.type for n in ir.topo(form.bias) if n.op == "load"]
    return loads.count(ir.F32) <= 1 and len(loads) <= 2 and instructions(form.bias) <= LIGHT_TERM


def tile_of(kernel: Kernel, head_dims: tuple[int, int]) -> tuple[int, int]:
    """Return (rows, columns) of the kernel's output tile."""
    return kernel.block[0], kernel.value_parts * padded_head_dims(head_dims, kernel.value_parts)[1]


def settings_of(config: dict[str, Any]) -> ForwardConfig:
    """Return the config object of the kernel: an `Hd512Config` for head dims above 256."""
    if "value_parts" in config:
        from attnkit.templates.sm90.forward_hd512_config import Hd512Config

        return Hd512Config(**config)
    from attnkit.templates.sm90.config import ForwardConfig

    return ForwardConfig(**config)


def layout_of(config: dict[str, Any]) -> Layout:
    """Return the warp roles and the memory layout of the kernel with this config."""
    from attnkit.splice.kernel_layout import Layout, Role

    settings = settings_of(config)
    consumer, producer = settings.registers
    groups = range(settings.warpgroups)
    consumers = (Role(f"consumer {w}", range(4 + 4 * w, 8 + 4 * w), consumer) for w in groups)
    copies = (Role("copy bias", range(2, 4), producer),) if "bias_stages" in config else ()
    roles = (Role("load", range(1), producer), *copies, *consumers)
    return Layout(roles, (), settings.smem_bytes, 2 * settings.stages)


def pair_table(config: dict[str, Any], shape: Sequence[int]) -> bool:
    """Return whether the kernel with this config has room for a table of pairs of this shape."""
    from attnkit.templates.sm90.config import (
        SMEM_BYTES,
        TABLE_COLUMNS,
        TABLE_ROWS,
        ForwardConfig,
    )

    if "value_parts" in config:  # Q, K and V leave no room
        return False
    settings = ForwardConfig(**config | {"pair_table": True})
    small = shape[-2] <= TABLE_ROWS and shape[-1] <= TABLE_COLUMNS
    return small and settings.smem_bytes <= SMEM_BYTES


def copy_bias(
    kernel: Kernel,
    head_dims: tuple[int, int],
    variant: ForwardVariant,
    tensors: Sequence[Tensor],
) -> Kernel:
    """Adapt a kernel to a bias that idle warps copy to shared memory, if they can.

    Tiles of half as many columns leave more room. A copy has to begin at least a block ahead.

    Args:
        kernel: a kernel with `bias_first`.
        head_dims: head dims of query and key, and of value.
        variant: the variant that the kernel computes.
        tensors: tensors that its score_mod reads, by slot.
    """
    from attnkit.templates.sm90.config import SMEM_BYTES, WARPGROUP_ROWS, ForwardConfig

    bias = copied_bias(variant.form.bias, tensors, variant.indices)
    rows, widest = kernel.block
    if bias is None or rows != 2 * WARPGROUP_ROWS:  # two idle warps copy, one for each warpgroup
        return kernel
    size = bias.element_size()
    head_dim, head_dim_v = padded_head_dims(head_dims)
    for columns, stages in itertools.product((widest, min(widest, NARROW)), (4, 2)):
        config = ForwardConfig(
            head_dim=head_dim, head_dim_v=head_dim_v, block_kv=columns, bias_first=True,
            bias_stages=stages, bias_bytes=size,
        )  # fmt: skip
        if config.smem_bytes <= SMEM_BYTES:
            return replace(kernel, block=(rows, columns), bias_stages=stages, bias_bytes=size)
    return kernel


def edge_only(form: ScoreForm, config: dict[str, Any]) -> bool:
    """Return whether a call without a mask is told that only its last kv block may need one.

    This is so for a score_mod whose index into a table is itself loaded for each column or score,
    such as T5's. Its kernel then has a loop less, so that it compiles faster. Loops with simpler
    loads are short. Without one of them, a relative bias at head dim 128 would spill registers.
    """
    parts = (n for n in (form.factor, form.bias) if n is not None)
    loads = [n for n in ir.topo(*parts) if n.op == "load" and "kv" in ir.reads(n)]
    nested = any(index in loads for n in loads for index in ir.topo(*n.args))
    return nested and "value_parts" not in config


def build(
    variant: ForwardVariant,
    config: dict[str, Any],
    head_dims: tuple[int, int],
    captured: tuple[tuple[str, int, bool], ...],
    positive: bool,
) -> Build:
    """Build the forward kernel of a variant and the fake arguments to compile it with."""
    from attnkit.splice.fake_arguments import forward_arguments
    from attnkit.templates.sm90.forward_hd512_config import Hd512Config

    if not positive:  # the MMA's operand is divided by the scale
        config = {name: x for name, x in config.items() if name not in EXTRA_STEPS}
    settings = settings_of(config)
    names = "slope_in_mma", "bias_first", "columns_in_mma"
    hooks = variant.hooks(positive, *(config.get(name, False) for name in names))
    parts = settings.value_parts if isinstance(settings, Hd512Config) else 1
    tile, needed = (settings.block_q, parts * settings.head_dim_v), settings.need_entropy
    arguments = forward_arguments(settings.dtype, *head_dims, tile, captured, needed)
    if isinstance(settings, Hd512Config):
        from attnkit.templates.sm90.forward_hd512 import ForwardHd512

        return Build(ForwardHd512(settings, hooks), arguments)
    from attnkit.templates.sm90.forward import Forward

    return Build(Forward(settings, hooks), arguments)


FORWARD = ForwardTemplate(
    choose=choose_kernel,
    fit=fit_registers,
    config=config_of,
    tile=tile_of,
    build=build,
    layout=layout_of,
    pair_table=pair_table,
    edge_only=edge_only,
    checks_data=True,
    copy_bias=copy_bias,
)
