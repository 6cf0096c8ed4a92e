"""Choose the settings of the Hopper backward kernels and build the kernels.

`BACKWARD` collects the functions, see `attnkit.splice.backward_template`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attnkit.schedule.split_kv import Cost
from attnkit.splice.backward_template import BackwardCase, BackwardSettings, BackwardTemplate

if TYPE_CHECKING:
    from attnkit.templates.common.hooks import BackwardHooks, RowHooks

ROLES = {  # role -> warps, see templates.sm90.backward_shared
    "load": range(1),
    "add": range(1, 3),
    "clear": range(3, 4),
    "consumer 0": range(4, 8),
    "consumer 1": range(8, 12),
}
OPTIONS = ""
WIDEST = 512  # head dim

# Cycles, measured on one H200, bfloat16: blocks of 64 x 128 at head dim 128, of 128 x 128 at 64,
# of 64 x 64 at 256 (without and with roles), and of 64 x 128 at (192, 128). `partial` and `merge`
# are estimates.
_PLAIN = Cost(full=3030, partial=3180, tile=9500, merge=6500)
_TALL = Cost(full=3500, partial=3700, tile=9500, merge=5000)
_WIDE = Cost(full=5700, partial=5850, tile=15000, merge=6000)
_ROLES = Cost(full=4100, partial=4250, tile=15000, merge=6000)
_HD192 = Cost(full=5700, partial=5850, tile=12000, merge=6000)
# Not measured: those of `_WIDE`, and what the exchange between two CTAs may take.
_HD512 = Cost(full=7500, partial=7650, tile=16000, merge=6000)


def widths(head_dims: tuple[int, int]) -> tuple[int, int] | None:
    """Return (head_dim, head_dim_v) rounded up to those of the kernels; None if too wide."""
    if max(head_dims) > WIDEST:
        return None
    if max(head_dims) > 256:
        wide, deep = (-(-d // 128) * 128 for d in head_dims)
        return (512, 512) if 512 in (wide, deep) else (wide, deep)
    wide, deep = (-(-d // 64) * 64 for d in head_dims)
    # (256, 64) and (64, 256) would spill registers; no other pair with 256 has run on a GPU
    return (256, 256) if 256 in (wide, deep) else (wide, deep)


def block_q(widths: tuple[int, int], light: bool) -> int:
    """Return the number of rows of a q block."""
    return 128 if widths == (64, 64) and light else 64


def block_kv(widths: tuple[int, int], values: Mapping[str, Any]) -> int:
    """Return the number of columns of a kv block."""
    columns: int = values.get("block_kv", 64 if max(widths) > 128 else 128)
    return columns


def row_sums(widths: tuple[int, int]) -> bool:
    """Return whether the kernels sum gradients times scores over rows."""
    return max(widths) <= 128


def switches(case: BackwardCase) -> dict[str, Any]:
    """Return the arguments of the config that depend on the variant.

    They are `less_lse`, whether the MMA subtracts the LSE, and `bias_first`, whether the accumulator
    of S is initialised to the bias, for head dims up to 128; `block_kv` for
    (192, 128), if the kernel with blocks of 128 columns can run the variant; `roles` for (256,
    256), if the kernel whose consumers have roles can run it; and `split_columns` above head dim
    256, where two CTAs share a work tile.
    """
    light = case.additive and not case.learned
    if max(case.widths) <= 128:
        full_bias = case.full_bias and not case.dropout
        return {"less_lse": light, **({"bias_first": True} if full_bias else {})}
    in_lists = case.runs.block[1] % 128 and case.lists_override_mask  # blocks cannot be joined
    if max(case.widths) > 256:
        return {"split_columns": True}
    turns = case.deterministic and case.shared  # at dK and dV
    if case.widths == (192, 128) and light and not (case.dropout or in_lists):
        return {"block_kv": 128}
    if case.widths == (256, 256) and light and not (turns or case.dropout):
        return {"roles": True}
    return {}


def one_hot(case: BackwardCase) -> int:
    """Return how many classes of columns the kernel can sum a gradient over in an MMA."""
    from attnkit.templates.sm90.backward_config import CLASSES

    fits = max(case.widths) <= 128 and not (case.deterministic or case.dropout)
    return CLASSES if fits and case.additive else 0


def entropies(widths: tuple[int, int], learned: bool, dropout: bool) -> bool:
    """Return whether the kernels can add the gradient of the rows' entropies."""
    return max(widths) <= 128 and not (learned or dropout)


def packs(case: BackwardCase) -> bool:
    """Return whether one work tile can compute all query heads that share its kv head."""
    return max(case.widths) <= 128 and not (case.learned or case.dropout)


def splits(settings: BackwardSettings) -> bool:
    """Return whether several work tiles may share a kv block."""
    values = settings.values
    return not values["sum_order"] and (values["accumulate"] or not _wide(settings))


def cost(settings: BackwardSettings) -> Cost:
    """Return the cost of blocks and tiles in cycles, for the scheduler."""
    if _is_hd192(settings):
        return _HD192
    if _has_roles(settings):
        return _ROLES
    if settings.split_columns:
        return _HD512
    if _wide(settings):
        return _WIDE
    return _TALL if settings.values["block_q"] == 128 else _PLAIN


def semaphores(settings: BackwardSettings) -> tuple[int, int]:
    """Return how many semaphores order the additions to a tile of dQ, and to one of dK or dV.

    There is one for each consumer of dQ, and one for each consumer and chunk of dK or dV. A chunk is
    64 rows by head_dim / 2, so 64 rows of dV have four chunks if head_dim_v is twice head_dim.
    """
    return 2, 8


def first_writer(settings: BackwardSettings) -> bool:
    """Return whether the first kv tile of a row may store dQ, so that dQ needs no memset."""
    return not _wide(settings)


def whole_heads(settings: BackwardSettings) -> bool:
    """Return whether a CTA may compute all kv tiles of a head and write dQ itself."""
    values = settings.values
    square = values["block_q"] * values["head_dim"] == 2 * 64 * 64  # of a consumer's part of dQ
    shared = values["accumulate"] or settings.one_hot
    return not _wide(settings) and square and not shared


def arrivals(settings: BackwardSettings) -> bool:
    """Return whether the main kernel can sum dQ in the order in which its parts arrive."""
    return whole_heads(settings) and not (settings.deterministic or settings.bias_first)


def config(settings: BackwardSettings) -> Any:
    """Build the config object of the kernels from the settings."""
    if _is_hd192(settings):
        from attnkit.templates.sm90.backward_hd192_config import Hd192Config

        return Hd192Config(**settings.values)
    if _has_roles(settings):
        from attnkit.templates.sm90.backward_hd256_roles_config import Hd256RolesConfig

        return Hd256RolesConfig(**settings.values)
    if settings.split_columns:
        from attnkit.templates.sm90.backward_hd512_config import Hd512Config

        return Hd512Config(**settings.values)
    if _wide(settings):
        from attnkit.templates.sm90.backward_hd256_config import Hd256Config

        return Hd256Config(**settings.values)
    from attnkit.templates.sm90.backward_config import BackwardConfig

    return BackwardConfig(**settings.values)


def _wide(settings: BackwardSettings) -> bool:
    return max(settings.head_dims) > 128


def _is_hd192(settings: BackwardSettings) -> bool:
    return "block_kv" in settings.values


def _has_roles(settings: BackwardSettings) -> bool:
    return "roles" in settings.values


def row_words(settings: BackwardSettings) -> tuple[int, int]:
    """Return how many float32 words store the LSE, and the delta, of one row."""
    sizes: tuple[int, int] = config(settings).words
    return sizes


def preprocess(settings: BackwardSettings, with_lse: bool, hooks: RowHooks | None) -> Any:
    """Build the preprocess kernel: the LSE, the delta and the sink's gradient of every row."""
    from attnkit.templates.common.clear_rows import ClearRows
    from attnkit.templates.common.preprocess import Preprocess

    kernel_config = config(settings)
    build = ClearRows if kernel_config.weights else Preprocess
    return build(kernel_config, with_lse, kernel_config.flags, hooks)


def postprocess(settings: BackwardSettings, width: int, block: int, hooks: RowHooks | None) -> Any:
    """Build the postprocess kernel, which rounds float32 sums to a gradient."""
    from attnkit.templates.sm90.backward_postprocess import Postprocess
    from attnkit.templates.sm90.backward_row_factors import RowFactors

    if hooks is None:
        return Postprocess(config(settings), width, block)
    return RowFactors(config(settings), width, block, hooks)


def main(settings: BackwardSettings, hooks: BackwardHooks) -> Any:
    """Build the main kernel, which computes dQ, dK, dV and gradients of captured tensors."""
    if _is_hd192(settings):
        from attnkit.templates.sm90.backward_hd192 import BackwardHd192

        return BackwardHd192(config(settings), hooks)
    if _has_roles(settings):
        from attnkit.templates.sm90.backward_hd256_roles import BackwardHd256Roles

        return BackwardHd256Roles(config(settings), hooks)
    if settings.split_columns:
        from attnkit.templates.sm90.backward_hd512 import BackwardHd512

        return BackwardHd512(config(settings), hooks)
    from attnkit.templates.sm90.backward import Backward
    from attnkit.templates.sm90.backward_hd256 import BackwardHd256

    return (BackwardHd256 if _wide(settings) else Backward)(config(settings), hooks)


def weights(widths: tuple[int, int], learned: bool) -> bool:
    """Return whether the kernels can compute a backward without a softmax."""
    return max(widths) <= 128 or not learned


BACKWARD = BackwardTemplate(
    roles=ROLES,
    options=OPTIONS,
    semaphores=semaphores,
    column_parts=lambda widths: 1,
    widths=widths,
    block_q=block_q,
    block_kv=block_kv,
    row_sums=row_sums,
    switches=switches,
    one_hot=one_hot,
    entropies=entropies,
    weights=weights,
    ordered=lambda widths: max(widths) <= 256,
    packs=packs,
    splits=splits,
    cost=cost,
    first_writer=first_writer,
    whole_heads=whole_heads,
    arrivals=arrivals,
    config=config,
    row_words=row_words,
    preprocess=preprocess,
    postprocess=postprocess,
    main=main,
)
