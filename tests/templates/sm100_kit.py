"""Run the Blackwell forward kernel in the emulator with any configuration."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnkit import emulator
from attnkit.codegen.forward_hooks import GraphForward
from attnkit.jit.build import compile_source
from attnkit.jit.kernel import Build, CompiledKernel, Source
from attnkit.runtime.variant import Variant
from attnkit.schedule.scheduler import Shape, schedule_forward
from attnkit.schedule.work_list import WorkList, full_runs, refine, work_list
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.splice import Captured
from attnkit.splice.captured_arguments import read_captured, tensor_kinds
from attnkit.splice.fake_arguments import forward_arguments
from attnkit.splice.forward import captured_arguments
from attnkit.splice.forward_variant import forward_variant, shapes_of
from attnkit.splice.mask_intervals import row_intervals
from attnkit.templates.sm100.config import ForwardConfig, options_of
from attnkit.templates.sm100.forward import Forward

WORKERS = 2  # CTAs: few, so that each computes several tiles
OUTPUTS = (3, 4, 5)


@dataclass(frozen=True, eq=False)
class Case:
    """Hold a kernel and the arguments of one call.

    Attributes:
        exe: the kernel, compiled for the emulator.
        arguments: arguments of the call; outputs are at the indices `OUTPUTS`.
        work: the work list.
        stack: bytes of spilled registers per thread.
    """

    exe: emulator.Executable
    arguments: tuple[Any, ...]
    work: Any
    stack: int

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return out, LSE and the row maxima."""
        return self.arguments[3], self.arguments[4], self.arguments[5]

    @property
    def counter(self) -> Tensor:
        """Return the counter from which CTAs take work tiles."""
        return self.arguments[9]

    def marked(self) -> list[Any]:
        """Return the arguments with the outputs marked as undefined."""
        return [emulator.Undefined(a) if i in OUTPUTS else a for i, a in enumerate(self.arguments)]


def width(head_dim: int) -> int:
    """Return the head dim to which a kernel pads `head_dim`."""
    return next(w for w in (64, 96, 128, 192, 256) if head_dim <= w)


def settings_of(dims: tuple[int, int]) -> dict[str, Any]:
    """Return the config fields, besides the head dims, that `dims` requires."""
    wide, deep = width(dims[0]), width(dims[1])
    if deep > 128:
        return {"q_tiles": 1, "alias": wide >= deep}
    return {"alias": wide > 128}


def config_of(dtype: torch.dtype, dims: tuple[int, int], settings: dict[str, Any]) -> ForwardConfig:
    """Build the forward config for `dims`, with `settings` overriding its fields."""
    sizes = {"head_dim": width(dims[0]), "head_dim_v": width(dims[1])}
    fields = {"dtype": str(dtype).removeprefix("torch.")} | sizes | settings_of(dims) | settings
    return ForwardConfig(**fields)


@functools.lru_cache(maxsize=64)
def _compiled(key: Any, build: Any) -> tuple[emulator.Executable, int]:
    return build()


def compiled(kernel: Any, fakes: tuple[Any, ...], options: str) -> tuple[emulator.Executable, int]:
    """Compile a kernel for the emulator; return it and its spilled bytes per thread."""
    source = Source("kernel of a test", "sm_100a", lambda: Build(kernel, fakes, options))
    result = CompiledKernel(compile_source(source), "forward")
    (stats,) = result.stats
    return result.executable(), stats.stack


def scheduled(
    runs: BlockRuns | None,
    qkv: tuple[Tensor, Tensor, Tensor],
    block: tuple[int, int],
    workers: int,
    split: bool,
) -> WorkList:
    """Return the work list of `runs` (all blocks if None) in tiles of `block`."""
    query, key, value = qkv
    runs = refine(runs or full_runs(query.shape[2], key.shape[2], block, query.device), block)
    traffic = 2 * block[1] * (query.shape[3] + value.shape[3])
    shape = Shape(*query.shape[:2], traffic, kv_heads=key.shape[1], kv_batch=key.shape[0])
    return work_list(runs, schedule_forward(runs, shape, workers=workers, split=split))


def case(
    qkv: tuple[Tensor, Tensor, Tensor],
    score: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    split: bool = False,
    workers: int = WORKERS,
    **settings: Any,
) -> Case:
    """Prepare a call of the forward kernel; `settings` override fields of the config."""
    query, key, value = qkv
    batch, heads, q_len, head_dim = query.shape
    dims = head_dim, value.shape[-1]
    config = config_of(query.dtype, dims, settings)
    block = config.block_q, config.block_kv
    bound = Variant(score, mask).bind(query, key, block)
    program = bound.program
    captured = Captured(
        bound.score.tensors if bound.score else (),
        bound.mask.tensors if bound.mask else (),
    )
    ends, mask_tensors = row_intervals(program.mask, captured.masks, query, key)
    lengths = batch, heads, q_len, key.shape[2]
    shapes = shapes_of(captured.scores), shapes_of(mask_tensors)
    variant = forward_variant(program.score, program.mask, ends, lengths, shapes)
    read = Captured(captured.scores, mask_tensors)
    slots = tuple(captured_arguments(variant, captured, read, query.device))
    tensors = read_captured(slots, captured, query.device)
    work = scheduled(bound.runs, qkv, block, workers, split)
    scale = dims[0] ** -0.5 if scale is None else scale
    hooks = GraphForward(
        variant.form,
        variant.mask,
        variant.ends,
        scores=len(variant.slots[0]),
        lists_override_mask=program.lists_override_mask,
        positive=scale > 0,
        indices=variant.indices,
    )
    kinds = tensor_kinds(tensors)
    tile = block[0], config.head_dim_v
    fakes = forward_arguments(config.dtype, *dims, tile, kinds)
    key_ = (config, dims, kinds, program, ends, scale > 0, variant.indices)
    build = lambda: compiled(Forward(config, hooks), fakes, options_of(hooks))
    exe, stack = _compiled(key_, _Once(key_, build))
    nan = lambda *s: torch.full(s, float("nan"))
    out = nan(batch, heads, q_len, dims[1]).to(query.dtype)
    lse = nan(batch, heads, q_len)
    top = nan(batch, heads, q_len) if config.need_max else lse
    slots = max(1, work.slots)
    counter = torch.zeros(1, dtype=torch.int32)
    split_out, split_lse = nan(slots, *tile), nan(slots, tile[0])
    group, ctas = heads // key.shape[1], min(workers, work.work_tiles.shape[0])
    arguments = (
        query, key, value, out, lse, top, work.work_tiles, work.partial, work.full,
        counter, split_out, split_lse, *tensors, scale, group, ctas,
    )  # fmt: skip
    return Case(exe, arguments, work, stack)


def join_parts(case: Case) -> None:
    """Combine the partial results of split rows into out and LSE, in float64, in place."""
    out, lse, _ = case.results()
    parts, part_lse = case.arguments[10].double(), case.arguments[11].double()
    slots = case.work.split_ptr.tolist()
    for (b, h, tile), first, last in zip(
        case.work.split.tolist(), slots[:-1], slots[1:], strict=True
    ):
        rows = slice(tile * parts.shape[1], min((tile + 1) * parts.shape[1], lse.shape[2]))
        count, dim = rows.stop - rows.start, out.shape[3]
        total = part_lse[first:last, :count].logsumexp(0)
        weights = (part_lse[first:last, :count] - total).exp().nan_to_num(0.0)
        joined = (weights[:, :, None] * parts[first:last, :count, :dim]).sum(0)
        out[b, h, rows], lse[b, h, rows] = joined.to(out.dtype), total.float()


class _Once:
    """Callable that compares equal to others with the same key."""

    def __init__(self, key: Any, function: Any) -> None:
        self.key, self.function = key, function

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Once) and self.key == other.key

    def __call__(self) -> Any:
        return self.function()
