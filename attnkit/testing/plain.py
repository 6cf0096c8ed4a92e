"""Compute dense attention by calling the user's Python functions: the oracle of `check_variant`.

`torch.vmap` calls score_mod and mask_mod with 0-d tensors, as PyTorch's FlexAttention does. The
functions are not traced or rewritten, and autograd computes the gradients. The oracle therefore
shares no code with the code under test: it imports nothing from `tracing`, `graph`, `sparsity`,
`schedule` or `splice`.

A mask_mod runs with torch's type promotion. A score_mod runs in the dtype of the scores, see
`_InDtype`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnkit.errors import UnsupportedError
from attnkit.util.torch_private import tree_leaves, tree_map

Function: TypeAlias = Callable[..., Any]
Shape: TypeAlias = tuple[int, int, int, int]
HALVES = (torch.float16, torch.bfloat16)
MOST_CALLS = 20_000  # largest number of calls of a function that vmap does not support


class DenseResult(NamedTuple):
    """Holds the results of dense attention; what a normalization does not have is None.

    Attributes:
        out: [B, Hq, Sq, Dv].
        weights: [B, Hq, Sq, Skv], the weights of the keys before dropout, 0 in masked rows.
        lse, max_scores, entropy: [B, Hq, Sq].
    """

    out: Tensor
    weights: Tensor
    lse: Tensor | None = None
    max_scores: Tensor | None = None
    entropy: Tensor | None = None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Function | None = None,
    kept: Tensor | None = None,
    *,
    scale: float | None = None,
    sink: Tensor | None = None,
    survivors: Tensor | None = None,
    normalization: str = "softmax",
) -> DenseResult:
    """Compute dense attention and its statistics.

    Args:
        query: [B, Hq, Sq, D], any float dtype. Scores are float64 for float64, else float32.
        key: [B or 1, Hkv, Skv, D]; Hkv is a divisor of Hq.
        value: [B or 1, Hkv, Skv, Dv].
        score_mod: the user's function, or None.
        kept: the mask, bool, broadcastable to [B, Hq, Sq, Skv]; None without a mask.
        scale: factor on query @ key^T; 1 / sqrt(D) if None.
        sink: [Hq], one more logit in each row's softmax, without a value; None for none.
        survivors: [B, Hq, Sq, Skv], factors of the weights: dropout; None for none.
        normalization: "softmax", "sigmoid" or "none".

    Returns:
        The output in the query's dtype, all else in the dtype of the scores. A fully masked row
        gives 0, LSE -inf (the sink, if there is one), row maximum -inf, entropy 0, and zero
        gradients.
    """
    scores = raw_scores(query, key, scale)
    if score_mod is not None:
        scores = modified(score_mod, scores)
    if normalization != "softmax":
        return weighted_sum(scores, value, kept, query.dtype, survivors, normalization)
    logit = None if sink is None else sink[:, None, None]
    return softmax_times(scores, value, kept, query.dtype, logit, survivors)


def raw_scores(query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    """Return scale * query @ key^T [B, Hq, Sq, Skv], float64 for float64 inputs, else float32."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return (query @ _for_each_head(key, query.shape[1]).mT).to(wide) * scale


def softmax_times(
    scores: Tensor,
    value: Tensor,
    kept: Tensor | None,
    dtype: torch.dtype,
    sink: Tensor | None = None,
    survivors: Tensor | None = None,
) -> DenseResult:
    """Compute softmax(masked scores) @ value, with weights in `dtype`, and the statistics.

    `sink` is one more logit of each row, [..., Sq or 1, 1]; its weight has no value. `survivors`
    are factors of the weights.
    """
    if kept is not None:
        scores = torch.where(kept, scores, -math.inf)
    masked = (scores == -math.inf).all(-1, keepdim=True)
    some = scores.masked_fill(masked, 0.0)  # softmax of -inf alone is NaN, and so is its gradient
    empty = torch.full_like(scores[..., :1], -math.inf)  # the LSE of a row without keys
    if sink is not None:
        empty = sink.to(scores.dtype).expand(empty.shape)
        some = torch.cat([some, empty], -1)
    softmax = torch.softmax(some, -1)
    # a weight of 0 adds nothing, neither here nor to a gradient
    logs = torch.log_softmax(some, -1).masked_fill(softmax == 0, 0.0)
    entropy = -(softmax * logs).sum(-1).masked_fill(masked.squeeze(-1), 0.0)
    weights = softmax[..., : scores.shape[-1]].masked_fill(masked, 0.0)
    lse = torch.where(masked, empty, torch.logsumexp(some, -1, keepdim=True)).squeeze(-1)
    out = _times(weights, survivors, value, dtype)
    return DenseResult(out, weights, lse, scores.detach().amax(-1), entropy)


def weighted_sum(
    scores: Tensor,
    value: Tensor,
    kept: Tensor | None,
    dtype: torch.dtype,
    survivors: Tensor | None,
    normalization: str,
) -> DenseResult:
    """Sum the values with weights that need no other score: sigmoids, or the scores themselves."""
    weights = torch.sigmoid(scores) if normalization == "sigmoid" else scores
    if kept is not None:
        weights = torch.where(kept, weights, 0.0)
    return DenseResult(_times(weights, survivors, value, dtype), weights)


def _times(weights: Tensor, survivors: Tensor | None, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply the weights, rounded to `dtype`, by the values; `survivors` are their factors."""
    if survivors is not None:
        weights = weights * survivors.to(weights.dtype)
    return weights.to(dtype) @ _for_each_head(value, weights.shape[1])


def _for_each_head(t: Tensor, heads: int) -> Tensor:
    """Repeat the heads of key or value [B, Hkv, Skv, n] to `heads` query heads."""
    repeated: Tensor = t.repeat_interleave(heads // t.shape[1], 1)
    return repeated


def modified(score_mod: Function, scores: Tensor) -> Tensor:
    """Apply `score_mod` to scores [B, Hq, Sq, Skv]; the result has the same shape and dtype."""
    return _on_grid(score_mod, scores.shape, scores.device, scores, _InDtype(scores.dtype))


def modified_at(score_mod: Function, scores: Tensor, positions: Sequence[Tensor]) -> Tensor:
    """Apply `score_mod` to scores at arbitrary positions.

    Args:
        score_mod: the user's function.
        scores: any shape.
        positions: batch, head, query and kv index of each score, int32, broadcastable to the shape
            of `scores`.

    Returns:
        Modified scores, with the shape and dtype of `scores`.
    """
    flat = [t.expand(scores.shape).flatten() for t in positions]
    mode = _InDtype(scores.dtype)
    called = _tensor_function(score_mod, scores.device, mode)
    try:
        found: Tensor = torch.vmap(called)(scores.flatten(), *flat)
        return found.view(scores.shape)
    except RuntimeError as error:
        _check_count(score_mod, scores.numel(), error)
        places = zip(scores.flatten(), *flat, strict=True)
        return torch.stack([called(*place) for place in places]).view(scores.shape)


@torch.no_grad()
def dense_mask(mask_mod: Function, shape: Shape, device: torch.device) -> Tensor:
    """Evaluate `mask_mod` at every position of `shape`; return bool [B, Hq, Sq, Skv]."""
    return _on_grid(mask_mod, shape, device, None, _Plain()).to(torch.bool)


@torch.no_grad()
def torch_scores(score_mod: Function, scores: Tensor) -> Tensor:
    """Apply `score_mod` to scores [B, Hq, Sq, Skv] with torch's own type promotion."""
    return _on_grid(score_mod, scores.shape, scores.device, scores, _Plain())


def _on_grid(
    function: Function,
    shape: Sequence[int],
    device: torch.device,
    scores: Tensor | None,
    mode: _Plain,
) -> Tensor:
    """Call `function` at every position of [B, Hq, Sq, Skv]: by vmap, or else one by one."""
    called = _tensor_function(function, device, mode)
    ranges = [torch.arange(n, dtype=torch.int32, device=device) for n in shape]
    lead = () if scores is None else (scores,)
    mapped: Callable[..., Tensor] = called
    for axis in (3, 2, 1, 0):
        axes = tuple(0 if i == axis else None for i in range(4))
        mapped = torch.vmap(mapped, in_dims=(0,) * len(lead) + axes)
    try:
        return mapped(*lead, *ranges)
    except RuntimeError as error:
        # vmap has no rule for an operator of the function
        _check_count(function, math.prod(shape), error)
        places = itertools.product(*ranges)
        if scores is None:
            values = [called(*place) for place in places]
        else:
            pairs = zip(scores.flatten(), places, strict=True)
            values = [called(score, *place) for score, place in pairs]
        return torch.stack(values).view(tuple(shape))


def _check_count(function: Function, count: int, error: RuntimeError) -> None:
    """Raise if `function`, which vmap cannot call, would have to be called too many times.

    Raises:
        UnsupportedError: `count` is larger than `MOST_CALLS`.
    """
    if count > MOST_CALLS:
        name = getattr(function, "__name__", type(function).__name__)
        raise UnsupportedError(
            f"torch.vmap cannot call {name} ({str(error).partition(chr(10))[0]}), and {count} "
            f"positions are too many to call it one by one. Pass q_len, kv_len, batch and heads "
            f"whose product is at most {MOST_CALLS}"
        ) from error


def _tensor_function(function: Function, device: torch.device, mode: _Plain) -> Function:
    """Wrap `function` so that it runs inside `mode` and returns a 0-d tensor on `device`."""

    def called(*arguments: Tensor) -> Tensor:
        with mode.call(arguments):
            return mode.result(torch.as_tensor(function(*arguments), device=device))

    return called


class _Plain(TorchFunctionMode):
    """Torch function mode that replaces calls which fail under vmap by equal ones.

    See `_INSTEAD`.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _INSTEAD.get(func, func)(*args, **(kwargs or {}))

    def call(self, arguments: Sequence[Tensor]) -> _Plain:
        """Return the context manager for one call of the function with `arguments`."""
        return self

    def result(self, value: Tensor) -> Tensor:
        """Convert the result of the function."""
        return value


class _InDtype(_Plain):
    """Mode that computes every position-dependent value in the dtype of the scores.

    float64 scores must give float64 results. A table of a narrower dtype is therefore converted
    when a position indexes it, and `q * 0.5` and `q.float()` are float64. float32 scores must show
    the error of float32 arithmetic, also beside a float64 table, which backends round. A conversion
    to 16 bits still rounds its value, but not its gradient. Values that depend only on captured
    tensors keep torch's dtypes.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        # id -> tensor that depends on a position; the reference keeps the id from being reused
        self._positional: dict[int, Tensor] = {}
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def call(self, arguments: Sequence[Tensor]) -> _InDtype:
        self._positional = {id(t): t for t in arguments}
        return self

    def result(self, value: Tensor) -> Tensor:
        return value.to(self.dtype)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if not any(id(x) in self._positional for x in leaves):
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__":  # an attribute, such as dtype
            return func(*args, **kwargs)
        args, kwargs = tree_map(self._widened, (tuple(args), kwargs))
        if func is Tensor.float:
            func, args = Tensor.to, (args[0], self.dtype)
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            found = _INSTEAD.get(func, func)(*args, **kwargs)
        finally:
            torch.set_default_dtype(default)
        return tree_map(lambda x: self._noted(x, args), found)

    def _widened(self, x: Any) -> Any:
        """Convert an argument that is a float tensor or is torch.float32 to the mode's dtype.

        Each tensor is converted only once, so its gradient is summed in that dtype.
        """
        if x is torch.float32:
            return self.dtype
        if not isinstance(x, Tensor) or not self._differs(x):
            return x
        if id(x) not in self._tables:
            self._tables[id(x)] = (x, x.to(self.dtype))
        return self._tables[id(x)][1]

    def _noted(self, x: Any, args: Sequence[Any]) -> Any:
        """Convert a result to the mode's dtype and record that it depends on a position."""
        if not isinstance(x, Tensor):
            return x
        if self._differs(x):
            wide = x.to(self.dtype)
            operand = args[0]
            if isinstance(operand, Tensor) and x.dtype in HALVES:
                step = (wide - operand).nan_to_num(0.0, math.inf, -math.inf)
                wide = operand + step.detach()
            x = wide
        self._positional[id(x)] = x
        return x

    def _differs(self, x: Tensor) -> bool:
        return x.dtype.is_floating_point and x.dtype != self.dtype


def _getitem(source: Tensor, items: Any) -> Tensor:
    items = items if isinstance(items, tuple) else (items,)
    indexed = any(isinstance(i, Tensor) for i in items)
    if not indexed or not all(isinstance(i, Tensor | int | slice) for i in items):
        found: Tensor = source[items]
        return found
    basic = tuple(slice(None) if isinstance(i, Tensor) else i for i in items)
    sliced = source[basic]  # the mode is off while it handles a call
    tensors = [i if isinstance(i, Tensor) else None for i in items if not isinstance(i, int)]
    found = torch.ops.aten.index.Tensor(sliced, tensors)
    return found


def _log_sigmoid(x: Tensor) -> Tensor:
    """Compute log(sigmoid(x)) without overflow; its derivative at 0 is 1/2, as torch's."""
    return torch.minimum(x, torch.zeros_like(x)) - torch.log1p(torch.exp(-x.abs()))


# Under vmap `Tensor.__getitem__` would convert 0-d tensors to ints, and the batching rule of
# `logsigmoid` raises for CUDA tensors (torch 2.11).
_INSTEAD: dict[Any, Function] = {Tensor.__getitem__: _getitem, F.logsigmoid: _log_sigmoid}
