"""Choose the settings of the Blackwell forward kernel for a variant and build the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnkit.codegen.score_form import ScoreForm
from attnkit.graph import ir
from attnkit.jit.artifact import Build
from attnkit.schedule.kernel_table import Kernel, padded_head_dims
from attnkit.schedule.targets import SM103
from attnkit.splice.forward_template import ForwardTemplate
from attnkit.splice.forward_variant import ForwardVariant
from attnkit.splice.sm100_tiles import choose_kernel

if TYPE_CHECKING:
    from attnkit.splice.kernel_layout import Layout

__all__ = [
    "build",
    "choose_kernel",
    "config_of",
    "fit_registers",
    "layout_of",
    "poly_of",
    "tile_of",
]

# operations that run on the same hardware unit as exponentials
_SPECIAL = frozenset(
    "exp exp2 expm1 log log2 log1p sqrt rsqrt tanh sigmoid sin cos div pow hypot atan2 erfinv lgamma digamma".split()
)


def fit_registers(kernel: Kernel, form: ScoreForm, masked: bool, dropout: bool) -> Kernel:
    """Return `kernel` unchanged: it reads scores from tensor memory in parts without spilling."""
    return kernel


def config_of(
    form: ScoreForm,
    kernel: Kernel,
    dtype: str,
    head_dims: tuple[int, int],
    need_max: bool,
    need_entropy: bool,
    arch: str,
) -> dict[str, Any]:
    """Return the arguments of the `ForwardConfig` of `templates.sm100` for a variant."""
    from attnkit.templates.sm100.config import ForwardConfig

    head_dim, head_dim_v = padded_head_dims(head_dims, kernel.value_parts)
    if kernel.lacks_o_smem:  # the output tile takes the place of the query tile
        head_dim = max(head_dim, head_dim_v)
    config: dict[str, Any] = {
        "dtype": dtype,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "value_parts": kernel.value_parts,
        "block_kv": kernel.block[1],
        "q_tiles": kernel.block[0] // (128 * kernel.ctas),
        "two_cta": kernel.ctas == 2,
        # a counter balances uneven work tiles; a pair would have to pass its value between its CTAs
        "work": "counter" if kernel.ctas == 1 else "clc",
        "alias": kernel.lacks_o_smem,
        "poly": poly_of(form, arch),
        "need_max": need_max,
        "need_entropy": need_entropy,
    }
    if form.weight:
        config["weights"] = form.weight
    # Q K in halves shortens the dependent chain of a tile but reads Q twice; with wide heads shared
    # memory would become the limit
    narrow = max(head_dim, head_dim_v) <= 64 and kernel.block == (256, 128)
    return config | {"halves": narrow and ForwardConfig(**config).stages >= 4}


def poly_of(form: ScoreForm, arch: str) -> int:
    """Return n such that FMA units compute every n-th pair of exponentials; 0 for no pair.

    The values are the best in the predicted timeline (`attnkit explain --arch sm_100a`). They have
    not been measured.
    """
    if arch == SM103.arch:  # its exponential unit is twice as fast
        return 0
    elements = [n for n in (form.factor, form.bias) if n is not None and "score" in ir.reads(n)]
    if any(n.op in _SPECIAL and "score" in ir.reads(n) for n in ir.topo(*elements)):
        return 2  # the mod needs the exponential unit as often as the softmax does
    return 3


def tile_of(kernel: Kernel, head_dims: tuple[int, int]) -> tuple[int, int]:
    """Return (rows, columns) of the kernel's output tile."""
    return kernel.block[0], kernel.value_parts * padded_head_dims(head_dims, kernel.value_parts)[1]


def layout_of(config: dict[str, Any]) -> Layout:
    """Return the warp roles and the memory layout of the kernel with this config."""
    from attnkit.splice.kernel_layout import Layout, Role
    from attnkit.templates.sm100.config import ForwardConfig

    settings = ForwardConfig(**config)
    roles = tuple(Role(name, *inside) for name, inside in settings.roles.items())
    return Layout(roles, tuple(settings.tmem), settings.smem_bytes, settings.stages, settings.work)


def build(
    variant: ForwardVariant,
    config: dict[str, Any],
    head_dims: tuple[int, int],
    captured: tuple[tuple[str, int, bool], ...],
    positive: bool,
) -> Build:
    """Build the forward kernel of a variant and the fake arguments to compile it with."""
    from attnkit.splice.fake_arguments import forward_arguments
    from attnkit.templates.sm100.config import ForwardConfig, options_of
    from attnkit.templates.sm100.forward import Forward

    settings = ForwardConfig(**config)
    tile = settings.block_q, settings.value_parts * settings.head_dim_v
    needed = settings.need_entropy
    arguments = forward_arguments(settings.dtype, *head_dims, tile, captured, needed)
    hooks = variant.hooks(positive)
    return Build(Forward(settings, hooks), arguments, options_of(hooks))


FORWARD = ForwardTemplate(
    choose=choose_kernel,
    fit=fit_registers,
    config=config_of,
    tile=tile_of,
    build=build,
    layout=layout_of,
    pair_table=lambda config, shape: False,
    edge_only=lambda form, config: False,
    checks_data=False,
)
