"""Define `torch.ops.attnkit.attention`, the operator of a call wherever torch needs operators.

It is the one name by which a call appears in torch: in graphs of torch.compile and torch.export, to
modes, and in policies of selective activation checkpointing.

At compile time, tensors have no data and lengths may be symbolic, so tiles cannot be classified and
indices cannot be checked. The operator takes the graphs as text, in a `Request`. When it runs, it
prepares the call or looks it up in the call cache. One compiled program serves all lengths. Outside
of torch.compile the call is prepared already, and its text stands for it (`torch_ops.request_of`).
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from attnkit.errors import UnsupportedError
from attnkit.graph import ir
from attnkit.runtime import torch_ops
from attnkit.runtime.bind import TracedVariant
from attnkit.runtime.call import AttentionCall
from attnkit.runtime.compile.graphs import Graphs, graphs_of
from attnkit.runtime.data_guard import DataGuard, raise_if_stale
from attnkit.runtime.prepare import prepare
from attnkit.runtime.prepared_call import PreparedCall
from attnkit.runtime.reuse.call_cache import CallKey, lookup, store
from attnkit.schedule.plan import parse_backend
from attnkit.sparsity.block_mask import BlockMask
from attnkit.splice import BackwardInputs, Captured, ForwardInputs, run_forward
from attnkit.tracing.axes import Axes, Sizes
from attnkit.tracing.tracer import Traced
from attnkit.util.arguments import BLOCK_OPTIONS, AuxRequest, check_scale, refuse_context_parallel
from attnkit.util.data_state import setting, state_of
from attnkit.util.torch_private import in_forward_ad

# The lists are optional because programs of AOTInductor pass None for an empty list.
ATTENTION = (
    "(Tensor query, Tensor key, Tensor value, Tensor[]? score_tensors, Tensor[]? mask_tensors, "
    "Tensor[]? lists, SymInt[]? sizes, SymInt[]? ints, Tensor[]? floats, str request, "
    "float? scale) "
    "-> (Tensor out, Tensor lse, Tensor max_scores, Tensor entropy, Tensor digest)"
)
ATTENTION_BACKWARD = (
    "(Tensor grad_out, Tensor grad_lse, Tensor grad_entropy, Tensor query, Tensor key, "
    "Tensor value, Tensor out, Tensor lse, Tensor entropy, Tensor digest, "
    "Tensor[] score_tensors, Tensor[] mask_tensors, Tensor[] lists, "
    "SymInt[] sizes, SymInt[] ints, Tensor[] floats, str request, float? scale, bool[] needs_grad) "
    "-> (Tensor dquery, Tensor dkey, Tensor dvalue, Tensor[] dcaptured)"
)

# needs_exact_strides: the strides of a tensor decide whether TMA can read it. cudagraph_unsafe: a
# CUDA graph captured by torch.compile would replay with tiles that may be out of date.
TAGS = (torch.Tag.needs_exact_strides, torch.Tag.cudagraph_unsafe)
torch.library.define("attnkit::attention", ATTENTION, tags=TAGS)
torch.library.define("attnkit::attention_backward", ATTENTION_BACKWARD, tags=TAGS)


@dataclass(frozen=True)
class Request:
    """Holds the properties of a call that are known at compile time.

    Attributes:
        score, mask: text of the graphs; "" without the function. Numbers that change from call to
            call are number nodes in it.
        score_names, mask_names: names of the captured tensors.
        kind: type of the mask, which determines the operator arguments `sizes` and `lists`: "plain"
            (a function), "block" (a `BlockMask`) or "flex" (PyTorch's BlockMask).
        exact: for each of the last of the operator's `sizes`, "q name" or "kv name" of a table that
            requires this query or kv length.
        block: tile sizes that the caller passed; () if none.
        backend, enable_gqa, deterministic: as in `flex_attention`.
        need_max: whether to return the row maxima.
        sink: whether the last of the score's tensors is an attention sink.
        dropout: whether the last of the score's tensors, or the last but the sink, is the state of
            dropout.
        float_scale: whether the last of the operator's floats is the softmax scale.
        need_entropy: whether to return the entropies of the rows.
        normalization: as in `AttentionCall`.
        signature: version of the operators' arguments and results. Torch stores compiled graphs on
            disk under a key that contains the text of the request, so a graph of another version is
            never used.
    """

    score: str = ""
    mask: str = ""
    score_names: tuple[str, ...] = ()
    mask_names: tuple[str, ...] = ()
    kind: str = "plain"
    exact: tuple[str, ...] = ()
    block: tuple[int, ...] = ()
    backend: str = "auto"
    enable_gqa: bool = False
    deterministic: bool = False
    need_max: bool = False
    sink: bool = False
    float_scale: bool = False
    need_entropy: bool = False
    normalization: str = "softmax"
    dropout: bool = False
    signature: int = 6

    @property
    def kernel_options(self) -> dict[str, int] | None:
        """Return `block` as `kernel_options` of `flex_attention`; None if it is empty."""
        return dict(zip(BLOCK_OPTIONS, self.block, strict=True)) if self.block else None

    @functools.cached_property
    def text(self) -> str:
        """Return the request as JSON text for the operator; `parse` is the inverse."""
        return json.dumps(asdict(self))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> Request:
        """Build a request from its `text`."""
        fields: dict[str, Any] = json.loads(text)
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        return Request(**values)

    def variant(
        self,
        graphs: Graphs,
        captured: Captured,
        lists: Sequence[Tensor],
        sizes: Sequence[int],
        device: torch.device,
    ) -> TracedVariant:
        """Build the `TracedVariant` from the graphs, the captured tensors and the block lists.

        Args:
            graphs: the graphs with their numbers.
            captured: the tensors that these graphs read.
            lists: block lists of PyTorch's BlockMask.
            sizes: sizes of the mask, whose meaning depends on `kind`.
            device: device of the query.
        """
        score = mask = None
        if graphs.score is not None:
            score = graphs.score.traced("score", captured.scores, self.score_names)
        if graphs.mask is not None:
            mask = graphs.mask.traced("mask", captured.masks, self.mask_names)
        block_mask: Any = None if mask is None else _graph_is_known
        if self.kind == "block" and mask is not None:
            batch, heads, q_len, kv_len, *block = sizes
            block_mask = BlockMask(
                _graph_is_known,
                batch=batch,
                heads=heads,
                q_len=q_len,
                kv_len=kv_len,
                block=(block[0], block[1]),
                device=device,
            )
        elif self.kind == "flex":
            block_mask = _flex_block_mask(lists, sizes)
        return TracedVariant(score, mask, block_mask)


def _graph_is_known(*_: Any) -> Any:
    raise AssertionError("the graph of this function is known, so it is never traced")


def _flex_block_mask(lists: Sequence[Tensor], sizes: Sequence[int]) -> Any:
    """Build PyTorch's BlockMask from block lists; `sizes` is (*BLOCK_SIZE, *seq_lengths)."""
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

    partial, full = lists[:2], lists[2:] or (None, None)
    return FlexBlockMask(
        (sizes[2], sizes[3]),
        partial[0],
        partial[1],
        full[0],
        full[1],
        None,  # the transposed lists, which are not read
        None,
        None,
        None,
        BLOCK_SIZE=(sizes[0], sizes[1]),
        mask_mod=_graph_is_known,
    )


@dataclass(frozen=True, eq=False)
class OperatorInputs:
    """Holds the arguments that both operators have.

    Attributes:
        query, key, value, scale: as in `flex_attention`.
        scores: tensors that the score graph captures; the state of dropout and the sink, if there
            are any.
        masks: tensors that the mask graph captures.
        lists: block lists of PyTorch's BlockMask; empty for another mask. Block runs of a call that
            is prepared already, see `torch_ops.unpack`.
        sizes: sizes of the mask, see `Request.kind`; the layout of block runs.
        ints: values of the graphs' number nodes of type int.
        floats: the same for float, float64 tensors of shape [] on the CPU. The softmax scale
            follows them if `Request.float_scale`.
        request: text of the `Request`, or of a call that is prepared already.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Sequence[Tensor]
    masks: Sequence[Tensor]
    lists: Sequence[Tensor]
    sizes: Sequence[int]
    ints: Sequence[int]
    floats: Sequence[Tensor]
    request: str
    scale: float | None

    @property
    def forward(self) -> ForwardInputs:
        """Return the inputs of a call that is prepared already."""
        assert self.scale is not None
        captured = Captured(self.scores, self.masks)
        return ForwardInputs(self.query, self.key, self.value, captured, self.scale)

    @property
    def after_value(self) -> tuple[Any, ...]:
        """Return the arguments of an operator that follow the value."""
        lists = self.scores, self.masks, self.lists, self.sizes, self.ints, self.floats
        return *(list(x) for x in lists), self.request, self.scale

    @staticmethod
    def of(*arguments: Any) -> OperatorInputs:
        """Build the record from the arguments of `torch.ops.attnkit.attention`."""
        tensors, lists, others = arguments[:3], arguments[3:9], arguments[9:]
        return OperatorInputs(*tensors, *(() if x is None else x for x in lists), *others)


@dataclass(frozen=True, eq=False)
class OperatorCall:
    """Holds the prepared call of an operator.

    Attributes:
        prepared: the prepared call.
        inputs: the inputs to run it with.
        read: positions of `inputs.captured.scores` among the score's tensors of the operator.
    """

    prepared: PreparedCall
    inputs: ForwardInputs
    read: tuple[int, ...]

    def spread(
        self, found: Sequence[Tensor], scores: Sequence[Tensor], needs_grad: Sequence[bool]
    ) -> list[Tensor]:
        """Return the gradients of the operator's tensors `scores` from those that are read.

        The gradient of a tensor that is not read is zero. Those that are not needed are empty. The
        strides are those of the fake operator.
        """
        gradients = [
            torch.zeros_like(t) if need else t.new_empty(0)
            for t, need in zip(scores, needs_grad, strict=True)
        ]
        for i, gradient in zip(self.read, found, strict=True):
            gradients[i] = gradient
        return torch_ops.with_fake_strides(gradients, scores)


def prepared_call(own: OperatorInputs) -> OperatorCall:
    """Look up or prepare the call of an operator."""
    refuse_context_parallel()
    raise_if_stale()
    request = Request.parse(own.request)
    query, key, value = own.query, own.key, own.value
    sizes = _checked_sizes(own.sizes, request.exact, query.shape[2], key.shape[2])
    floats = [float(t) for t in own.floats]
    scale = check_scale(floats.pop() if request.float_scale else own.scale, query.shape[-1])
    # float.hex distinguishes -0.0 from 0.0 and equates NaN with NaN
    number_key = tuple(own.ints), tuple(x.hex() for x in floats)
    graphs = graphs_of(request.score, request.mask, *number_key)
    call = AttentionCall(
        query,
        key,
        value,
        scale=scale,
        enable_gqa=request.enable_gqa,
        kernel_options=request.kernel_options,
        return_aux=AuxRequest(max_scores=request.need_max, entropy=request.need_entropy),
        backend=request.backend,
        deterministic=request.deterministic,
        sink=own.scores[-1] if request.sink else None,
        normalization=request.normalization,
        dropout=own.scores[-1 - request.sink] if request.dropout else None,
    )
    captured = graphs.select(own.scores, own.masks)
    slots = () if graphs.score is None else graphs.score.data_slots(captured.scores)
    data = (*[captured.scores[i] for i in slots], *own.lists, *captured.masks)
    tensors = (query, key, value, *own.scores, *own.masks)
    key_parts = (
        "operator",
        request,
        number_key,
        sizes,
        call.is_deterministic,
        scale > 0,
        *[(t.shape, t.stride(), t.dtype, t.device) for t in tensors],
        *map(id, data),
        setting.trusts,
    )
    call_key = CallKey(key_parts, None, None, captured, data)
    prepared = lookup(call_key)
    if prepared is None:
        if parse_backend(request.backend)[0] == "eager":
            raise UnsupportedError(
                'backend="eager" is no operator that torch.compile can hold; call it outside of the '
                'compiled function, or take backend="cpu"'
            )
        variant = request.variant(graphs, captured, own.lists, sizes, query.device)
        prepared = prepare(call, variant, launchable=False).call
        store(call_key, prepared)
    program = prepared.kernel_call.program  # None for a graph that simplified to nothing
    read = graphs.score_slots if program.score is not None else ()
    inputs = call.inputs(
        Captured(
            captured.scores if program.score is not None else (),
            captured.masks if program.mask is not None else (),
        )
    )
    count = len(own.scores)
    return OperatorCall(prepared, inputs, (*read, *range(count - program.extras, count)))


def _checked_sizes(
    sizes: Sequence[int], exact: Sequence[str], q_len: int, kv_len: int
) -> tuple[int, ...]:
    """Check the lengths that tables require; return the other `sizes`, see `Request.exact`.

    Raises:
        ShapeError: a table requires another length.
    """
    count = len(sizes) - len(exact)
    for text, length in zip(exact, sizes[count:], strict=True):
        side, name = text.split(" ", 1)
        Axes(name, length, f"={side}").check(Sizes(q=q_len, kv=kv_len))
    return tuple(sizes[:count])


@torch.library.impl("attnkit::attention", "CompositeExplicitAutograd")
@torch.no_grad()
def _attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    own = OperatorInputs.of(*arguments)
    kernel_call = torch_ops.kernel_call_of(own.request, own.lists, own.sizes)
    if kernel_call is None:
        if in_forward_ad():  # inside of an operator nobody can tell whether a tensor has a tangent
            torch_ops.refuse_forward_mode()
        call = prepared_call(own)
        results = torch_ops.run(call.prepared, call.inputs)
        data = call.prepared.guard.digest()
    else:
        results = run_forward(kernel_call, own.forward)
        data = 0
    digest = torch.tensor([data], dtype=torch.int64, device="cpu")
    return *torch_ops.without_none(results), digest


@torch.library.impl("attnkit::attention_backward", "CompositeExplicitAutograd")
@torch.no_grad()
def _attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    grad_entropy: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    entropy: Tensor,
    digest: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    *others, needs_grad = rest
    own = OperatorInputs(query, key, value, *others)
    grads = grad_out, grad_lse if grad_lse.numel() else None
    kernel_call = torch_ops.kernel_call_of(own.request, own.lists, own.sizes)
    if kernel_call is not None:
        rows = (entropy, grad_entropy) if grad_entropy.numel() else None
        inputs = BackwardInputs.of(own.forward, (out, lse), grads, needs_grad, rows)
        dquery, dkey, dvalue, found = torch_ops.gradients(kernel_call, inputs)
        return dquery, dkey, dvalue, torch_ops.with_fake_strides(found, own.scores)
    call = prepared_call(own)
    prepared, forward = call.prepared, call.inputs
    prepared.guard.check_digest(int(digest))
    if prepared.kernel_call.check is None:
        prepared.guard.check()
    rows = (entropy, grad_entropy) if grad_entropy.numel() else None
    needed = [needs_grad[i] for i in call.read]
    inputs = BackwardInputs.of(forward, (out, lse), grads, needed, rows)
    dquery, dkey, dvalue, found = torch_ops.gradients(prepared.kernel_call, inputs)
    return dquery, dkey, dvalue, call.spread(found, own.scores, needs_grad)


def _needed_outputs(request: str) -> tuple[bool, bool]:
    """Return whether a request asks for row maxima, and for entropies of rows."""
    needed = torch_ops.needed_outputs(request)
    if needed is not None:
        return needed
    parsed = Request.parse(request)
    return parsed.need_max, parsed.need_entropy


@torch.library.register_fake("attnkit::attention")  # type: ignore[untyped-decorator]
def _attention_fake(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    digest = torch.empty(1, dtype=torch.int64, device="cpu")
    outputs = torch_ops.fake_outputs(query, value, *_needed_outputs(rest[-2]))
    return *outputs, digest


@torch.library.register_fake("attnkit::attention_backward")  # type: ignore[untyped-decorator]
def _attention_backward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    before, (_, *others) = arguments[:9], arguments[9:]  # without the digest of this backward alone
    gradients: tuple[Tensor, Tensor, Tensor, list[Tensor]] = torch_ops.fake_gradients(
        *before, *others
    )
    return gradients


def save(ctx: Any, own: OperatorInputs, *rows: Tensor) -> None:
    """Save the arguments of an operator, and results of a call, for `saved` in its backward."""
    ctx.guard = ctx.runs = None
    lists = own.lists
    if torch_ops.needed_outputs(own.request) is not None:
        names = [f"t{i} of mask_mod" for i in range(len(own.masks))]
        ctx.guard = DataGuard([state_of(t) for t in own.masks], names)
        # Block runs may have been built in inference mode, and autograd cannot save such tensors.
        # Nobody writes them.
        ctx.runs, lists = list(lists), ()
    parts = own.scores, own.masks, lists, own.floats
    ctx.save_for_backward(own.query, own.key, own.value, *rows, *itertools.chain(*parts))
    ctx.rows = len(rows)
    ctx.saved_counts = [len(part) for part in parts]
    ctx.counts = [len(part) for part in (own.scores, own.masks, own.lists, own.floats)]
    ctx.options = list(own.sizes), list(own.ints), own.request, own.scale
    ctx.needs_grad = [t.requires_grad for t in own.scores]
    ctx.set_materialize_grads(False)


def saved(ctx: Any) -> tuple[OperatorInputs, list[Tensor]]:
    """Check the captured data; return the arguments of the operator and the `rows` of `save`.

    Raises:
        StaleDataError: the data has changed since the forward.
    """
    # read once: with selective checkpointing torch allows no more
    query, key, value, *rows = itertools.islice(tensors := iter(ctx.saved_tensors), 3 + ctx.rows)
    parts = (list(itertools.islice(tensors, n)) for n in ctx.saved_counts)
    scores, masks, lists, floats = parts
    lists = lists if ctx.runs is None else ctx.runs
    if ctx.guard is not None:
        ctx.guard.check_saved(scores, masks)
        ctx.guard.launch_backward()
    sizes, ints, request, scale = ctx.options
    arguments = scores, masks, lists, sizes, ints, floats, request, scale
    return OperatorInputs(query, key, value, *arguments), rows


def gradients_after_value(ctx: Any, captured: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the gradients of the operator's arguments that follow the value.

    Args:
        ctx: what `save` filled.
        captured: those of the score's tensors; any tensor where none is needed.
    """
    dcaptured = [g if need else None for g, need in zip(captured, ctx.needs_grad, strict=True)]
    none: list[Any] = [[None] * n for n in ctx.counts[1:]]
    empty: list[None] = []
    # torch expects an empty list as the gradient of an empty list, even of a list of numbers
    dsizes, dints = (None if numbers else empty for numbers in ctx.options[:2])
    return dcaptured, *none[:2], dsizes, dints, none[2], None, None


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    own = OperatorInputs.of(*inputs)
    out, lse, top, entropy, digest = output
    needs_entropy = _needed_outputs(own.request)[1]
    ctx.mark_non_differentiable(top, digest, *([] if needs_entropy else [entropy]))
    save(ctx, own, out, lse, entropy, digest)


def _gradient(
    ctx: Any,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    _: Tensor | None,
    grad_entropy: Tensor | None,
    __: Tensor | None,
) -> tuple[Any, ...]:
    grads = grad_out, grad_lse, grad_entropy
    torch_ops.refuse_batched_gradients(g for g in grads if g is not None)
    own, (*rows, digest) = saved(ctx)
    dquery, dkey, dvalue, captured = torch.ops.attnkit.attention_backward(
        *torch_ops.operator_tensors(grads, [own.query, own.key, own.value, *rows]),
        digest,
        *own.after_value,
        ctx.needs_grad,
    )
    return dquery, dkey, dvalue, *gradients_after_value(ctx, captured)


torch.library.register_autograd("attnkit::attention", _gradient, setup_context=_save)
torch.library.register_autograd("attnkit::attention_backward", torch_ops.refuse_second_derivative)


def request_of(
    score: Traced | None,
    mask: Traced | None,
    kind: str,
    exact: tuple[str, ...],
    block: tuple[int, ...],
    backend: str,
    enable_gqa: bool,
    deterministic: bool,
    need_max: bool,
    sink: bool,
    need_entropy: bool,
    normalization: str = "softmax",
    dropout: bool = False,
) -> Request:
    """Build the `Request` of a call from its traces; see `Request` for the other arguments."""
    return Request(
        "" if score is None else ir.text(score.root),
        "" if mask is None else ir.text(mask.root),
        () if score is None else score.names,
        () if mask is None else mask.names,
        kind,
        tuple(exact),
        tuple(block),
        backend,
        enable_gqa,
        deterministic,
        need_max,
        sink,
        need_entropy=need_entropy,
        normalization=normalization,
        dropout=dropout,
    )
