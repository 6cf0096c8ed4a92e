"""Wrap every private name of torch that attnkit uses; no other module uses private names of torch.

These names have no public counterpart, or a public one that costs microseconds per call. If a
version of torch lacks an optional name, a slower public counterpart replaces it.
tests/util/test_torch_private.py lists the names that each version of torch has.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "PLAIN",
    "SDPA",
    "DisableTorchFunction",
    "EmptyStrided",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "decomposition",
    "deterministic_enabled",
    "device_index",
    "dynamo_parts",
    "fast_empty_strided",
    "flex_parts",
    "function_class",
    "function_mode_count",
    "grad_enabled",
    "in_autocast",
    "in_batched_gradients",
    "in_context_parallel",
    "in_forward_ad",
    "in_jit_trace",
    "is_batched",
    "is_fake",
    "is_functional",
    "is_grad_tracking",
    "is_intercepted",
    "is_stream_capturing",
    "mark_constant",
    "neural_functions",
    "only_devices",
    "recorded",
    "registered_autograd",
    "result_count",
    "shares_storage",
    "stream_of",
    "tensor_guard",
    "tree_leaves",
    "tree_map",
    "version",
]

# Function (shape, strides, dtype) -> an uninitialized tensor.
EmptyStrided: TypeAlias = Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]

# Tensor classes that do not override operators.
PLAIN = frozenset({Tensor, torch.nn.Parameter})

_C: Any = torch._C
_GUARDS: Any = getattr(getattr(_C, "_dynamo", None), "guards", None)
_TENSOR_GUARDS: Any = getattr(_GUARDS, "TensorGuards", None)
_PRE_DISPATCH = _C.DispatchKey.PreDispatch
_AUTOGRAD_META = _C.DispatchKey.AutogradMeta
_OLD_VMAP = _C._parse_dispatch_key("VmapMode")

# The C++ functions behind torch.nn.functional.
neural_functions: Any = _C._nn
# Context manager that disables __torch_function__ of modes and tensor subclasses.
DisableTorchFunction: Any = _C.DisableTorchFunction
# Version counter of a tensor: the number of its in-place edits.
version: Callable[[Tensor], int] = attrgetter("_version")
grad_enabled: Callable[[], bool] = _C.is_grad_enabled
deterministic_enabled: Callable[[], bool] = _C._get_deterministic_algorithms
in_autocast: Callable[[], bool] = _C._is_any_autocast_enabled
# Number of active `TorchFunctionMode`s.
function_mode_count: Callable[[], int] = _C._len_torch_function_stack
is_batched: Callable[[Tensor], bool] = _C._functorch.is_batchedtensor
is_functional: Callable[[Tensor], bool] = torch._is_functional_tensor
is_grad_tracking: Callable[[Tensor], bool] = _C._functorch.is_gradtrackingtensor


def _stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


# Raw handle (cudaStream_t as int) of the current stream of a CUDA device.
stream_of: Callable[[int], int] = getattr(_C, "_cuda_getCurrentRawStream", _stream)
# Index of the current CUDA device.
device_index: Callable[[], int] = getattr(_C, "_cuda_getDevice", torch.cuda.current_device)
# Whether the current stream of the current CUDA device is capturing a CUDA graph.
is_stream_capturing: Callable[[], bool] = getattr(
    _C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)


def fast_empty_strided(device: torch.device) -> EmptyStrided:
    """Return a function (shape, strides, dtype) that allocates an uninitialized tensor on `device`.

    If `device` is a CUDA device, it must be the current device whenever the function is called.
    """
    fast: EmptyStrided | None = getattr(_GUARDS, f"_empty_strided_{device.type}", None)
    if fast is not None:
        return fast

    def make(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return make


def in_batched_gradients() -> bool:
    """Return whether autograd is computing batched gradients (`is_grads_batched=True`)."""
    return bool(_C._dispatch_tls_is_dispatch_key_included(_OLD_VMAP))


# Torch's own function: `context_parallel` replaces the attribute of torch.nn.functional.
SDPA = neural_functions.scaled_dot_product_attention
_tracing_state: Callable[[], Any] = _C._get_tracing_state
_functional: Any = torch.nn.functional
# The module of context parallelism, in the versions of torch that have it.
_CONTEXT_PARALLEL = (
    "torch.distributed.tensor.experimental._context_parallel._attention",
    "torch.distributed.tensor.experimental._attention",
)


def in_context_parallel() -> bool:
    """Return whether `torch.distributed.tensor.experimental.context_parallel` is active.

    It replaces `scaled_dot_product_attention`, and nothing else tells that it is active.
    """
    current = _functional.scaled_dot_product_attention
    if current is SDPA:
        return False
    modules = (sys.modules.get(name) for name in _CONTEXT_PARALLEL)
    return any(current in getattr(m, "_replaced_functions", ()) for m in modules)


def in_forward_ad() -> bool:
    """Return whether forward-mode AD is active."""
    return forward_ad._current_level >= 0


def in_jit_trace() -> bool:
    """Return whether torch.jit.trace is recording."""
    return _tracing_state() is not None


def is_intercepted(tensors: Iterable[Tensor]) -> bool:
    """Return whether anything except autograd intercepts an operator called with `tensors`.

    This may be a mode (except torch.device as a context, which affects only new tensors), a
    functorch transform, batched gradients, forward-mode AD, a jit trace, a tensor subclass, or a
    tensor whose values differ from those in its memory (lazy negation, zero tensors).
    """
    if (
        _C._len_torch_dispatch_stack()
        or _C._functorch.peek_interpreter_stack() is not None
        or in_jit_trace()
        or in_forward_ad()
        or _C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
        or in_batched_gradients()
    ):
        return True
    if not only_devices():
        return True
    for t in tensors:
        if t.__class__ not in PLAIN or t.is_neg() or t._is_zerotensor():
            return True
    return False


def only_devices() -> bool:
    """Return whether every active `TorchFunctionMode` is a torch.device used as a context."""
    for i in range(function_mode_count()):
        if type(_C._get_function_stack_at(i)) is not DeviceContext:
            return False
    return True


def tensor_guard(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Return a guard `check(*others)` that tests whether other tensors match `tensors`.

    The guard compares classes, dtypes, devices, shapes, strides, requires_grad, and the dispatch
    keys that modes, transforms and autocast add to a call. Where one tensor is at several places of
    `tensors`, it must be one tensor again. The result is None if this version of torch has no such
    guard or if the guard rejects `tensors` themselves.
    """
    if _TENSOR_GUARDS is None:
        return None
    place = {id(t): i for i, t in reversed(list(enumerate(tensors)))}  # the first of each
    firsts = sorted(place.values())
    distinct = [tensors[i] for i in firsts]
    guard: Callable[..., bool] = _TENSOR_GUARDS(
        *distinct,
        dynamic_dims_sizes=[list(t.shape) for t in distinct],
        dynamic_dims_strides=[list(t.stride()) for t in distinct],
    ).check
    if len(distinct) < len(tensors):  # torch's guard takes no tensor twice
        twins = [(i, place[id(t)]) for i, t in enumerate(tensors) if place[id(t)] != i]
        guard = _with_twins(guard, len(tensors), firsts, twins)
    return guard if guard(*tensors) else None


def _with_twins(
    guard: Callable[..., bool], count: int, firsts: list[int], twins: list[tuple[int, int]]
) -> Callable[..., bool]:
    """Return a guard of `count` tensors, some of which are the same tensor.

    Args:
        guard: guard of the distinct tensors.
        count: number of tensors.
        firsts: the places of the distinct tensors.
        twins: (place, earlier place of the same tensor).
    """

    def check(*others: Tensor) -> bool:
        if len(others) != count:
            return False
        for i, j in twins:
            if others[i] is not others[j]:
                return False
        return guard(*[others[i] for i in firsts])

    return check


def decomposition(operator: Any) -> Callable[..., Any] | None:
    """Return a Python function that computes an operator from others; None if none is known.

    It is the kernel for CompositeImplicitAutograd, if Python code registered that, or the entry in
    torch's table of decompositions.

    Args:
        operator: an OpOverload.
    """
    namespace, _, name = operator.name().partition("::")
    key = "CompositeImplicitAutograd"
    if f"{namespace}/{name}/{key}" in torch.library._impls:
        # the operator itself would ask the __torch_function__ of its arguments again
        return functools.partial(operator.redispatch, _C.DispatchKeySet(_AUTOGRAD_META))
    module = sys.modules.get("torch._decomp")
    return None if module is None else module.decomposition_table.get(operator)


def registered_autograd(operator: Any) -> tuple[Any, Any] | None:
    """Return the backward and the setup_context that are registered for an operator.

    Both are None if the operator has a gradient of its own that is not known. The result is None if
    it has none.

    Args:
        operator: an OpOverload.
    """
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(operator.name().partition(".")[0])
    if definition is not None:
        backward = definition._backward_fn
        return None if backward is None else (backward, definition._setup_context_fn)
    own = _C._dispatch_has_kernel_for_dispatch_key(operator.name(), "Autograd")
    return (None, None) if own else None


def recorded(x: Tensor) -> tuple[Any, bool, int]:
    """Return what autograd has recorded of a tensor of any class.

    Returns:
        The node that computed it (for an autograd.Function the `ctx` object of the call), whether
        it requires grad, and its place among the results of the node.
    """
    base: Any = Tensor
    with DisableTorchFunction():
        return base.grad_fn.__get__(x), base.requires_grad.__get__(x), base.output_nr.__get__(x)


def function_class(call: Any) -> type[torch.autograd.Function]:
    """Return the autograd.Function of a call, from the `ctx` object of the call."""
    return call._forward_cls  # type: ignore[no-any-return]


def result_count(call: Any) -> int:
    """Return the number of results of a call of an autograd.Function, from its `ctx` object."""
    return len(call._input_metadata)


def shares_storage(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same storage, which may be one without data."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def is_fake(tensor: Tensor) -> bool:
    """Return whether `tensor` is a `FakeTensor`, without importing the module of that class."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


def mark_constant(function: Callable[..., Any]) -> None:
    """Make torch.compile call `function` at compile time and treat its result as a constant.

    `torch.compiler.assume_constant_result` does the same but imports Dynamo, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def flex_parts() -> SimpleNamespace:
    """Return the private parts of FlexAttention that its users meet, as one namespace.

    Attributes:
        sliced: the mask_mod of a sliced BlockMask, which raises an error when it is called; None
            if this version of torch keeps the mask_mod.
        whole: BLOCK_SIZE of the BlockMask that stands for none.
        compute_dq_write_order: function (BlockMask, dq_kv_order) -> (dq_write_order,
            dq_write_order_full); None before torch 2.13.
    """
    from torch.nn.attention import flex_attention

    return SimpleNamespace(
        sliced=getattr(flex_attention, "_sliced_mask_mod_error", None),
        whole=flex_attention._LARGE_SPARSE_BLOCK_SIZE,
        compute_dq_write_order=getattr(
            flex_attention, "_compute_dq_write_order_from_block_mask", None
        ),
    )


@contextlib.contextmanager
def _changing_ints() -> Iterator[None]:
    """Let Dynamo treat an int that changes between calls as an input, wherever it is read from.

    By itself Dynamo does so for locals and closures, and compiles again for each value of a global,
    an attribute of a module or a default argument. Dynamo compiles one frame at a time.
    """
    from torch._dynamo.variables import builder as module

    builder: Any = module
    original = getattr(builder, "is_int_specialization_case", None)
    if original is None:  # this version of torch compiles again for each value
        yield
        return
    builder.is_int_specialization_case = lambda value, source: False
    try:
        yield
    finally:
        builder.is_int_specialization_case = original


def dynamo_parts() -> SimpleNamespace:
    """Import the parts of Dynamo that trace FlexAttention and return them as one namespace.

    Raises:
        ImportError: this version of torch does not have these parts, or has them elsewhere.
    """
    from torch._dynamo import _trace_wrapped_higher_order_op as wrapped
    from torch._dynamo.exc import UserError, UserErrorType
    from torch._dynamo.source import GlobalSource
    from torch._dynamo.variables import higher_order_ops
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.builder import wrap_fx_proxy

    return SimpleNamespace(
        GlobalSource=GlobalSource,
        OperatorVariable=higher_order_ops.TorchHigherOrderOperatorVariable,
        TransformGetItemToIndex=wrapped.TransformGetItemToIndex,
        UserError=UserError,
        UserErrorType=UserErrorType,
        VariableTracker=VariableTracker,
        discard_graph_changes=higher_order_ops.discard_graph_changes,
        mod_index=wrapped.mod_index,
        operator_variables=higher_order_ops._hop_name_to_variable_class,
        speculate_subgraph=higher_order_ops.speculate_subgraph,
        changing_ints=_changing_ints,
        wrap_fx_proxy=wrap_fx_proxy,
    )
