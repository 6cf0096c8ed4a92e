"""Choose the plan of a call: its template, its tile sizes, and the reasons.

Each legality rule has a predicate and a message. Tile sizes come from `kernel_table`.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from attnkit.errors import OptionError, UnsupportedError
from attnkit.schedule.kernel_table import Kernel, kernels, mask_tiles, widest
from attnkit.schedule.targets import (
    EMULATED,
    SM90,
    Target,
    missing_arch,
    missing_capability,
    of_arch,
    of_capability,
)
from attnkit.sparsity.block_runs import BLOCK
from attnkit.util import caches
from attnkit.util.arguments import shown

BACKENDS = ("auto", "eager", "cpu", "cute", "emulate")


# Note in the plan of a call whose kernels have never run on a GPU.
SILICON_NOTE = (
    'executed in the emulator only, never on a GPU: where backend="auto" takes it, it is first tested '
    "on this machine against the dense oracle"
)


@dataclass(frozen=True)
class Call:
    """Holds the properties of a call that determine its plan.

    Attributes:
        dtype: of query, key and value, such as "bfloat16".
        head_dim, value_dim: head dim of query and key, and of value.
        capability: compute capability of the query's device, None if it is no CUDA device.
        listed_block: tile sizes of block lists that override the mask, None without lists.
        fixed: whether the caller chose the tile sizes.
        modded: whether there is a score_mod.
        only_slope: see `kernels`.
        masked: whether there is a mask.
        q_len: length of the query, None for a long one.
        dropout: whether elements of the softmax are dropped.
    """

    dtype: str
    head_dim: int
    value_dim: int
    capability: tuple[int, int] | None = None
    listed_block: tuple[int, int] | None = None
    fixed: bool = False
    modded: bool = False
    only_slope: bool = False
    masked: bool = True
    q_len: int | None = None
    dropout: bool = False


@dataclass(frozen=True)
class Plan:
    """Holds the template and the tile sizes with which a call runs, and the reasons for them.

    Attributes:
        template: "cpu" (torch operators on any device, block-sparse), "eager" (dense oracle),
            a GPU template such as "sm90" (a Hopper kernel) or "emulate:sm90" (that kernel, executed
            on the CPU).
        block: query and kv tile sizes of the mask's runs.
        reason: why this template.
        notes: remarks, such as options that this template ignores.
    """

    template: str
    block: tuple[int, int] = BLOCK
    reason: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"template {self.template}: {self.reason}"]
        if self.template != "eager":
            lines.append(f"tiles    {self.block[0]} x {self.block[1]}")
        return "\n".join([*lines, *(f"note     {n}" for n in self.notes)])


def _fits(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    """Return whether tiles of size `inner` divide tiles of size `outer`."""
    return outer[0] % inner[0] == 0 and outer[1] % inner[1] == 0


def _kernels(call: Call, target: Target) -> tuple[Kernel, ...]:
    """Return the forward kernels of a target for a call's head dims, best first."""
    return kernels(
        call.head_dim,
        call.value_dim,
        call.modded,
        target.template,
        only_slope=call.only_slope,
        dropout=call.dropout,
        q_len=call.q_len,
    )


def _suitable(call: Call, block: tuple[int, int], target: Target) -> Kernel | None:
    """Return the best kernel for the head dims and required tile sizes, or None if none fits."""
    candidates = _kernels(call, target)
    if call.listed_block is not None:
        return next((k for k in candidates if _fits(k.block, call.listed_block)), None)
    if call.fixed:
        return next((k for k in candidates if k.block == block), None)
    return next(iter(candidates), None)


@functools.cache
def has_dsl() -> bool:
    """Return whether the CuTe DSL is installed, so that kernels can be compiled."""
    return sys.platform == "linux" and importlib.util.find_spec("cutlass") is not None


caches.register(has_dsl.cache_clear)


@dataclass(frozen=True)
class Rule:
    """Pairs a condition that GPU kernels require with the message for calls that violate it."""

    holds: Callable[[Call, tuple[int, int], Target], bool]
    message: Callable[[Call, tuple[int, int], Target], str]


def _widest(target: Target) -> str:
    """Format the largest head dims of a target's kernels."""
    head_dim, value_dim = widest(target.template)
    return str(head_dim) if head_dim == value_dim else f"{head_dim} with values up to {value_dim}"


_KERNEL_RULES = (
    Rule(
        lambda c, b, t: c.dtype in ("bfloat16", "float16"),
        lambda c, b, t: (
            f"the {t.card} kernel computes bfloat16 and float16, the query is {c.dtype}"
        ),
    ),
    Rule(
        lambda c, b, t: bool(_kernels(c, t)),
        lambda c, b, t: (
            f"the {t.card} kernel takes head dims up to {_widest(t)}, "
            f"got {c.head_dim} and {c.value_dim}"
        ),
    ),
    Rule(
        lambda c, b, t: c.head_dim % 8 == 0 and c.value_dim % 8 == 0,
        lambda c, b, t: (
            f"the {t.card} kernel takes head dims that are multiples of 8, "
            f"got {c.head_dim} and {c.value_dim}"
        ),
    ),
    Rule(
        lambda c, b, t: not _kernels(c, t) or _suitable(c, b, t) is not None,
        lambda c, b, t: (
            f"tiles of {c.listed_block or b} do not fit the {t.card} kernels for head dims "
            f"{c.head_dim} and {c.value_dim}, which have "
            f"{' or '.join(str(k.block) for k in _kernels(c, t))}"
        ),
    ),
)


def refusals(call: Call, block: tuple[int, int], *, target: Target | None = None) -> Iterator[str]:
    """Yield the reasons why no GPU kernel can run a call; yield nothing if one can.

    Args:
        call: the call.
        block: tile sizes; used if `call.fixed`.
        target: the target whose kernel is emulated; None for the kernel of the call's GPU.
    """
    if target is None:
        target = of_capability(call.capability)
        if call.capability is None:
            yield "query is not on a CUDA device"
        elif target is None:
            yield missing_capability(call.capability)
    if not has_dsl():
        yield "nvidia-cutlass-dsl is not installed (pip install nvidia-cutlass-dsl)"
    for rule in _KERNEL_RULES:
        if not rule.holds(call, block, target or SM90):
            yield rule.message(call, block, target or SM90)


def choose(
    backend: str,
    *,
    device: str,
    block: tuple[int, int] = BLOCK,
    notes: tuple[str, ...] = (),
    call: Call | None = None,
) -> Plan:
    """Choose the template and the tile sizes with which to run a call, and return the plan.

    Args:
        backend: one of `BACKENDS`, or "emulate:" and an architecture.
        device: type of the query's device.
        block: tile sizes of the mask's runs, if the caller chose them.
        notes: remarks to copy into the plan.
        call: the facts about the tensors; None if they are not known. Then no GPU kernel is chosen.

    Raises:
        OptionError: unknown backend.
        NoKernelError: the backend requires a GPU kernel and none can run this call here.
    """
    kind, emulated = parse_backend(backend)
    if kind == "eager":
        return Plan("eager", block, "asked for; dense, holds every score", notes)
    why = "asked for"
    if kind != "cpu":
        if call is None:
            reasons = ["the tensors are not known"]
        else:
            reasons = list(refusals(call, block, target=emulated))
        if emulated is not None and device != "cpu":
            reasons.append(f"the emulator runs on CPU tensors, query is on {device}")
        if not reasons and call is not None:
            why = "asked for" if kind != "auto" else "the fastest for this GPU"
            return _kernel_plan(call, block, emulated, why, notes)
        if kind in ("cute", "emulate"):
            raise no_kernel_error(backend, "; ".join(reasons))
        why = reasons[0]
    return Plan("cpu", block, f"{why}; torch operators over the tiles that the mask keeps", notes)


def parse_backend(backend: str) -> tuple[str, Target | None]:
    """Split a backend into its kind and the target to emulate (None if it does not emulate).

    Raises:
        OptionError: unknown backend.
        NoKernelError: no kernel for the architecture.
    """
    kind, colon, arch = backend.partition(":") if isinstance(backend, str) else ("", "", "")
    if kind not in BACKENDS or (colon and kind != "emulate"):
        raise OptionError(
            f"backend={shown(backend)} is not known; expected one of {', '.join(BACKENDS)}"
        )
    if kind != "emulate":
        return kind, None
    target = of_arch(arch) if colon else SM90
    if target is None:
        raise no_kernel_error(backend, missing_arch(arch))
    return kind, target


def _kernel_plan(
    call: Call,
    block: tuple[int, int],
    emulated: Target | None,
    why: str,
    notes: tuple[str, ...],
) -> Plan:
    """Build the plan of a call that a GPU kernel can run."""
    target = emulated or of_capability(call.capability)
    assert target is not None
    kernel = _suitable(call, block, target)
    assert kernel is not None
    tiles = kernel.block
    if call.masked and not call.fixed and call.listed_block is None:
        tiles = mask_tiles(_kernels(call, target))
    if emulated is None:
        notes = (*notes, *_notes(call, target))
    name = EMULATED + target.name if emulated else target.name
    return Plan(name, tiles, f"{why}; CuTe-DSL kernel for {target.arch}", notes)


def _notes(call: Call, target: Target) -> Iterator[str]:
    """Yield remarks on a template's kernels on a GPU."""
    if target.template == "sm100":
        yield SILICON_NOTE


class NoKernelError(UnsupportedError):
    """Raised when the backend requires a GPU kernel and none can run the call.

    The attribute `reason` says why.
    """

    reason = ""


def no_kernel_error(backend: str, reason: str) -> NoKernelError:
    """Build the error for a backend that requires a GPU kernel if none can run the call."""
    what = "a kernel compiled for a GPU" if backend == "cute" else "a GPU kernel in the emulator"
    error = NoKernelError(
        f"backend={backend!r} asks for {what}, and there is none for this call: {reason}. "
        'backend="auto" takes torch operators instead (block-sparse, on any device)'
    )
    error.reason = reason
    return error
