"""`BlockMask`: a mask with its lengths and its tiles, as FlexAttention's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnkit.errors import ArgumentError, OptionError, ShapeError
from attnkit.graph.eval_torch import evaluate
from attnkit.graph.ir import Node, reads
from attnkit.sparsity.block_runs import BLOCK, BlockRuns
from attnkit.sparsity.classify import classify
from attnkit.sparsity.index_bounds import check_bounds
from attnkit.sparsity.intervals.normal_form import Intervals, find_intervals
from attnkit.sparsity.intervals.tiles import tiles_of
from attnkit.tracing.float64_checks import compute_dtype
from attnkit.tracing.guards import trace_cached
from attnkit.tracing.mask import check_built_for
from attnkit.tracing.tracer import Kind, Traced, takes
from attnkit.util import caches
from attnkit.util.arguments import check_captured, check_size
from attnkit.util.devices import resolved
from attnkit.util.tensor_cache import VersionedCache

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

_ON_HOST = 1 << 16  # rows and columns together

_runs: VersionedCache[tuple[BlockRuns, frozenset[Node]]] = VersionedCache(64)
caches.register(_runs.clear)


def check_lengths(
    function: Traced, q_len: int, kv_len: int, batch: int, heads: int
) -> frozenset[Node]:
    """Prove that a traced function's indices are legal at these lengths.

    Returns:
        The loads that could not be proven and are checked when they run.

    Raises:
        BoundsError: an index leaves its captured tensor, or integer arithmetic leaves int32.
    """
    return check_bounds(
        [function.root],
        function.tensors,
        function.names,
        q_len=q_len,
        kv_len=kv_len,
        batch=batch,
        heads=heads,
    )


def mask_runs(
    mask: Traced,
    *,
    q_len: int,
    kv_len: int,
    block: tuple[int, int],
    batch: int,
    heads: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> tuple[BlockRuns, frozenset[Node]]:
    """The runs of a traced mask, and its loads that need a check at run time.

    `dtype` is what floats in the mask are computed in: float64 for float64 queries.

    Kept until a captured tensor is replaced or edited in place.

    Raises:
        BoundsError: an index leaves its captured tensor, or integer arithmetic leaves int32.
    """
    names = reads(mask.root)
    batch, heads = (batch if "b" in names else 1), (heads if "h" in names else 1)

    def build() -> tuple[BlockRuns, frozenset[Node]]:
        checked = check_lengths(mask, q_len, kv_len, batch, heads)
        shape = q_len, kv_len, batch, heads
        runs = None
        if device.type != "cpu" and not checked:
            runs = _runs_of_rows(mask, shape, block, device, dtype)
        if runs is None:
            runs = classify(
                mask.root,
                mask.tensors,
                q_len=q_len,
                kv_len=kv_len,
                block=block,
                batch=batch,
                heads=heads,
                device=device if _has_data(mask) else torch.device("cpu"),
                dtype=dtype,
                names=mask.names,
            )
        return runs.to(device), checked

    key = (mask.root, mask.names, q_len, kv_len, batch, heads, block, device, dtype)
    return _runs.get(key, mask.tensors, build)


def _has_data(mask: Traced) -> bool:
    """Whether the mask captures tensors of a GPU."""
    return any(t.device.type != "cpu" for t in mask.tensors)


def _runs_of_rows(
    mask: Traced,
    shape: tuple[int, int, int, int],
    block: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
) -> BlockRuns | None:
    """The runs of a mask by the intervals of its rows, for a GPU; None where they do not tell.

    An operator costs its launch on a GPU, the first of its kind milliseconds: there is done what
    lives there, and what is long.
    """
    q_len, kv_len, batch, heads = shape
    data = _has_data(mask)
    found = find_intervals(
        mask,
        q_len=q_len,
        kv_len=kv_len,
        batch=batch,
        heads=heads,
        dtype=dtype,
        device=device,
        search=data,
    )
    if not isinstance(found, Intervals):
        return None
    there = data or q_len + kv_len > _ON_HOST
    return tiles_of(found, block, dtype, device if there else torch.device("cpu"))


class BlockMask:
    """A mask_mod with its lengths, and the tiles that it keeps.

    The tiles are found when they are first needed and again after a captured tensor was edited in
    place. Made by `create_block_mask`.

    Attributes:
        mask_mod: the function.
        seq_lengths: (query length, kv length).
        BLOCK_SIZE: (query, kv) tile sizes.
        shape: (B, H, query length, kv length).
    """

    def __init__(
        self,
        mask_mod: Callable[..., Any],
        *,
        batch: int,
        heads: int,
        q_len: int,
        kv_len: int,
        block: tuple[int, int],
        device: torch.device | str,
    ) -> None:
        self.mask_mod = mask_mod
        self.seq_lengths = (q_len, kv_len)
        self.BLOCK_SIZE = block
        self.shape = (batch, heads, q_len, kv_len)
        self.device = resolved(device)

    def traced(self) -> Traced:
        """The mask's graph, traced again if anything that it reads has changed."""
        mask = trace_cached(self.mask_mod, "mask", self.device)
        check_captured("mask_mod", mask.names, mask.tensors, self.device)
        return mask

    def checked_runs(
        self, dtype: torch.dtype = torch.float32, block: tuple[int, int] | None = None
    ) -> tuple[BlockRuns, frozenset[Node]]:
        """The runs, and the loads that need a check at run time.

        Args:
            dtype: as of `mask_runs`.
            block: tile sizes, BLOCK_SIZE if None.
        """
        batch, heads, q_len, kv_len = self.shape
        return mask_runs(
            self.traced(),
            q_len=q_len,
            kv_len=kv_len,
            block=self.BLOCK_SIZE if block is None else block,
            batch=batch,
            heads=heads,
            device=self.device,
            dtype=dtype,
        )

    @property
    def runs(self) -> BlockRuns:
        """The tiles as runs."""
        return self.checked_runs(compute_dtype(self.traced()))[0]

    def numel(self) -> int:
        """Scores of the dense mask."""
        batch, heads, q_len, kv_len = self.shape
        return batch * heads * q_len * kv_len

    def sparsity(self) -> float:
        """Percentage of tiles that are empty."""
        return 100 * (1 - self.runs.density())

    def to_dense(self) -> Tensor:
        """Which tiles are kept, int32 [B or 1, H or 1, query tiles, kv tiles]."""
        return (self.runs.states() > 0).to(torch.int32)

    def to(self, device: torch.device | str) -> BlockMask:
        """The same mask for another device; its captured tensors must be there too."""
        batch, heads, q_len, kv_len = self.shape
        return BlockMask(
            self.mask_mod,
            batch=batch,
            heads=heads,
            q_len=q_len,
            kv_len=kv_len,
            block=self.BLOCK_SIZE,
            device=device,
        )

    def to_flex(self) -> FlexBlockMask:
        """The same mask as PyTorch's BlockMask."""
        return self.runs.to_flex(self.mask_mod)

    @staticmethod
    def from_kv_blocks(*arguments: Any, **options: Any) -> FlexBlockMask:
        """PyTorch's BlockMask with these lists of blocks, as its own method makes it."""
        from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

        return FlexBlockMask.from_kv_blocks(*arguments, **options)

    def __getitem__(self, index: Any) -> FlexBlockMask:
        """Some batch entries, heads and rows of tiles of PyTorch's BlockMask.

        As there, the result needs a mask_mod that fits it, and seq_lengths where rows are left out.
        """
        return self.to_flex()[index]

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """The same mask for other lengths."""
        batch, heads, _, _ = self.shape
        sizes = (batch, heads, new_q_len, new_kv_len)
        return create_block_mask(self.mask_mod, *sizes, self.device, self.BLOCK_SIZE)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"attnkit's BlockMask has no {name!r}: it holds runs, not lists of blocks; "
            "block_mask.to_flex() is PyTorch's BlockMask"
        )

    def __repr__(self) -> str:
        return (
            f"BlockMask({self.mask_mod!r}, shape={self.shape}, BLOCK_SIZE={self.BLOCK_SIZE}, "
            f"sparsity={self.sparsity():.1f}%)"
        )


def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = BLOCK,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """A mask for fixed lengths, in FlexAttention's words. Costs nothing until it is used.

    Args:
        mask_mod: `mask_mod(b, h, q, kv) -> bool`, or a `Mask`.
        B: batch size, None if the mask does not read `b`.
        H: query heads, None if the mask does not read `h`.
        Q_LEN: query length.
        KV_LEN: kv length.
        device: where query, key and value live; None: where the captured tensors live, else CPU.
        BLOCK_SIZE: tile size, or (query, kv) tile sizes.
        _compile, separate_full_blocks, compute_dq_write_order, dq_kv_order: accepted for
            FlexAttention's sake; they change nothing.

    Raises:
        TraceError: the mask cannot be traced.
        ArgumentError: the mask reads b or h, and B or H is None.
        OptionError: a length or tile size is not a positive int.
        ShapeError: the mask was built for other lengths.
    """
    sizes = BLOCK_SIZE if isinstance(BLOCK_SIZE, tuple | list) else (BLOCK_SIZE, BLOCK_SIZE)
    if len(sizes) != 2:
        raise OptionError(f"BLOCK_SIZE must be an int or a (query, kv) pair, got {BLOCK_SIZE!r}")
    block = (check_size("BLOCK_SIZE", sizes[0]), check_size("BLOCK_SIZE", sizes[1]))
    for name, length in (("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN)):
        check_size(name, length)
    check_built_for(mask_mod, Q_LEN, KV_LEN)
    if torch.compiler.is_dynamo_compiling():  # what is left to say is said where it is used
        return BlockMask(
            mask_mod,
            batch=1 if B is None else B,
            heads=1 if H is None else H,
            q_len=Q_LEN,
            kv_len=KV_LEN,
            block=block,
            device="cpu" if device is None else device,
        )
    if device is None:
        captured = trace_cached(mask_mod, "mask", torch.device("cpu")).tensors
        # a small table may stay on the CPU: what lives elsewhere decides
        device = next((t.device for t in captured if t.device.type != "cpu"), torch.device("cpu"))
    mask = BlockMask(
        mask_mod,
        batch=1 if B is None else check_size("B", B),
        heads=1 if H is None else check_size("H", H),
        q_len=Q_LEN,
        kv_len=KV_LEN,
        block=block,
        device=device,
    )
    names = reads(mask.traced().root)
    for name, given, size in (("b", "B", B), ("h", "H", H)):
        if name in names and size is None:
            raise ArgumentError(f"mask_mod reads {name}, but {given}=None; give {given} its size")
    return mask


def create_mask(
    mod_fn: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
) -> Tensor:
    """The dense mask, bool [B or 1, H or 1, Q_LEN, KV_LEN]; for tests and pictures.

    Of a score_mod: where it does not make a score of 0 minus infinity. `device` None is the CPU.

    Raises:
        TraceError: the mask cannot be traced.
        OptionError: a length is not a positive int.
        ShapeError: the mask was built for other lengths.
    """
    for name, size in (("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN)):
        check_size(name, size)
    check_built_for(mod_fn, Q_LEN, KV_LEN)
    shape = (B or 1, H or 1, Q_LEN, KV_LEN)
    device = resolved("cpu" if device is None else device)
    kind: Kind = "score" if takes(mod_fn, "score") and not takes(mod_fn, "mask") else "mask"
    mask = trace_cached(mod_fn, kind, device)
    env = {
        name: torch.arange(n, dtype=torch.int32, device=device).view(
            [n if i == axis else 1 for i in range(4)]
        )
        for axis, (name, n) in enumerate(zip(("b", "h", "q", "kv"), shape, strict=True))
    }
    env["score"] = torch.zeros(1, 1, 1, 1, dtype=compute_dtype(mask), device=device)
    (kept,) = evaluate([mask.root], env, mask.tensors, compute_dtype(mask))
    kept = kept != -torch.inf if kind == "score" else kept
    return kept.to(device).expand(shape).contiguous()


def check_mask_shape(
    batch: int, heads: int, lengths: tuple[int, int], query: Tensor, key: Tensor
) -> None:
    """A block mask fits query and key.

    Raises:
        ShapeError: other lengths, batch or heads than the mask was built for.
    """
    found = (query.shape[2], key.shape[2])
    if tuple(lengths) != found:
        raise ShapeError(
            f"block_mask was built for query length {lengths[0]} and kv length {lengths[1]}, got "
            f"query length {found[0]} and key length {found[1]}; build it for these lengths, or "
            "pass the mask itself as block_mask and let attnkit do it"
        )
    for what, size, own in (("batch", batch, query.shape[0]), ("heads", heads, query.shape[1])):
        if size not in (1, own):
            raise ShapeError(
                f"block_mask has {what} {size}, query has {what} {own}; expected {own}, or 1 to "
                "share it"
            )
