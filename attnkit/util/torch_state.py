"""What in torch may stand between a call and its kernel: modes, transforms, subclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from attnkit.errors import UnsupportedError

_C: Any = torch._C
_Guards: Any = getattr(getattr(getattr(_C, "_dynamo", None), "guards", None), "TensorGuards", None)
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_PRE_DISPATCH = _C.DispatchKey.PreDispatch


def undisturbed(tensors: Iterable[Tensor]) -> bool:
    """Whether nothing in torch would see an operator called with these tensors, autograd apart.

    No mode (but torch.device as a context, which only makes new tensors), no functorch transform,
    no forward-mode derivative, no jit trace; no subclass, and no tensor whose data is not what its
    memory holds.
    """
    if (
        _C._len_torch_dispatch_stack()
        or _C._functorch.peek_interpreter_stack() is not None
        or _C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or _C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
    ):
        return False
    if not only_devices():
        return False
    for t in tensors:
        if t.__class__ not in _PLAIN or t.is_neg() or t._is_zerotensor():
            return False
    return True


def only_devices() -> bool:
    """Whether torch.device as a context is all that would see a call of a torch function."""
    for i in range(_C._len_torch_function_stack()):
        if type(_C._get_function_stack_at(i)) is not DeviceContext:
            return False
    return True


def alike(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Tells whether other tensors are like these; None where torch has no way for that.

    Their classes, dtypes, devices, shapes and strides, whether they require gradients, and what
    modes, transforms and autocast put between a call and its kernel.
    """
    if _Guards is None:
        return None
    same: Callable[..., bool] = _Guards(
        *tensors,
        dynamic_dims_sizes=[list(t.shape) for t in tensors],
        dynamic_dims_strides=[list(t.stride()) for t in tensors],
    ).check
    return same if same(*tensors) else None


def refuse_transforms(tensors: Iterable[Tensor]) -> None:
    """Refuse tensors of which an operator would drop what a transform needs.

    Raises:
        UnsupportedError: one is batched by torch.func, or a derivative is taken by it.
    """
    if any(_C._functorch.is_batchedtensor(t) for t in tensors):
        raise UnsupportedError(
            "attnkit's attention has no rule for torch.func.vmap; give it batches, or take "
            'backend="eager" (dense)'
        )
    # torch drops the tangents of an operator's inputs where no gradient is recorded
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise UnsupportedError(
            "attnkit's attention has no forward-mode derivative; take the reverse mode, or use "
            'backend="eager" (dense, differentiable in both)'
        )
    if any(_C._functorch.is_gradtrackingtensor(t) for t in tensors):
        raise UnsupportedError(
            "attnkit's attention has no rule for torch.func.grad; take torch.autograd, or "
            'backend="eager" (dense)'
        )
