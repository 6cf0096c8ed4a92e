"""The Blackwell backward kernels: their settings, and what they are built from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnkit.schedule.scheduler import BACKWARD as BACKWARD_COST
from attnkit.splice.sm100_pairs import refusal
from attnkit.splice.template import BackwardCase, BackwardSettings, BackwardTemplate

if TYPE_CHECKING:
    from attnkit.schedule.split_kv import Cost
    from attnkit.templates.common.hooks import BackwardHooks

ROLES = {
    "add": range(4),
    "compute": range(4, 12),
    "multiply": range(12, 13),
    "load": range(13, 14),
}
# at level 3 captured gradients spill
OPTIONS = "--opt-level=2"
SEMAPHORES = 1, 1


def widths(head_dims: tuple[int, int]) -> tuple[int, int] | None:
    """Head dims as they are computed, None where they are too wide."""
    wide, deep = head_dims
    if deep > 128 or wide > 192:
        return None
    if wide > 128:
        return 192, 128
    return 64 if wide <= 64 else 128, 64 if deep <= 64 else 128


def block_q(widths: tuple[int, int], light: bool) -> int:
    """Rows of a q tile."""
    return 64 if widths[0] == 192 else 128


def block_kv(widths: tuple[int, int]) -> int:
    """Columns of a kv tile."""
    return 128


def switches(case: BackwardCase) -> dict[str, Any]:
    """Whether pairs of CTAs share a work tile, and whether LSE is a part of the products."""
    from attnkit.templates.sm100.backward_config import BackwardConfig

    pair: dict[str, Any] = {} if refusal(case) else {"pair": True}
    sizes: dict[str, Any] = {"width": case.widths[0], "value_width": case.widths[1]}
    fits = case.additive and not case.learned and BackwardConfig(**sizes, **pair).less_delta
    return pair | {"less_lse": fits}


def splits(settings: BackwardSettings) -> bool:
    """Whether several work tiles may share a kv tile."""
    return False


def prices(settings: BackwardSettings) -> Cost:
    """What the work costs."""
    return BACKWARD_COST


def stores(settings: BackwardSettings) -> bool:
    """Whether the first part of a sum of dQ may be stored, which is not cleared then."""
    return False


def config(settings: BackwardSettings) -> Any:
    """The settings as the kernels take them."""
    from attnkit.templates.sm100.backward_config import BackwardConfig

    return BackwardConfig(**settings.values)


def prepare(settings: BackwardSettings, with_lse: bool) -> Any:
    """The kernel of the rows' statistics."""
    from attnkit.templates.common.preprocess import Preprocess

    return Preprocess(config(settings), with_lse)


def words(settings: BackwardSettings) -> tuple[int, int]:
    """Float32 words of a row's LSE and of its delta."""
    found: tuple[int, int] = config(settings).words
    return found


def finish(settings: BackwardSettings, width: int, block: int) -> Any:
    """The kernel that rounds a gradient."""
    from attnkit.templates.sm100.backward_postprocess import Postprocess

    return Postprocess(config(settings), width, block)


def main(settings: BackwardSettings, hooks: BackwardHooks) -> Any:
    """The kernel of the gradients."""
    from attnkit.templates.sm100.backward import Backward
    from attnkit.templates.sm100.backward_2cta import Backward2Cta

    return (Backward2Cta if settings.ctas > 1 else Backward)(config(settings), hooks)


BACKWARD = BackwardTemplate(
    roles=ROLES,
    options=OPTIONS,
    semaphores=SEMAPHORES,
    widths=widths,
    block_q=block_q,
    block_kv=block_kv,
    switches=switches,
    splits=splits,
    cost=prices,
    first_writer=stores,
    config=config,
    row_words=words,
    preprocess=prepare,
    postprocess=finish,
    main=main,
)
