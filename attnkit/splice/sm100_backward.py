"""Choose the settings of the Blackwell backward kernels and build the kernels.

`BACKWARD` collects the functions, see `attnkit.splice.backward_template`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attnkit.schedule.scheduler import BACKWARD as BACKWARD_COST
from attnkit.splice.backward_template import BackwardCase, BackwardSettings, BackwardTemplate
from attnkit.splice.sm100_pairs import refusal

if TYPE_CHECKING:
    from attnkit.schedule.split_kv import Cost
    from attnkit.templates.common.hooks import BackwardHooks, RowHooks

ROLES = {
    "add": range(4),
    "compute": range(4, 12),
    "multiply": range(12, 13),
    "load": range(13, 14),
}
# at level 3 the gradients of captured tensors spill registers
OPTIONS = "--opt-level=2"
SEMAPHORES = 1, 1


def widths(head_dims: tuple[int, int]) -> tuple[int, int] | None:
    """Return (head_dim, head_dim_v) rounded up to those of the kernels; None if too wide."""
    wide, deep = head_dims
    if max(head_dims) > 512:
        return None
    if deep > 128 or wide > 192:
        width = next(w for w in (256, 384, 512) if w >= max(head_dims))
        return width, width
    if wide > 128:
        return 192, 128
    return 64 if wide <= 64 else 128, 64 if deep <= 64 else 128


def block_q(widths: tuple[int, int], light: bool) -> int:
    """Return the number of rows of a q tile."""
    return 64 if widths[0] > 128 else 128


def block_kv(widths: tuple[int, int], values: Mapping[str, Any]) -> int:
    """Return the number of columns of a kv tile of one CTA."""
    return 128


def row_sums(widths: tuple[int, int]) -> bool:
    """Return whether the kernels sum gradients times scores over rows: not in these."""
    return False


def switches(case: BackwardCase) -> dict[str, Any]:
    """Return the config flags `two_cta` and `less_lse` (whether the MMA subtracts the LSE)."""
    from attnkit.templates.sm100.backward_config import BackwardConfig

    ctas: dict[str, Any] = {} if refusal(case) else {"two_cta": True}
    sizes: dict[str, Any] = {"head_dim": case.widths[0], "head_dim_v": case.widths[1]}
    sizes |= {"block_q": block_q(case.widths, True), "with_dropout": case.dropout}
    fits = case.additive and not case.learned and BackwardConfig(**sizes, **ctas).less_delta
    return ctas | {"less_lse": fits}


def column_parts(widths: tuple[int, int]) -> int:
    """Return the number of work tiles that share a kv tile, each with a part of the columns."""
    from attnkit.templates.sm100.backward_config import BackwardConfig

    sizes: dict[str, Any] = {"head_dim": widths[0], "head_dim_v": widths[1]}
    return BackwardConfig(**sizes, block_q=block_q(widths, True)).column_parts


def splits(settings: BackwardSettings) -> bool:
    """Return whether several work tiles may share a kv tile: never in this kernel."""
    return False


def cost(settings: BackwardSettings) -> Cost:
    """Return the cost of blocks and tiles in cycles, for the scheduler."""
    return BACKWARD_COST


def first_writer(settings: BackwardSettings) -> bool:
    """Return whether the first kv tile of a row may store dQ without a memset: never here."""
    return False


def config(settings: BackwardSettings) -> Any:
    """Build the config object of the kernels from the settings."""
    from attnkit.templates.sm100.backward_config import BackwardConfig

    return BackwardConfig(**settings.values)


def preprocess(settings: BackwardSettings, with_lse: bool, hooks: RowHooks | None) -> Any:
    """Build the preprocess kernel: the LSE, the delta and the sink's gradient of every row."""
    from attnkit.templates.common.clear_rows import ClearRows
    from attnkit.templates.common.preprocess import Preprocess

    build = ClearRows if settings.weights else Preprocess
    return build(config(settings), with_lse, hooks=hooks)


def row_words(settings: BackwardSettings) -> tuple[int, int]:
    """Return how many float32 words store the LSE, and the delta, of one row."""
    sizes: tuple[int, int] = config(settings).words
    return sizes


def postprocess(settings: BackwardSettings, width: int, block: int, hooks: RowHooks | None) -> Any:
    """Build the postprocess kernel, which rounds float32 sums to a gradient."""
    from attnkit.templates.sm100.backward_postprocess import Postprocess

    return Postprocess(config(settings), width, block)


def main(settings: BackwardSettings, hooks: BackwardHooks) -> Any:
    """Build the main kernel, which computes dQ, dK, dV and gradients of captured tensors."""
    from attnkit.templates.sm100.backward import Backward
    from attnkit.templates.sm100.backward_2cta import Backward2Cta
    from attnkit.templates.sm100.backward_streamed import BackwardStreamed

    built = config(settings)
    kernel = Backward2Cta if built.two_cta else BackwardStreamed if built.streamed else Backward
    return kernel(built, hooks)


BACKWARD = BackwardTemplate(
    roles=ROLES,
    options=OPTIONS,
    semaphores=lambda settings: SEMAPHORES,
    column_parts=column_parts,
    widths=widths,
    block_q=block_q,
    block_kv=block_kv,
    row_sums=row_sums,
    switches=switches,
    one_hot=lambda case: 0,
    entropies=lambda widths, learned, dropout: True,
    weights=lambda widths, learned: True,
    ordered=lambda widths: True,
    packs=lambda case: False,
    splits=splits,
    cost=cost,
    first_writer=first_writer,
    whole_heads=lambda settings: False,
    arrivals=lambda settings: False,
    config=config,
    row_words=row_words,
    preprocess=preprocess,
    postprocess=postprocess,
    main=main,
)
