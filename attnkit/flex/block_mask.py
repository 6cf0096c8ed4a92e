"""Define PyTorch's `BlockMask` over attnkit's: its lists of blocks are computed when read."""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

import attnkit
from attnkit.errors import UnsupportedError
from attnkit.sparsity.block_mask import check_index
from attnkit.sparsity.block_runs import FULL, PARTIAL, BlockRuns
from attnkit.tracing.pickling import reduced
from attnkit.util.arguments import check_flag
from attnkit.util.data_state import DataState, state_of
from attnkit.util.torch_private import flex_parts

# All fields of PyTorch's class in this version of torch; some are no lists.
_FIELDS = tuple(TorchBlockMask.__annotations__)
_SETTINGS = ("seq_lengths", "BLOCK_SIZE", "mask_mod", "dq_kv_order", "dq_kv_order_spt")
_LISTS = tuple([name for name in _FIELDS if name not in _SETTINGS])
_OWN = "_own_"  # before the name of an assigned field; PyTorch's class has a method `_dq_kv_order`


class _CallersLists(NamedTuple):
    """Holds the lists that a caller has read from a mask with a formula, and may edit in place.

    Attributes:
        runs: the runs from which they were computed.
        lists: the lists by field.
        states: the states of their data when they were computed.
    """

    runs: BlockRuns
    lists: dict[str, Any]
    states: tuple[DataState, ...]


class BlockMask(TorchBlockMask):
    """Holds a block mask with the fields and methods of PyTorch's class, and its meaning.

    `create_block_mask` makes one from a mask_mod. It computes no tile: the lists of blocks are
    computed when they are read, and attention reads the mask_mod. An edit of a captured tensor
    therefore changes the tiles of the next call, where PyTorch's class keeps the old ones.

    The constructor and `from_kv_blocks` make one from lists of blocks, which attention follows, as
    PyTorch's does. Attention also follows the lists after a field was assigned, or a list was
    edited in place.

    Attributes:
        seq_lengths, kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, q_num_blocks,
            q_indices, full_q_num_blocks, full_q_indices, dq_write_order, dq_write_order_full,
            dq_kv_order, dq_kv_order_spt, BLOCK_SIZE, mask_mod: as in PyTorch's class.

    >>> mask = create_block_mask(lambda b, h, q, kv: kv <= q, 2, 4, 512, 512, device="cpu")
    >>> isinstance(mask, TorchBlockMask), mask.shape, mask.kv_indices.shape
    (True, (2, 4, 512, 512), torch.Size([2, 4, 4, 4]))
    >>> mask[1].kv_num_blocks[0, 0]
    tensor([1, 1, 1, 1], dtype=torch.int32)
    """

    # The mask as attnkit holds it; None for a mask that was made from lists of blocks.
    _formula: attnkit.BlockMask | None = None
    _separate: bool = True
    _order: bool | None = None  # dq_kv_order of create_block_mask; None for no dq_write_order
    # The lists that the caller has read from a mask with a formula.
    _callers_lists: _CallersLists | None = None

    @classmethod
    def _from_formula(
        cls, formula: attnkit.BlockMask, separate: bool = True, order: bool | None = None
    ) -> BlockMask:
        mask = cls.__new__(cls)
        mask._formula, mask._separate, mask._order = formula, separate, order
        return mask

    @classmethod
    def _from_lists(cls, other: TorchBlockMask) -> BlockMask:
        mask = cls.__new__(cls)
        for name in _FIELDS:
            setattr(mask, name, getattr(other, name))
        return mask

    def _compute_lists(self, formula: attnkit.BlockMask) -> dict[str, Any]:
        """Compute the lists of a formula, which are those that PyTorch computes."""
        runs, (batch, heads, q_len, kv_len) = formula.runs, formula.shape
        states = runs.states_for(batch, heads).clone()
        # PyTorch counts positions beyond the lengths as masked: a ragged tile is never full
        for axis, length, size in ((2, q_len, runs.block[0]), (3, kv_len, runs.block[1])):
            if length % size:
                states.select(axis, -1).clamp_(max=PARTIAL)
        kinds = [states == PARTIAL, states == FULL] if self._separate else [states > 0, None]
        lists: list[Tensor | None] = []
        for turned in (False, True):
            for grid in kinds:
                lists += (None, None) if grid is None else _ordered(grid.mT if turned else grid)
        names = [f"{full}{of}_{what}" for of in ("kv", "q") for full in ("", "full_")
                 for what in ("num_blocks", "indices")]  # fmt: skip
        fields: dict[str, Any] = dict(zip(names, lists, strict=True))
        if self._order is not None:
            made = TorchBlockMask((q_len, kv_len), **fields, BLOCK_SIZE=runs.block)
            orders = flex_parts().compute_dq_write_order(made, dq_kv_order=self._order)
            fields |= zip(("dq_write_order", "dq_write_order_full"), orders, strict=True)
        return fields

    def _resolve(self) -> attnkit.BlockMask | None:
        """Return the formula; None for a mask of lists, also if the caller has edited a list."""
        read = self._callers_lists
        if read is not None and _states(read.lists) != read.states:
            self._detach()
        return self._formula

    def _lists(self, formula: attnkit.BlockMask) -> dict[str, Any]:
        """Return the lists of a formula, the same tensors until its tiles change."""
        runs, read = formula.runs, self._callers_lists
        if read is None or read.runs is not runs:
            lists = self._compute_lists(formula)
            read = self._callers_lists = _CallersLists(runs, lists, _states(lists))
        return read.lists

    def _as_torch(self) -> TorchBlockMask:
        """Return PyTorch's mask with the lists that the caller has read."""
        formula, read = self._formula, self._callers_lists
        assert formula is not None
        assert read is not None
        return TorchBlockMask(
            formula.seq_lengths, **read.lists, BLOCK_SIZE=formula.BLOCK_SIZE,
            mask_mod=formula.mask_mod,
        )  # fmt: skip

    def _detach(self) -> None:
        """Make this a mask of lists: those that the caller has read, or those of the formula."""
        formula, read = self._formula, self._callers_lists
        if formula is None:
            return
        lists = self._compute_lists(formula) if read is None else read.lists
        self._formula = self._callers_lists = None
        for name in _LISTS:
            setattr(self, name, lists.get(name))
        self.seq_lengths, self.BLOCK_SIZE = formula.seq_lengths, formula.BLOCK_SIZE
        self.mask_mod = formula.mask_mod
        if "dq_kv_order" in _FIELDS:
            self.dq_kv_order, self.dq_kv_order_spt = None, self._order

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (B, H, query length, kv length)."""
        formula = self._formula
        return super().shape if formula is None else formula.shape

    @property
    def ndim(self) -> int:
        """Return the number of axes of `shape`."""
        return len(self.shape)

    def contiguous(self) -> BlockMask:
        """Return the mask itself, as a tensor whose memory is contiguous does."""
        return self

    def sparsity(self) -> float:
        """Return the percentage of positions that no computed block covers, as PyTorch counts.

        Blocks at ragged ends count as whole, so that it may be below 0.
        """
        formula = self._resolve()
        if formula is None:
            return float(super().sparsity())
        runs, (_, _, q_len, kv_len) = formula.runs, formula.shape
        positions = runs.q_blocks * runs.block[0] * runs.kv_blocks * runs.block[1]
        return 100 * (1 - runs.density() * positions / (q_len * kv_len))

    def to_dense(self) -> Tensor:
        """Return the grid of blocks, int32 [B, H, rows, columns]: 1 where a block is computed."""
        formula = self._resolve()
        if formula is None:
            return super().to_dense()
        return (formula.runs.states_for(*formula.shape[:2]) > 0).to(torch.int32).contiguous()

    def __getitem__(self, index: Any) -> BlockMask:
        """Select batch entries, heads and rows of blocks; the result has no mask_mod, as PyTorch's.

        Raises:
            BoundsError: an int is out of range; PyTorch returns an empty mask.
        """
        check_index(index, self.kv_num_blocks.shape)
        return self._from_lists(super().__getitem__(index))

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """Return the same mask for other lengths; the lists of blocks are cropped to them."""
        formula = self._resolve()
        if formula is None:
            return super()._adjust(new_q_len, new_kv_len)
        other = formula._adjust(new_q_len, new_kv_len)
        return self._from_formula(other, self._separate, self._order)

    def to(self, device: torch.device | str) -> BlockMask:
        """Return the same mask for another device. Captured tensors must be there too."""
        formula = self._resolve()
        if formula is None:
            return self._from_lists(super().to(device))
        return self._from_formula(formula.to(device), self._separate, self._order)

    def __repr__(self) -> str:
        read = self._callers_lists
        text = super().__repr__()
        self._callers_lists = read  # the caller has not read the lists
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        self._resolve()
        state = {name: value for name, value in vars(self).items() if name != "_callers_lists"}
        blank = copyreg.__newobj__, (type(self),), state  # type: ignore[attr-defined]
        return reduced(blank, *(vars(self)[n] for n in (f"{_OWN}mask_mod",) if n in vars(self)))

    def __copy__(self) -> BlockMask:
        self._resolve()
        other = type(self).__new__(type(self))
        other.__dict__.update(vars(self), _callers_lists=None)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockMask:
        other = self.__copy__()
        other.__dict__.update(copy.deepcopy(vars(other), memo))
        return other


def _field(name: str) -> Any:
    """Return the property of a field: a value of the formula, or an assigned one."""
    own = _OWN + name

    def get(self: BlockMask) -> Any:
        formula = self._resolve()
        if formula is None:
            return getattr(self, own)
        if name in ("seq_lengths", "BLOCK_SIZE", "mask_mod"):
            return getattr(formula, name)
        if name in _SETTINGS:
            return None if name == "dq_kv_order" else self._order
        return self._lists(formula).get(name)

    def assign(self: BlockMask, value: Any) -> None:
        self._detach()
        setattr(self, own, value)

    return property(get, assign)


for _name in _FIELDS:
    setattr(BlockMask, _name, _field(_name))


def _states(lists: dict[str, Any]) -> tuple[DataState, ...]:
    return tuple([state_of(t) for t in lists.values() if t is not None])


def _ordered(grid: Tensor) -> tuple[Tensor, Tensor]:
    """Return counts [B, H, rows] and indices [B, H, rows, columns] of the True blocks, int32."""
    order = torch.argsort(grid.to(torch.int8), dim=-1, descending=True, stable=True)
    return grid.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()


def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """Create a `BlockMask` of a mask_mod, as PyTorch's function; it computes no tiles yet.

    Args:
        mask_mod: `mask_mod(b, h, q, kv) -> bool`, or an `attnkit.Mask`.
        B: batch size; None for 1, if the mask does not read `b`.
        H: number of query heads; None for 1, if the mask does not read `h`.
        Q_LEN, KV_LEN: query and kv length, at least 1.
        device: device of query, key and value; None for the accelerator, else the CPU.
        BLOCK_SIZE: positions of a block: one int, or (query, kv).
        _compile: changes nothing.
        separate_full_blocks: whether the fields list full blocks apart from partial ones.
        compute_dq_write_order: whether to have `dq_write_order` and `dq_write_order_full`.
        dq_kv_order: the order in them.

    Raises:
        TraceError, ArgumentError, OptionError, ShapeError, DeviceError: see
            `attnkit.create_block_mask`.
        UnsupportedError: this version of torch has no `dq_write_order`.
    """
    check_flag("separate_full_blocks", separate_full_blocks)
    check_flag("compute_dq_write_order", compute_dq_write_order)
    check_flag("dq_kv_order", dq_kv_order)
    if compute_dq_write_order and flex_parts().compute_dq_write_order is None:
        raise UnsupportedError("compute_dq_write_order=True needs torch 2.13 or newer")
    formula = attnkit.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, _device(device), BLOCK_SIZE)
    order = dq_kv_order if compute_dq_write_order else None
    return BlockMask._from_formula(formula, separate_full_blocks, order)


def create_mask(
    mod_fn: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
) -> Tensor:
    """Return the dense bool mask of a mask_mod or a score_mod, as PyTorch's function.

    Args:
        mod_fn, B, H, Q_LEN, KV_LEN: see `attnkit.create_mask`.
        device: device of the result and of captured tensors; None for the accelerator, else the
            CPU.

    Returns:
        bool [B or 1, H or 1, Q_LEN, KV_LEN].
    """
    return attnkit.create_mask(mod_fn, B, H, Q_LEN, KV_LEN, _device(device))


def create_nested_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    q_nt: Tensor,
    kv_nt: Tensor | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
) -> NoReturn:
    """Refuse nested tensors, which attnkit does not take; torch 2.13 no longer has this function.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "attnkit takes no nested tensors, so create_nested_block_mask has no meaning; pack the "
        "sequences into one tensor [1, heads, total length, head dim] and keep them apart with "
        "attnkit.masks.document_from_cu_seqlens(offsets, within=mask_mod)"
    )


def _create_empty_block_mask(query: Tensor, key: Tensor) -> BlockMask:
    """Return the block mask that keeps everything, for any lengths: one block that is all."""
    ones = torch.ones(1, 1, 1, dtype=torch.int32, device=query.device)
    return BlockMask.from_kv_blocks(
        ones, torch.zeros_like(ones)[..., None], BLOCK_SIZE=flex_parts().whole, seq_lengths=(1, 1)
    )


def _device(device: Any) -> Any:
    return torch.accelerator.current_accelerator() or "cpu" if device is None else device
