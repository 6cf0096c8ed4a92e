"""Build the functions to time for a GPU case: calls of attnkit and of its peers.

A builder takes a `Problem` and returns a `Run`. It raises `Unsuitable` if the peer is not installed
or does not support the case. It does not catch errors of the peer itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from cudnn_frontend import DTYPES, Attention
from gpu_variants import SOFTCAPS, WINDOWS, Problem, document_cuts
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import flex_attention as flex

import attnkit

DEFAULT_BLOCK = (128, 128)  # FlexAttention's


class Unsuitable(Exception):
    """Raised if a contender cannot run a case; the message gives the reason."""


def _same(t: Tensor) -> Tensor:
    return t


@dataclass(frozen=True)
class Run:
    """Hold the functions that run one contender on one problem.

    Attributes:
        call: runs the forward and returns the output in the contender's own layout.
        leaves: the tensors whose gradients the backward computes: query, key, value and learned
            tensors.
        own: converts a tensor [B, H, S, D] to the contender's layout.
        shown: converts a tensor in the contender's layout to [B, H, S, D].
    """

    call: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    own: Callable[[Tensor], Tensor] = _same
    shown: Callable[[Tensor], Tensor] = _same

    def directed(self, grad: Tensor | None) -> Callable[[], list[Tensor]]:
        """Return the function to time: the forward, or only the backward if `grad` is given.

        Args:
            grad: gradient of the output, [B, H, S, D].
        """
        if grad is None:
            return lambda: [self.call()]
        out, native = self.call(), self.own(grad).contiguous()
        return lambda: list(torch.autograd.grad(out, self.leaves, native, retain_graph=True))


def _leaves(p: Problem) -> tuple[Tensor, ...]:
    return (p.query, p.key, p.value, *p.learned)


def attnkit_run(
    p: Problem,
    kernel_options: dict[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    backend: str = "cute",
    deterministic: bool = False,
    trusts: bool = False,
) -> Run:
    """Build a call of attnkit.

    The call passes the mask as a function, not as a block mask, so that attnkit chooses the tile
    sizes.

    Args:
        p: the problem.
        kernel_options, backend, deterministic: arguments of `flex_attention`.
        environment: environment variables to set during the call.
        trusts: whether the call runs under `trust_version_counters`, so that its kernels do not
            compare captured data.
    """
    grouped, score_mod = p.shape.heads != p.shape.kv_heads, p.score_mod
    aux = attnkit.AuxRequest(entropy=True) if p.entropy else None

    def call() -> Tensor:
        result: Any = attnkit.flex_attention(
            *(p.query, p.key, p.value, score_mod, p.mask_mod),
            enable_gqa=grouped, kernel_options=kernel_options, backend=backend,
            deterministic=deterministic, sink=p.sink, return_aux=aux,
            normalization=p.normalization, dropout_p=p.dropout_p,
        )  # fmt: skip
        out: Tensor = result if aux is None else result[0]
        return out

    def within() -> Tensor:
        with _environment(environment or {}), attnkit.trust_version_counters(trusts):
            return call()

    return Run(within if environment or trusts else call, _leaves(p))


def deterministic_run(p: Problem) -> Run:
    """Build a call of attnkit with `deterministic=True`, for the backward only.

    Raises:
        Unsuitable: the problem is a forward, which the option does not change.
    """
    if not p.query.requires_grad:
        raise Unsuitable("a forward is deterministic as it is")
    return attnkit_run(p, deterministic=True)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the `with` block and restore them afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def flex_run(
    p: Problem,
    kernel_options: dict[str, Any] | None = None,
    block: tuple[int, int] | None = None,
    mode: str | None = None,
) -> Run:
    """Build a call of compiled FlexAttention as its documentation recommends.

    The block mask is built once, outside the call.

    Args:
        p: the problem.
        kernel_options: passed to `flex_attention`.
        block: `BLOCK_SIZE` of the block mask, (query, kv); `DEFAULT_BLOCK` if None.
        mode: passed to `torch.compile`.
    """
    if p.sink is not None or p.entropy or p.normalization != "softmax" or p.dropout_p:
        raise Unsuitable("has no attention sink, entropies, dropout and weights but a softmax's")
    mask = None
    if p.mask_mod is not None:
        length, device = p.shape.length, p.query.device
        blocks = block or DEFAULT_BLOCK
        mask = flex.create_block_mask(
            p.mask_mod, None, None, length, length, device=device, BLOCK_SIZE=blocks
        )
    elif block is not None:
        raise Unsuitable("has no block mask here, so no BLOCK_SIZE")
    # fullgraph: reaching the recompile limit raises an error instead of running eagerly
    compiled = torch.compile(_copied(flex.flex_attention), dynamic=False, fullgraph=True, mode=mode)
    grouped, score_mod = p.shape.heads != p.shape.kv_heads, p.score_mod
    return Run(
        lambda: compiled(
            *(p.query, p.key, p.value), score_mod=score_mod, block_mask=mask,
            enable_gqa=grouped, kernel_options=kernel_options,
        ),
        _leaves(p),
    )  # fmt: skip


def _copied(function: Any) -> FunctionType:
    """Copy a function and its code object.

    `torch.compile` keeps its cache and its count of recompiles per code object, so a copy starts
    with neither.
    """
    code = function.__code__.replace()
    whole = (function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy = FunctionType(code, *whole)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def flex_flash_run(p: Problem, block: tuple[int, int] | None = None) -> Run:
    """Build a call of compiled FlexAttention on FlashAttention-4's kernels."""
    _flash_attention_4()
    return flex_run(p, {"BACKEND": "FLASH"}, block)


def _flash_attention_4() -> Any:
    """Return FlashAttention-4's interface module; raise `Unsuitable` if it is not installed."""
    try:
        from flash_attn.cute import interface
    except ImportError as error:
        raise Unsuitable(f"flash-attn-4 is not installed ({error})") from None
    return interface


def fa4_run(p: Problem, pack_gqa: bool | None = None) -> Run:
    """Build a direct call of FlashAttention-4 (layout [B, S, H, D]), for its built-in variants."""
    interface = _flash_attention_4()
    if pack_gqa is not None and p.shape.heads == p.shape.kv_heads:
        raise Unsuitable("has no heads to pack: none are shared")
    options: dict[str, Any] = {
        "": {},
        "causal": {"causal": True},
        **{name: {"window_size": (size - 1, 0)} for name, size in WINDOWS.items()},
        "documents": {"causal": True},
    }.get(p.mask, {"unknown": True})
    if options.pop("unknown", False) or p.score not in ("", *SOFTCAPS):
        raise Unsuitable("has no such mask or score built in, but by hand-written CuTe functions")
    if pack_gqa is not None:
        options["pack_gqa"] = pack_gqa
    if p.score:
        options["softcap"] = SOFTCAPS[p.score]
    if p.entropy or p.normalization != "softmax" or p.dropout_p:
        raise Unsuitable("has no entropies, no dropout and no weights but a softmax's")
    if p.sink is not None:
        if p.query.requires_grad:
            raise Unsuitable("has no backward with an attention sink")
        options["learnable_sink"] = p.sink.to(p.query.dtype)
    if p.mask == "documents":
        return _fa4_documents(p, interface.flash_attn_varlen_func, options)

    def turned(t: Tensor) -> Tensor:
        return t.transpose(1, 2)

    q, k, v = (_leaf(turned(t).contiguous(), t) for t in (p.query, p.key, p.value))
    return Run(lambda: interface.flash_attn_func(q, k, v, **options)[0], (q, k, v), turned, turned)


def _fa4_documents(p: Problem, function: Callable[..., Any], options: dict[str, Any]) -> Run:
    """Build a varlen call of FlashAttention-4, with the documents as sequences ([B S, H, D])."""
    shape = p.shape

    def packed(t: Tensor) -> Tensor:
        return t.transpose(1, 2).flatten(0, 1)

    def unpacked(t: Tensor) -> Tensor:
        return t.unflatten(0, (shape.batch, shape.length)).transpose(1, 2)

    cuts = torch.cat((torch.zeros(1, dtype=torch.int64), document_cuts(shape.length)))
    starts = (cuts + shape.length * torch.arange(shape.batch)[:, None]).flatten()
    ends = torch.cat((starts, torch.tensor([shape.batch * shape.length])))
    options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), int(ends.diff().max()))
    bounds = ends.to(p.query.device, torch.int32)
    options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), bounds)
    q, k, v = (_leaf(packed(t).contiguous(), t) for t in (p.query, p.key, p.value))
    return Run(lambda: function(q, k, v, **options)[0], (q, k, v), packed, unpacked)


def _leaf(t: Tensor, like: Tensor) -> Tensor:
    return t.detach().requires_grad_(like.requires_grad)


def sdpa_run(p: Problem, backend: attention.SDPBackend) -> Run:
    """Build a call of scaled_dot_product_attention restricted to one backend."""
    softmax = p.sink is None and not p.entropy and p.normalization == "softmax"
    if p.score or not softmax or p.mask not in ("", "causal"):
        raise Unsuitable("has no such mask or score")
    grouped = p.shape.heads != p.shape.kv_heads

    def call() -> Tensor:
        with attention.sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                p.query, p.key, p.value, is_causal=p.mask == "causal", enable_gqa=grouped,
                dropout_p=p.dropout_p,
            )  # fmt: skip

    return Run(call, _leaves(p))


def cudnn_run(p: Problem) -> Run:
    """Build a call of cuDNN, by its own frontend if there is a window or a sink, else by SDPA."""
    if p.sink is None and p.mask not in WINDOWS:
        return sdpa_run(p, attention.SDPBackend.CUDNN_ATTENTION)
    softmax = not p.entropy and p.normalization == "softmax" and not p.dropout_p
    if p.score or not softmax or p.mask not in ("", "causal", *WINDOWS):
        raise Unsuitable("has no such mask or score")
    if p.query.dtype not in DTYPES:
        raise Unsuitable(f"has no {p.query.dtype}")
    built = Attention(
        _cudnn(), p.query, p.key, p.value, p.sink, causal=p.mask != "", window=WINDOWS.get(p.mask)
    )
    return Run(lambda: built(p.query, p.key, p.value, p.sink), _leaves(p))


def _cudnn() -> Any:
    """Return the module of cuDNN's frontend; raise `Unsuitable` if it is not installed."""
    try:
        import cudnn
    except ModuleNotFoundError:
        raise Unsuitable("nvidia-cudnn-frontend is not installed") from None
    return cudnn


OURS = "attnkit"
Builder = Callable[[Problem], Run]
Sweep = Mapping[str, Builder]  # the settings of a contender by name; the first is its default
AUTOTUNE = "max-autotune-no-cudagraphs"
# Slow settings come last: a sweep has a time limit.
CONTENDERS: dict[str, Sweep] = {
    OURS: {"default": attnkit_run},
    f"{OURS} deterministic": {"default": deterministic_run},
    "Flex Triton": {
        "default": flex_run,
        "blocks 64x64": partial(flex_run, block=(64, 64)),
        "max-autotune": partial(flex_run, mode=AUTOTUNE),
        "max-autotune, blocks 64x64": partial(flex_run, block=(64, 64), mode=AUTOTUNE),
    },
    "Flex FLASH": {
        "default": flex_flash_run,
        "blocks 256x128": partial(flex_flash_run, block=(256, 128)),
        "blocks 64x128": partial(flex_flash_run, block=(64, 128)),
    },
    "FlashAttention-4": {
        "default": fa4_run,
        "pack_gqa": partial(fa4_run, pack_gqa=True),
        "no pack_gqa": partial(fa4_run, pack_gqa=False),
    },
    "cuDNN": {"default": cudnn_run},
    "FlashAttention-2": {
        "default": partial(sdpa_run, backend=attention.SDPBackend.FLASH_ATTENTION)
    },
}


def default(name: str) -> Builder:
    """Return the builder of a contender with its default setting."""
    return next(iter(CONTENDERS[name].values()))


def skipped(name: str, error: Exception) -> dict[str, Any]:
    """Return the fields of a row that give the reason why a contender was skipped.

    "failed" is set if attnkit raised an error other than UnsupportedError.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    refused = isinstance(error, Unsuitable | attnkit.UnsupportedError)
    row: dict[str, Any] = {
        "skipped": (text if refused else f"{type(error).__name__}: {text}")[:200]
    }
    return row | ({"failed": True} if name.startswith(OURS) and not refused else {})


def ablations(config: dict[str, Any], case: str) -> dict[str, Sweep]:
    """Return attnkit with the ablation options of `config` for a case, as contenders by name."""

    def builder(entry: dict[str, Any]) -> Builder:
        options, environment = entry.get("kernel_options"), entry.get("environment")
        trusts = entry.get("trusts", False)
        return lambda p: attnkit_run(p, options, environment, trusts=trusts)

    chosen = [entry for entry in config.get("ablation", []) if case in entry["cases"]]
    return {f"{OURS}: {entry['name']}": {"default": builder(entry)} for entry in chosen}
