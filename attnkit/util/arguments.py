"""Check the arguments of public functions; error messages give the actual and expected value."""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from attnkit.errors import (
    ArgumentError,
    ConflictError,
    DeviceError,
    DTypeError,
    OptionError,
    RankError,
    ShapeError,
    UnsupportedError,
)
from attnkit.util.torch_private import PLAIN, in_context_parallel, in_jit_trace, is_functional

if TYPE_CHECKING:
    from typing import TypedDict

    class CallOptions(TypedDict, total=False):
        """Lists the options of `flex_attention` that change no type, for its overloads."""

        backend: str
        deterministic: bool
        sink: Tensor | None
        normalization: str
        dropout_p: float

    class VariantOptions(CallOptions, total=False):
        """Lists what a call of a `Variant` takes besides."""

        scale: float | None
        enable_gqa: bool
        kernel_options: dict[str, Any] | None


T = TypeVar("T")

_TRANSPOSE = "Tensors [batch, length, heads, head dim] must be transposed: query.transpose(1, 2)"

_PLAIN = (bool, int, float, complex, str, bytes, type(None))

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

MAX_LENGTH = 2**31 - 1  # positions are int32
MAX_FLOAT = torch.finfo(torch.float32).max

# FlexAttention's kernel options. Those that tune its Triton kernels do not change results; the plan
# notes that they are ignored. BLOCK_M and BLOCK_N set the tile sizes if the mask is a function.
BLOCK_OPTIONS = ("BLOCK_M", "BLOCK_N")
TUNING_OPTIONS = (
    "num_warps num_stages BLOCK_M1 BLOCK_N1 BLOCK_M2 BLOCK_N2 PRESCALE_QK ROWS_GUARANTEED_SAFE "
    "BLOCKS_ARE_CONTIGUOUS WRITE_DQ FORCE_USE_FLEX_ATTENTION USE_TMA kpack matrix_instr_nonkdim "
    "waves_per_eu BACKEND num_consumer_groups num_buffers_warp_spec"
).split()


# Values of the option BACKEND. All of them mean that attnkit chooses.
BACKENDS = ("AUTO", "TRITON", "FLASH", "TRITON_DECODE")

# The type of `kernel_options`, for annotations.
FlexKernelOptions: TypeAlias = dict[str, Any]


class AuxRequest(NamedTuple):
    """Selects the auxiliary outputs that `flex_attention` returns.

    Attributes:
        lse: whether to return the log-sum-exp of each row (natural logarithm).
        max_scores: whether to return the largest score of each row, after `score_mod`.
        max_logits: whether to return the largest score of each head, after `score_mod`.
        entropy: whether to return the entropy of each row's softmax.
        column_sums: whether to return the sums of the weights of each key over the queries. They
            need a second pass over the scores, which torch operators run on every backend.
    """

    lse: bool = False
    max_scores: bool = False
    max_logits: bool = False
    entropy: bool = False
    column_sums: bool = False

    @property
    def needs_row_maxima(self) -> bool:
        """Return whether an output is made of the row maxima."""
        return self.max_scores or self.max_logits


class AuxOutput(NamedTuple):
    """Holds the auxiliary outputs of `flex_attention`; an output that was not requested is None.

    All are float32 (float64 for float64 inputs).

    Attributes:
        lse: [B, Hq, Sq], log-sum-exp of each row, -inf (the sink, if there is one) for a fully
            masked row; differentiable.
        max_scores: [B, Hq, Sq], largest score of each row, -inf for a fully masked row; not
            differentiable. A sink is no score.
        max_logits: [B, Hq], largest of a head's `max_scores`, -inf for a head without a kept score;
            not differentiable. QK-Clip (Kimi K2) rescales the projections of query and key by it.
        entropy: [B, Hq, Sq], entropy of each row's softmax in nats: LSE - sum(p * score), at least
            0, and 0 for a fully masked row; differentiable. A sink counts as one more score.
        column_sums: [B, Hq, Skv], for each key the sum of its weights over the queries (what H2O
            keeps a key for, Zhang et al., 2023); differentiable. Fully masked rows add 0. A sink is
            no key, and takes its share from the others. The weights are those before dropout. With
            normalization "sigmoid" or "none" they are the sigmoids or the scores.
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None
    max_logits: Tensor | None = None
    entropy: Tensor | None = None
    column_sums: Tensor | None = None

    @staticmethod
    def of(
        request: AuxRequest,
        lse: Tensor,
        max_scores: Tensor | None,
        entropy: Tensor | None,
        column_sums: Tensor | None = None,
    ) -> AuxOutput:
        """Return the outputs that `request` selects.

        Args:
            request: the checked request.
            lse: [B, Hq, Sq].
            max_scores: [B, Hq, Sq]; None unless `request.needs_row_maxima`.
            entropy: [B, Hq, Sq]; None unless `request.entropy`.
            column_sums: [B, Hq, Skv]; None unless `request.column_sums`.
        """
        return AuxOutput(
            lse if request.lse else None,
            max_scores if request.max_scores else None,
            _largest(max_scores) if request.max_logits and max_scores is not None else None,
            entropy if request.entropy else None,
            column_sums if request.column_sums else None,
        )


def _largest(max_scores: Tensor) -> Tensor:
    """Return the largest of each row [..., n]; -inf if n is 0."""
    if not max_scores.shape[-1]:
        return max_scores.new_full(max_scores.shape[:-1], -math.inf)
    return max_scores.amax(-1)


def check_tensors(query: Any, key: Any, value: Any, enable_gqa: Any) -> None:
    """Check types, shapes, dtypes and devices of the `query`, `key` and `value` of an attention.

    Raises:
        ArgumentError: an argument is not a tensor.
        ShapeError: a shape is wrong, or the shapes do not match.
        DTypeError: a dtype is not supported, or the dtypes differ.
        DeviceError: the devices differ.
        OptionError: enable_gqa is not a bool.
        UnsupportedError: a tensor is nested, a DTensor or not dense.
    """
    named = {"query": query, "key": key, "value": value}
    for name, t in named.items():
        if not isinstance(t, Tensor):
            raise ArgumentError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.is_nested:
            raise UnsupportedError(
                f"{name} is a nested tensor; pack the sequences into one and mask by document "
                "(attnkit.masks.document)"
            )
        refuse_functional(name, t)
        refuse_dtensor(name, t)
        if t.layout != torch.strided:
            raise UnsupportedError(
                f"{name} has layout {t.layout}; expected a dense tensor: {name}.to_dense()"
            )
        if t.ndim != 4:
            raise RankError(
                f"{name} must have 4 dimensions [batch, heads, length, head dim], got shape "
                f"{tuple(t.shape)}; tensor[None] adds a dimension of size 1"
            )
        for axis, what in enumerate(("batch", "heads", "length", "head dim")):
            if t.shape[axis] == 0:
                raise ShapeError(f"{name} has no elements: its {what} is 0, shape {tuple(t.shape)}")
        if t.shape[2] > MAX_LENGTH:
            raise ShapeError(
                f"{name} has length {t.shape[2]}; positions are int32, expected at most "
                f"{MAX_LENGTH}"
            )
        if t.dtype not in DTYPES:
            raise DTypeError(f"{name} has dtype {t.dtype}; expected one of {_names(DTYPES)}")
        if t.dtype != query.dtype:
            raise DTypeError(_two_dtypes(name, query, key, value))
        if t.device != query.device:
            raise DeviceError(f"{name} is on {t.device}, query is on {query.device}; move one")
    _check_shapes(query, key, value)
    _check_heads(query.shape[1], key.shape[1], enable_gqa)


def _two_dtypes(name: str, query: Tensor, key: Tensor, value: Any) -> str:
    """Return the message about a key or value in another dtype than the query, with the costs.

    `value` is unchecked.
    """
    t = key if name == "key" else value
    message = (
        f"{name} has dtype {t.dtype}, query has {query.dtype}; attnkit converts none of them unasked, "
        f"as that rounds, and copies at every call. {name}.to({query.dtype}) writes "
        f"{_memory(t, query.dtype)}; convert a cache once, when it is written"
    )
    if isinstance(value, Tensor) and key.dtype == value.dtype:
        message += (
            f". query.to({key.dtype}) writes {_memory(query, key.dtype)}, and gives an output of "
            "that dtype"
        )
    return message


def _memory(t: Tensor, dtype: torch.dtype) -> str:
    """Return the memory of a tensor in another dtype, as text."""
    count = t.numel()
    if not isinstance(count, int):  # inside of torch.compile
        return "a copy"
    size = count * dtype.itemsize
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size} bytes"


def refuse_dtensor(name: str, tensor: Tensor) -> None:
    """Raise if `tensor` is a DTensor, whose local part is not the whole tensor.

    Raises:
        UnsupportedError: `tensor` is a DTensor.
    """
    if type(tensor).__name__ == "DTensor":
        raise UnsupportedError(
            f"{name} is a DTensor; where it is sharded by batch or heads, pass what "
            f"{name}.to_local() gives"
        )


def check_surroundings() -> None:
    """Raise where a call would be recorded with its tiles, or would see a part of its tensors.

    Raises:
        UnsupportedError: the call is inside of torch.jit.trace or of torch's `context_parallel`.
    """
    if in_jit_trace():
        raise UnsupportedError(
            "torch.jit.trace would record flex_attention with the tiles of one example; use "
            "torch.compile, or torch.export for a program that is saved"
        )
    refuse_context_parallel()


def refuse_script() -> NoReturn:
    """Raise because torch.jit.script was asked to compile a function of attnkit.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "torch.jit.script cannot compile flex_attention, whose functions are traced when it is "
        "called; use torch.compile, or torch.export for a program that is saved"
    )


def refuse_context_parallel() -> None:
    """Raise inside torch's `context_parallel`, where each rank holds a part of the sequence.

    Raises:
        UnsupportedError: the context is active.
    """
    if in_context_parallel():
        raise UnsupportedError(
            "flex_attention inside of torch.distributed.tensor.experimental.context_parallel would "
            "attend to this rank's part of the sequence alone; call it outside of that context, on "
            "whole sequences, or use scaled_dot_product_attention there"
        )


def refuse_functional(name: str, tensor: Tensor) -> None:
    """Raise if `tensor` is a functional tensor (inside torch.func.functionalize).

    Raises:
        UnsupportedError: `tensor` is a functional tensor, whose data cannot be read.
    """
    if is_functional(tensor):
        raise UnsupportedError(
            f"{name} is a tensor of torch.func.functionalize, for which attnkit's attention has no "
            "rule; use torch.compile"
        )


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if key.shape[-1] != query.shape[-1]:
        raise ShapeError(
            f"key has head dim {key.shape[-1]}, query has {query.shape[-1]}; they must be equal"
        )
    for axis, what in ((0, "batch"), (1, "heads"), (2, "length")):
        if key.shape[axis] != value.shape[axis]:
            raise ShapeError(
                f"key has {what} {key.shape[axis]}, value has {value.shape[axis]}; they must be "
                f"equal (shapes {tuple(key.shape)} and {tuple(value.shape)})"
            )
    if key.shape[0] not in (1, query.shape[0]):
        raise ShapeError(
            f"key and value have batch {key.shape[0]}, query has {query.shape[0]}; expected the "
            "same, or 1 to share them"
        )


def _check_heads(heads: int, kv_heads: int, enable_gqa: Any) -> None:
    if not isinstance(enable_gqa, bool):
        raise OptionError(f"enable_gqa must be True or False, got {shown(enable_gqa)}")
    if heads == kv_heads:
        return
    if not enable_gqa:
        raise ShapeError(
            f"query has {heads} heads, key and value have {kv_heads}; expected the same. "
            f"For grouped-query attention set enable_gqa=True. {_TRANSPOSE}"
        )
    if heads % kv_heads:
        raise ShapeError(
            f"query has {heads} heads, which is not a multiple of the {kv_heads} heads of key and "
            f"value. {_TRANSPOSE}"
        )


def check_sink(sink: Any, query: Tensor) -> None:
    """Check the attention sink of a call, a tensor [Hq] or None; `query` has been checked.

    Raises:
        ArgumentError: `sink` is not a dense tensor, or its storage is too small.
        ShapeError: its shape is not [Hq].
        DTypeError: its dtype is not float32, nor float64 as that of the query.
        DeviceError: it is on another device than the query.
    """
    if sink is None:
        return
    heads = query.shape[1]
    if not isinstance(sink, Tensor):
        raise ArgumentError(
            f"sink must be a tensor [{heads}] of one logit per query head or None, got "
            f"{shown(sink)}; for one number in all heads: torch.full(({heads},), number)"
        )
    refuse_functional("sink", sink)
    if sink.is_nested or sink.layout != torch.strided or type(sink).__name__ == "DTensor":
        got = f"{sink.layout}; pass sink.to_dense()"
        if type(sink).__name__ == "DTensor":
            got = "a DTensor; pass the sinks of the heads of this rank: sink.to_local()"
        elif sink.is_nested:
            got = "a nested tensor"
        raise ArgumentError(f"sink must be a dense tensor [{heads}], got {got}")
    if tuple(sink.shape) != (heads,):
        raise ShapeError(
            f"sink has shape {tuple(sink.shape)}; expected ({heads},), one logit for each of the "
            f"{heads} query heads. {_sink_hint(tuple(sink.shape), heads)}"
        )
    if sink.dtype not in (torch.float32, query.dtype) or sink.dtype in DTYPES[:2]:
        expected = "float32 or float64" if query.dtype == torch.float64 else "float32"
        raise DTypeError(
            f"sink has dtype {sink.dtype}; expected {expected} with a query of "
            f"{query.dtype}: pass sink.float()"
        )
    if sink.device != query.device:
        raise DeviceError(
            f"sink is on {sink.device}, query is on {query.device}; move it with "
            f"sink.to({str(query.device)!r})"
        )
    if lacks_memory(sink):
        raise ArgumentError(
            "sink has a storage that is smaller than the tensor, as after "
            "`untyped_storage().resize_(0)`; allocate the storage before the call"
        )


def _sink_hint(shape: tuple[int, ...], heads: int) -> str:
    """Return what to write instead of a sink of a wrong shape."""
    if math.prod(shape) == heads:
        return "Pass sink.flatten()"
    if math.prod(shape) == 1:
        return f"It is not broadcast: pass sink.expand({heads})"
    return "A term that also depends on the batch element or the row belongs in score_mod"


def check_scale(scale: Any, width: int) -> float:
    """Check the softmax scale and return it; None gives 1 / sqrt(`width`).

    Raises:
        OptionError: `scale` is not a number in the range of float32.
    """
    if scale is None:
        return 1 / math.sqrt(width)
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise OptionError(
            f"scale must be a number or None, got {shown(scale)}; a scale that is a tensor belongs "
            "in score_mod, where it also gets its gradient (attnkit.flex.flex_attention takes it)"
        )
    if isinstance(scale, float) and not math.isfinite(scale):
        raise OptionError(f"scale must be finite, got {scale}")
    if abs(scale) > MAX_FLOAT:
        raise OptionError(f"scale must be finite as a float32, got {shown(scale)}")
    return float(scale)


def check_flag(name: str, flag: Any) -> bool:
    """Check that the option `name` is a bool and return its value.

    Raises:
        OptionError: `flag` is not a bool.
    """
    if not isinstance(flag, bool):
        raise OptionError(f"{name} must be True or False, got {shown(flag)}")
    return flag


def check_aux(return_lse: Any, return_aux: Any) -> AuxRequest:
    """Check `return_lse` and `return_aux`, and combine them into one `AuxRequest`.

    PyTorch's AuxRequest, which has only the first two fields, is accepted too.

    Raises:
        OptionError: `return_lse` is not a bool, or both arguments are given.
        ArgumentError: `return_aux` is not an `AuxRequest`.
    """
    check_flag("return_lse", return_lse)
    if return_aux is None:
        return AuxRequest(lse=return_lse)
    if return_lse:
        raise OptionError("return_lse and return_aux were both given; use return_aux alone")
    if not (hasattr(return_aux, "lse") and hasattr(return_aux, "max_scores")):
        raise ArgumentError(f"return_aux must be an AuxRequest, got {type(return_aux).__name__}")
    own = [bool(getattr(return_aux, name, False)) for name in AuxRequest._fields[2:]]
    return AuxRequest(bool(return_aux.lse), bool(return_aux.max_scores), *own)


def check_options(
    options: Any, default: tuple[int, int]
) -> tuple[tuple[int, int], tuple[str, ...]]:
    """Check `kernel_options`; return (BLOCK_M, BLOCK_N) and a note for each ignored option.

    Args:
        options: the `kernel_options` argument of the caller.
        default: (BLOCK_M, BLOCK_N) to use if `options` is None or does not set them.

    Raises:
        ArgumentError: `options` is not a dict.
        OptionError: an option is unknown (the message suggests a known name), or a tile size is
            not a positive int, or BACKEND has another value than FlexAttention's.
        ConflictError: BACKEND and FORCE_USE_FLEX_ATTENTION are both given.
    """
    if options is None:
        return default, ()
    if not isinstance(options, Mapping):
        raise ArgumentError(f"kernel_options must be a dict, got {type(options).__name__}")
    known = [*BLOCK_OPTIONS, *TUNING_OPTIONS]
    known += [f"{way}_{name}" for way in ("fwd", "bwd") for name in known]
    sizes = list(default)
    notes = []
    for name, value in options.items():
        if name not in known:
            close = difflib.get_close_matches(name if isinstance(name, str) else "", known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"
            raise OptionError(f"kernel_options has no option {shown(name)}{hint}")
        if name in BLOCK_OPTIONS:
            sizes[BLOCK_OPTIONS.index(name)] = check_size(f"kernel_options[{name!r}]", value)
        else:
            notes.append(f"kernel_options[{name!r}] tunes FlexAttention's own kernels: not used")
    _check_backend(options)
    return (sizes[0], sizes[1]), tuple(notes)


def _check_backend(options: Mapping[str, Any]) -> None:
    if "BACKEND" not in options:
        return
    if options.get("FORCE_USE_FLEX_ATTENTION", False):
        raise ConflictError(
            "kernel_options has BACKEND and FORCE_USE_FLEX_ATTENTION, which BACKEND replaces; drop "
            "FORCE_USE_FLEX_ATTENTION"
        )
    backend = options["BACKEND"]
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise OptionError(
            f"kernel_options['BACKEND'] must be one of {', '.join(BACKENDS)}, got {shown(backend)}; "
            "attnkit's own backends are the argument `backend`"
        )


def check_size(name: str, value: Any) -> int:
    """Check that `value` is an int from 1 to 2**31 - 1 and return it.

    Raises:
        OptionError: `value` is not such an int.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name} must be a positive int, got {shown(value)}")
    if value > MAX_LENGTH:
        raise OptionError(
            f"{name} must be at most {MAX_LENGTH}, as positions are int32; got {value}"
        )
    return value


def check_sizes(name: str, value: Any) -> tuple[int, int]:
    """Check a size for both axes or a (query, kv) pair of sizes, and return a (query, kv) pair.

    Raises:
        OptionError: `value` is neither a positive int nor a pair of positive ints.
    """
    sizes = value if isinstance(value, tuple | list) else (value, value)
    if len(sizes) != 2:
        raise OptionError(f"{name} must be an int or a (query, kv) pair, got {shown(value)}")
    return check_size(name, sizes[0]), check_size(name, sizes[1])


def check_dtype(name: str, dtype: Any, allowed: Sequence[torch.dtype] = DTYPES) -> torch.dtype:
    """Check that `dtype` is one of the `allowed` dtypes and return it.

    Raises:
        DTypeError: `dtype` is another dtype, or not a dtype.
    """
    if not isinstance(dtype, torch.dtype) or dtype not in allowed:
        raise DTypeError(f"{name} must be one of {_names(allowed)}, got {shown(dtype)}")
    return dtype


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def check_seed(seed: Any) -> int:
    """Check that a random seed is a signed 64-bit int and return it.

    Raises:
        OptionError: `seed` is not a signed 64-bit int.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise OptionError(f"seed must be an int of 64 bits, got {shown(seed)}")
    return seed


def check_type(name: str, value: Any, kind: type[T], expected: str) -> T:
    """Check that `value` is an instance of `kind` and return `value`.

    Args:
        name: name of the argument, for the error message.
        value: value of the argument.
        kind: the required class.
        expected: description of a valid value, for the error message.

    Raises:
        ArgumentError: `value` is not an instance of `kind`.
    """
    if not isinstance(value, kind):
        raise ArgumentError(f"{name} must be {expected}, got {shown(value)}")
    return value


def index_instead(mask: Any) -> str:
    """Return advice for an error message on how to use a tensor as a mask; "" if not a tensor."""
    if not isinstance(mask, Tensor):
        return ""
    index = ", ".join(("b", "h", "q", "kv")[-min(mask.ndim, 4) :]) if mask.ndim > 1 else "kv"
    return f"; capture the tensor and index it: lambda b, h, q, kv: mask[{index}]"


def shown(value: Any) -> str:
    """Return `value` as a short text (at most one line) for an error message."""
    if isinstance(value, _PLAIN):
        return reprlib.repr(value)
    if isinstance(value, torch.dtype | torch.device | np.generic):
        return repr(value)
    if isinstance(value, tuple | list) and all(isinstance(x, _PLAIN) for x in value):
        return reprlib.repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return type(value).__name__  # its repr may be long, or compute something


def lacks_memory(t: Tensor) -> bool:
    """Return whether the storage of a plain tensor is too small for it, as FSDP leaves storages."""
    if type(t) not in PLAIN or t.is_meta or not t.numel():
        return False
    last = t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    try:
        return t.untyped_storage().nbytes() < (last + 1) * t.element_size()
    except (RuntimeError, NotImplementedError):  # a tensor of torch.func has no storage
        return False


def check_captured(
    what: str, names: Sequence[str], tensors: Sequence[Tensor], device: torch.device
) -> None:
    """Check that captured tensors have memory and are on the query's device.

    0-d CPU tensors are allowed for a query on any device.

    Args:
        what: "score_mod" or "mask_mod", for the error message.
        names: variable names of the tensors.
        tensors: the captured tensors.
        device: device of the query.

    Raises:
        DeviceError: a tensor is on another device.
        ArgumentError: the storage of a tensor is smaller than the tensor.
    """
    for name, t in zip(names, tensors, strict=True):
        if lacks_memory(t):
            raise ArgumentError(
                f"{what} reads the tensor {name!r}, whose storage is smaller than the tensor, as "
                "after `untyped_storage().resize_(0)`; allocate the storage before the call"
            )
        if t.device != device and not (t.ndim == 0 and t.device.type == "cpu"):
            raise DeviceError(
                f"{what} reads the tensor {name!r} on {t.device}, query is on {device}; "
                f"move it with {name}.to({str(device)!r})"
            )
