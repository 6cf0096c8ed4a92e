"""The Hopper backward kernels: their settings, and what they are built from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnkit.sparse import BlockRuns
    from attnkit.splice.backward import Settings
    from attnkit.templates.sm90.hooks import BackwardHooks

ROLES = {
    "load": range(1),
    "add": range(1, 3),
    "clear": range(3, 4),
    "consumer 0": range(4, 8),
    "consumer 1": range(8, 12),
}
OPTIONS = ""
# One for each consumer and chunk. Chunks are half of 64 rows of keys: of values of twice that width
# there are four.
SEMAPHORES = 2, 8


def widths(head_dims: tuple[int, int]) -> tuple[int, int] | None:
    """Head dims as they are computed, None where they are too wide."""
    if max(head_dims) > 256:
        return None
    wide, deep = (-(-d // 64) * 64 for d in head_dims)
    if max(wide, deep) > 128:  # one kernel, see `WideConfig.problem`
        wide = deep = max(wide, deep)
    return wide, deep


def block_q(widths: tuple[int, int], light: bool) -> int:
    """Rows of a q tile."""
    return 128 if widths == (64, 64) and light else 64


def block_kv(widths: tuple[int, int]) -> int:
    """Columns of a kv tile."""
    return 64 if max(widths) > 128 else 128


def switches(
    widths: tuple[int, int], runs: BlockRuns, *, learned: bool, ordered: bool, listed: bool
) -> dict[str, Any]:
    """Nothing: head dims decide."""
    return {}


def config(settings: Settings) -> Any:
    """The settings as the kernels take them."""
    from attnkit.templates.sm90.backward_config import BackwardConfig
    from attnkit.templates.sm90.backward_wide_config import WideConfig

    return (WideConfig if _wide(settings) else BackwardConfig)(**settings.values)


def _wide(settings: Settings) -> bool:
    return max(settings.head_dims) > 128


def prepare(settings: Settings, with_lse: bool) -> Any:
    """The kernel of the rows' statistics."""
    from attnkit.templates.sm90.backward_edges import Prepare

    return Prepare(config(settings), with_lse)


def finish(settings: Settings, width: int, block: int) -> Any:
    """The kernel that rounds a gradient."""
    from attnkit.templates.sm90.backward_edges import Finish

    return Finish(config(settings), width, block)


def main(settings: Settings, hooks: BackwardHooks) -> Any:
    """The kernel of the gradients."""
    from attnkit.templates.sm90.backward import Backward
    from attnkit.templates.sm90.backward_wide import BackwardWide

    return (BackwardWide if _wide(settings) else Backward)(config(settings), hooks)
