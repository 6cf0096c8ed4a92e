"""Define `BlockMask`, which holds a mask_mod for fixed lengths and its tiles.

The class and `create_block_mask` have the names and arguments of PyTorch's FlexAttention. Unlike in
FlexAttention, creating a block mask computes no tiles. `mask_runs` classifies them at first use.
"""

from __future__ import annotations

import copy
import copyreg
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnkit.errors import ArgumentError, BoundsError, DeviceError, OptionError, ShapeError
from attnkit.graph.eval_torch import evaluate, positions
from attnkit.graph.ir import Node, reads
from attnkit.sparsity.block_runs import BLOCK, BlockRuns
from attnkit.sparsity.mask_runs import check_lengths, mask_runs
from attnkit.tracing.axes import Sizes
from attnkit.tracing.built_for import check_built_for
from attnkit.tracing.float64_checks import compute_dtype
from attnkit.tracing.guards import trace_cached
from attnkit.tracing.pickling import reduced
from attnkit.tracing.tracer import Kind, Traced, takes
from attnkit.util.arguments import (
    check_captured,
    check_dtype,
    check_size,
    check_sizes,
    shown,
)
from attnkit.util.data_state import settled_state_of
from attnkit.util.devices import resolve_device

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

_MOST_DENSE = 1 << 36  # positions of `create_mask`: 64 GiB

# Exceptions that PyTorch raises if an argument of its BlockMask is wrong.
_REFUSED = (TypeError, ValueError, LookupError, RuntimeError, AssertionError, AttributeError)


class BlockMask:
    """Holds a mask_mod for fixed lengths and the states of its tiles.

    `create_block_mask` creates one. Tiles are classified at first use, and again after a captured
    tensor was edited in place.

    Attributes:
        mask_mod: the function, or `Mask`.
        seq_lengths: (query length, kv length) in positions; may be assigned.
        BLOCK_SIZE: (query, kv) positions of a tile.
        shape: (B, H, query length, kv length); B or H is 1 where the mask is shared.
        device: device of query, key and value.

    >>> window = lambda b, h, q, kv: (kv <= q) & (q - kv < 256)
    >>> mask = create_block_mask(window, None, None, 1024, 1024)
    >>> mask.shape, mask.BLOCK_SIZE, mask.sparsity()
    ((1, 1, 1024, 1024), (128, 128), 67.1875)
    >>> print(mask.runs.picture())
    |+       |
    |#+      |
    |+#+     |
    | +#+    |
    |  +#+   |
    |   +#+  |
    |    +#+ |
    |     +#+|
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
        if not torch.compiler.is_dynamo_compiling():  # the call that uses the mask checks the rest
            sizes = {"batch": batch, "heads": heads, "q_len": q_len, "kv_len": kv_len}
            for name, size in sizes.items():
                check_size(name, size)
            block = check_sizes("block", block)
        self.mask_mod = mask_mod
        self.BLOCK_SIZE = block
        self.shape: tuple[int, int, int, int] = (batch, heads, q_len, kv_len)
        self.device = resolve_device(device)

    @property
    def seq_lengths(self) -> tuple[int, int]:
        """Return (query length, kv length) in positions.

        Assigning other lengths gives the same mask_mod for those; its tiles are classified anew.

        Raises:
            OptionError: the assigned value is not a pair of positive ints.
        """
        return self.shape[2], self.shape[3]

    @seq_lengths.setter
    def seq_lengths(self, lengths: Any) -> None:
        if not isinstance(lengths, tuple | list):
            raise OptionError(
                f"seq_lengths must be a (query length, kv length) pair, got {shown(lengths)}"
            )
        self.shape = (*self.shape[:2], *check_sizes("seq_lengths", lengths))

    def traced(self) -> Traced:
        """Return the trace of the mask_mod, cached until something that the mask_mod reads changes.

        Raises:
            TraceError: the mask_mod cannot be traced.
            DeviceError: a captured tensor is on another device.
        """
        mask = trace_cached(self.mask_mod, "mask", self.device)
        check_captured("mask_mod", mask.names, mask.tensors, self.device)
        return mask

    def checked_runs(
        self, dtype: torch.dtype = torch.float32, block: tuple[int, int] | None = None
    ) -> tuple[BlockRuns, frozenset[Node]]:
        """Return the runs of the tiles and the loads to check at run time, cached by `mask_runs`.

        Args:
            dtype: dtype of floats in the mask, float32 or float64.
            block: (query, kv) positions of a tile; BLOCK_SIZE if None.

        Returns:
            The runs, and the loads whose index must be checked at run time.

        Raises:
            BoundsError: an index leaves its captured tensor, or integer arithmetic leaves int32.
            OptionError, DTypeError: `block` or `dtype` has another value.
            DeviceError: the device is meta, which holds no data.
        """
        check_dtype("dtype", dtype, (torch.float32, torch.float64))
        if self.device.type == "meta":
            raise DeviceError(
                "a BlockMask on the meta device has no tiles; build it for the device of the query, "
                "or convert it with block_mask.to(device)"
            )
        batch, heads, q_len, kv_len = self.shape
        mask = self.traced()
        for t in mask.tensors:
            settled_state_of(t)
        return mask_runs(
            mask,
            q_len=q_len,
            kv_len=kv_len,
            block=self.BLOCK_SIZE if block is None else check_sizes("block", block),
            batch=batch,
            heads=heads,
            device=self.device,
            dtype=dtype,
        )

    @property
    def runs(self) -> BlockRuns:
        """Return the FULL and PARTIAL tiles, as runs of neighbouring tiles.

        Raises:
            BoundsError: an index leaves its captured tensor, or integer arithmetic leaves int32.
        """
        return self.checked_runs(compute_dtype(self.traced()))[0]

    def numel(self) -> int:
        """Return the number of scores of the dense mask: B * H * query length * kv length."""
        batch, heads, q_len, kv_len = self.shape
        return batch * heads * q_len * kv_len

    def sparsity(self) -> float:
        """Return the percentage of tiles that are EMPTY, 0 to 100."""
        return 100 * (1 - self.runs.density())

    def to_dense(self) -> Tensor:
        """Return the grid of tiles, with 1 for FULL and PARTIAL tiles and 0 for EMPTY ones.

        Returns:
            int32 [B or 1, H or 1, query tiles, kv tiles].
        """
        return (self.runs.states() > 0).to(torch.int32)

    def to(self, device: torch.device | str) -> BlockMask:
        """Return the same mask for another device. Its captured tensors must be there too."""
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
        """Convert to `torch.nn.attention.flex_attention.BlockMask`, with the same batch and heads.

        Raises:
            OptionError: its lists would have more than 2**31 entries.
        """
        return self.runs.to_flex(self.mask_mod, self.shape[:2])

    @staticmethod
    def from_kv_blocks(*arguments: Any, **options: Any) -> FlexBlockMask:
        """Create PyTorch's BlockMask from block lists, with the arguments of PyTorch's method.

        Raises:
            ArgumentError: PyTorch refuses the arguments.
        """
        from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

        try:
            return FlexBlockMask.from_kv_blocks(*arguments, **options)
        except _REFUSED as error:
            raise ArgumentError(
                f"PyTorch's BlockMask.from_kv_blocks refuses these arguments: {error}"
            ) from error

    def __getitem__(self, index: Any) -> FlexBlockMask:
        """Select batch entries, heads and rows of tiles, and return PyTorch's BlockMask.

        As with PyTorch's class, the caller must set a mask_mod that fits the selection, and
        seq_lengths if the selection leaves out rows.

        Raises:
            BoundsError: an index is out of range, or is no valid index.
            ArgumentError: there are too many indices.
        """
        blocks = self.to_flex()
        check_index(index, blocks.kv_num_blocks.shape)
        try:
            return blocks[index]
        except _REFUSED as error:
            kind = BoundsError if isinstance(error, IndexError) else ArgumentError
            raise kind(
                "a BlockMask is indexed by up to three ints, slices or index tensors (batch, head, "
                f"row of tiles), got {shown(index)}: {error}"
            ) from error

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """Return the same mask for other lengths."""
        batch, heads, _, _ = self.shape
        sizes = (batch, heads, new_q_len, new_kv_len)
        return create_block_mask(self.mask_mod, *sizes, self.device, self.BLOCK_SIZE)

    def __reduce__(self) -> tuple[Any, ...]:
        blank = copyreg.__newobj__, (type(self),), self.__dict__  # type: ignore[attr-defined]
        return reduced(blank, self.mask_mod)

    def __copy__(self) -> BlockMask:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockMask:
        other = type(self).__new__(type(self))
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"attnkit's BlockMask has no {name!r}: it holds runs, not lists of blocks; "
            "block_mask.to_flex() is PyTorch's BlockMask, and attnkit.flex.create_block_mask makes "
            "one that has both"
        )

    def __repr__(self) -> str:
        tiles = "on meta" if self.device.type == "meta" else f"sparsity={self.sparsity():.1f}%"
        return (
            f"BlockMask({self.mask_mod!r}, shape={self.shape}, BLOCK_SIZE={self.BLOCK_SIZE}, "
            f"{tiles})"
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
    """Create a `BlockMask` for fixed lengths, with the signature of FlexAttention's function.

    The call traces the mask_mod and checks the arguments. It computes no tiles.

    Args:
        mask_mod: `mask_mod(b, h, q, kv) -> bool`, or a `Mask`.
        B: batch size; None if the mask does not read `b`.
        H: number of query heads; None if the mask does not read `h`.
        Q_LEN: query length, at least 1.
        KV_LEN: kv length, at least 1.
        device: device of query, key and value. None: the device of the captured tensors, else CPU.
        BLOCK_SIZE: positions of a tile: one int, or (query, kv).
        _compile, separate_full_blocks, compute_dq_write_order, dq_kv_order: accepted for
            compatibility with FlexAttention; they change nothing.

    Raises:
        TraceError: the mask cannot be traced.
        ArgumentError: the mask reads b or h, and B or H is None.
        OptionError: a length or tile size is not a positive int.
        ShapeError: the mask was built for other sizes.

    >>> create_block_mask(lambda b, h, q, kv: kv <= q, None, None, 512, 512).runs.counts()
    (6, 4, 6)
    """
    block = check_sizes("BLOCK_SIZE", BLOCK_SIZE)
    for name, length in (("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN)):
        check_size(name, length)
    check_built_for(mask_mod, Sizes(B, H, Q_LEN, KV_LEN))
    compiling = torch.compiler.is_dynamo_compiling()  # the call that uses the mask checks the rest
    if device is None:
        device = "cpu" if compiling else _device_of(mask_mod)
    mask = BlockMask(
        mask_mod,
        batch=1 if B is None else B if compiling else check_size("B", B),
        heads=1 if H is None else H if compiling else check_size("H", H),
        q_len=Q_LEN,
        kv_len=KV_LEN,
        block=block,
        device=device,
    )
    if not compiling:
        names = reads(mask.traced().root)
        for name, argument, size in (("b", "B", B), ("h", "H", H)):
            if name in names and size is None:
                raise ArgumentError(
                    f"mask_mod reads {name}, but {argument}=None; give {argument} its size"
                )
    return mask


def check_index(index: Any, sizes: Sequence[int]) -> None:
    """Check the ints in an index of a block mask, for which PyTorch would return an empty mask.

    Args:
        index: an int, a slice or an index tensor, or a tuple of these.
        sizes: batch size, heads and rows of tiles.

    Raises:
        BoundsError: an int is out of range.
    """
    for at, size in zip(index if isinstance(index, tuple) else (index,), sizes, strict=False):
        if isinstance(at, int) and not -size <= at < size:
            raise BoundsError(f"index {at} is out of range for a BlockMask with {size} entries")


def _device_of(mask_mod: Callable[..., Any]) -> torch.device:
    """Return the first device of a mask's captured tensors that is not the CPU, else the CPU."""
    captured = trace_cached(mask_mod, "mask", torch.device("cpu")).tensors
    return next((t.device for t in captured if t.device.type != "cpu"), torch.device("cpu"))


def create_mask(
    mod_fn: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the dense bool mask of a mask_mod, for tests and pictures.

    Args:
        mod_fn: a mask_mod, or a score_mod, which counts as a mask that keeps the positions where it
            does not turn a score of 0 into -inf.
        B: batch size, at least 1; None for 1.
        H: number of query heads, at least 1; None for 1.
        Q_LEN: query length, at least 1.
        KV_LEN: kv length, at least 1.
        device: device of the result and of the captured tensors; None: the CPU.

    Returns:
        bool [B or 1, H or 1, Q_LEN, KV_LEN], True where the mask keeps the score.

    Raises:
        TraceError: the function cannot be traced.
        BoundsError: an index leaves its captured tensor, integer arithmetic leaves int32, or a
            divisor is 0.
        OptionError: a size is not a positive int, or the mask would have more than 2**36 positions.
        DeviceError: a captured tensor is on another device, or there is no such device.
        ShapeError: the mask was built for other sizes.

    >>> create_mask(lambda b, h, q, kv: kv <= q, None, None, 3, 3)[0, 0].int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    shape = _dense_shape(B, H, Q_LEN, KV_LEN)
    check_built_for(mod_fn, Sizes(B, H, Q_LEN, KV_LEN))
    device = resolve_device("cpu" if device is None else device)
    kind: Kind = "score" if takes(mod_fn, "score") and not takes(mod_fn, "mask") else "mask"
    mask = trace_cached(mod_fn, kind, device)
    check_captured(f"{kind}_mod", mask.names, mask.tensors, device)
    unproven = frozenset[Node]()
    if device.type != "meta":  # there is no data to check
        unproven = check_lengths(mask, Q_LEN, KV_LEN, shape[0], shape[1])
    env = positions(shape, device)
    env["score"] = torch.zeros(1, dtype=compute_dtype(mask), device=device)
    (kept,) = evaluate(
        [mask.root], env, mask.tensors, compute_dtype(mask), checked=unproven, names=mask.names
    )
    kept = kept != -torch.inf if kind == "score" else kept
    return kept.to(device).expand(shape).contiguous()


def _dense_shape(B: Any, H: Any, q_len: Any, kv_len: Any) -> tuple[int, int, int, int]:
    """Check the sizes of a dense mask, and return them.

    Raises:
        OptionError: a size is not a positive int, or the mask would be too large.
    """
    named = (("B", B), ("H", H), ("Q_LEN", q_len), ("KV_LEN", kv_len))
    sizes = [1 if s is None and n in "BH" else check_size(n, s) for n, s in named]
    if math.prod(sizes) > _MOST_DENSE:
        raise OptionError(
            f"a dense mask of B={sizes[0]}, H={sizes[1]}, Q_LEN={sizes[2]}, KV_LEN={sizes[3]} has "
            f"{math.prod(sizes)} positions, expected at most {_MOST_DENSE}; create_block_mask "
            "computes no position"
        )
    return sizes[0], sizes[1], sizes[2], sizes[3]


def _other_lengths(lengths: tuple[int, int], query: Tensor, key: Tensor) -> str:
    """Return the advice for the error that a block mask was built for other lengths."""
    if tuple(lengths) == (query.shape[1], key.shape[1]):
        return (
            "the tensors seem to be [batch, length, heads, head dim]; expected [batch, heads, "
            "length, head dim]: query.transpose(1, 2)"
        )
    return (
        "build it for these lengths, or pass the mask itself as block_mask and let attnkit do it; "
        "after block_mask[index], assign the seq_lengths of the selection"
    )


def check_mask_shape(
    batch: int, heads: int, lengths: tuple[int, int], query: Tensor, key: Tensor
) -> None:
    """Check that a block mask fits query and key.

    Raises:
        ShapeError: query and key have other lengths, batch or heads than the mask was built for.
    """
    got = (query.shape[2], key.shape[2])
    if tuple(lengths) != got:
        raise ShapeError(
            f"block_mask was created for query length {lengths[0]} and kv length {lengths[1]}, got "
            f"query length {got[0]} and key length {got[1]}; {_other_lengths(lengths, query, key)}"
        )
    for what, size, own in (("batch", batch, query.shape[0]), ("heads", heads, query.shape[1])):
        if size not in (1, own):
            raise ShapeError(
                f"block_mask has {what} {size}, query has {what} {own}; expected {own}, or 1 to "
                "share it"
            )
