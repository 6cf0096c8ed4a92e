"""How a call will run: the template, its tile sizes, and why.

A plan is frozen and hashable: together with the graphs it is the key of whatever is compiled or
cached. Each legality rule is one predicate with its message; sizes come from a measured table.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from attnkit.errors import OptionError, UnsupportedError

BACKENDS = ("auto", "eager", "cpu", "cute", "emulate")

BLOCK = (128, 128)  # FlexAttention's block; strips of the CPU template join several

SM90 = "sm90"  # the template for Hopper
EMULATED = "emulate:"  # prefix of a GPU template that runs in the emulator
ORDERED = ":ordered"  # suffix of a GPU template whose sums are formed in a fixed order
BACKWARD_NOTE = (
    "the backward runs in torch operators; ATTNKIT_HOPPER_BACKWARD=1 takes a kernel that has not yet "
    "been proven on a GPU (head dims to 128)"
)
WIDTHS = (64, 96, 128, 192, 256)  # head dims as computed; others are filled up with zeros


@dataclass(frozen=True)
class Kernel:
    """Sizes and switches of a Hopper forward kernel; see `templates.sm90.config.ForwardConfig`.

    Attributes:
        block: query and kv tile.
        softmax, early, pingpong, alias: as there.
    """

    block: tuple[int, int]
    softmax: str = "stale"
    early: bool = True
    pingpong: bool = True
    alias: bool = False


_LATE: dict[str, Any] = {"softmax": "online", "early": False}

# By head dims (query's, value's) as computed, best first. A later one serves block lists whose
# tiles the first does not divide. Measured on one H200; rows in benchmarks/results.
_SM90: tuple[tuple[int, int, tuple[Kernel, ...]], ...] = (
    (64, 64, (Kernel((192, 128), **_LATE), Kernel((128, 128)), Kernel((128, 64)))),
    (128, 128, (Kernel((128, 128)), Kernel((128, 64)))),
    (192, 128, (Kernel((128, 128), alias=True), Kernel((128, 64), alias=True))),
    (192, 192, (Kernel((128, 96), alias=True), Kernel((128, 64), alias=True))),
    (256, 256, (Kernel((128, 80), alias=True, **_LATE), Kernel((128, 64), alias=True, **_LATE))),
)
# Score mods hold values of their own in registers: the largest tiles would spill.
_SM90_MODDED: tuple[tuple[int, int, tuple[Kernel, ...]], ...] = (
    (64, 64, (Kernel((128, 128)), Kernel((128, 64)))),
    *_SM90[1:4],
    (256, 256, (Kernel((128, 64), alias=True, **_LATE),)),
)


def width(head_dim: int) -> int:
    """The head dim as a Hopper kernel computes it."""
    return next(w for w in WIDTHS if head_dim <= w)


def kernels(head_dim: int, value_dim: int, modded: bool = False) -> tuple[Kernel, ...]:
    """Hopper forward kernels for these head dims, at most 256, best first.

    Args:
        head_dim, value_dim: of query and key, and of value.
        modded: whether there is a score_mod.
    """
    table = _SM90_MODDED if modded else _SM90
    return next(k for d, dv, k in table if head_dim <= d and value_dim <= dv)


@dataclass(frozen=True)
class Call:
    """What a plan must know of a call.

    Attributes:
        dtype: of query, key and value, as "bfloat16".
        head_dim, value_dim: of query and key, and of value.
        capability: compute capability of the query's device, None if it is no CUDA device.
        listed: tile sizes of block lists that overrule the mask, None where there are none.
        fixed: whether the caller gave tile sizes.
        modded: whether there is a score_mod.
    """

    dtype: str
    head_dim: int
    value_dim: int
    capability: tuple[int, int] | None = None
    listed: tuple[int, int] | None = None
    fixed: bool = False
    modded: bool = False


@dataclass(frozen=True)
class Plan:
    """How a call runs.

    Attributes:
        template: "cpu" (torch operators on any device, block-sparse), "eager" (dense oracle),
            "sm90" (a Hopper kernel) or "emulate:sm90" (that kernel, executed on the CPU).
        block: query and kv tile sizes of the mask's runs.
        reason: why this template.
        notes: options that this template has no use for.
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
    return outer[0] % inner[0] == 0 and outer[1] % inner[1] == 0


def _suitable(call: Call, block: tuple[int, int]) -> Kernel | None:
    """The best kernel for the head dims and the tile sizes that are demanded."""
    found = kernels(call.head_dim, call.value_dim, call.modded)
    if call.listed is not None:
        return next((k for k in found if _fits(k.block, call.listed)), None)
    if call.fixed:
        return next((k for k in found if k.block == block), None)
    return found[0]


@functools.cache
def has_dsl() -> bool:
    """Whether kernels can be compiled here."""
    return sys.platform == "linux" and importlib.util.find_spec("cutlass") is not None


@dataclass(frozen=True)
class Rule:
    """Something a GPU kernel needs: whether it holds, and what to say if it does not."""

    holds: Callable[[Call, tuple[int, int]], bool]
    message: Callable[[Call, tuple[int, int]], str]


_KERNEL_RULES = (
    Rule(
        lambda c, b: c.dtype in ("bfloat16", "float16"),
        lambda c, b: f"the Hopper kernel computes bfloat16 and float16, the query is {c.dtype}",
    ),
    Rule(
        lambda c, b: max(c.head_dim, c.value_dim) <= WIDTHS[-1],
        lambda c, b: (
            f"the Hopper kernel takes head dims up to {WIDTHS[-1]}, "
            f"got {c.head_dim} and {c.value_dim}"
        ),
    ),
    Rule(
        lambda c, b: c.head_dim % 8 == 0 and c.value_dim % 8 == 0,
        lambda c, b: (
            "the Hopper kernel takes head dims that are multiples of 8, "
            f"got {c.head_dim} and {c.value_dim}"
        ),
    ),
    Rule(
        lambda c, b: max(c.head_dim, c.value_dim) > WIDTHS[-1] or _suitable(c, b) is not None,
        lambda c, b: (
            f"tiles of {c.listed or b} do not fit the Hopper kernels for head dims "
            f"{c.head_dim} and {c.value_dim}, which have "
            f"{' or '.join(str(k.block) for k in kernels(c.head_dim, c.value_dim, c.modded))}"
        ),
    ),
)
_MACHINE_RULES = (
    Rule(
        lambda c, b: c.capability is not None,
        lambda c, b: "query is not on a CUDA device",
    ),
    Rule(
        lambda c, b: c.capability is None or c.capability == (9, 0),
        lambda c, b: (
            f"the GPU has compute capability {c.capability[0]}.{c.capability[1]}; "  # type: ignore[index]
            "there is a kernel for 9.0 (Hopper)"
        ),
    ),
    Rule(
        lambda c, b: has_dsl(),
        lambda c, b: "nvidia-cutlass-dsl is not installed (pip install nvidia-cutlass-dsl)",
    ),
)


def refusals(call: Call, block: tuple[int, int], *, emulated: bool = False) -> Iterator[str]:
    """Why a Hopper kernel cannot serve a call; nothing if it can."""
    rules = (_MACHINE_RULES[-1:] if emulated else _MACHINE_RULES) + _KERNEL_RULES
    for rule in rules:
        if not rule.holds(call, block):
            yield rule.message(call, block)


def choose(
    backend: str,
    *,
    device: str,
    block: tuple[int, int] = BLOCK,
    notes: tuple[str, ...] = (),
    call: Call | None = None,
) -> Plan:
    """Choose the plan of a call.

    Args:
        backend: one of `BACKENDS`.
        device: type of the query's device.
        block: tile sizes of the mask's runs, if the caller gave them.
        notes: passed on.
        call: the tensors; None if they are not known, then no GPU kernel is chosen.

    Raises:
        OptionError: unknown backend.
        UnsupportedError: a GPU kernel was asked for and none can serve this call here.
    """
    if backend not in BACKENDS:
        raise OptionError(
            f"backend={backend!r} is not known; expected one of {', '.join(BACKENDS)}"
        )
    if backend == "eager":
        return Plan("eager", block, "asked for; dense, holds every score", notes)
    why = "asked for"
    if backend != "cpu":
        emulated = backend == "emulate"
        if call is None:
            reasons = ["the tensors are not known"]
        else:
            reasons = list(refusals(call, block, emulated=emulated))
        if emulated and device != "cpu":
            reasons.append(f"the emulator runs on CPU tensors, query is on {device}")
        if not reasons and call is not None:
            found = _suitable(call, block)
            assert found is not None
            name = EMULATED + SM90 if emulated else SM90
            if not emulated:
                notes = (*notes, BACKWARD_NOTE)
            why = "asked for" if backend != "auto" else "the fastest for this GPU"
            return Plan(name, found.block, f"{why}; CuTe-DSL kernel for sm_90a", notes)
        if backend in ("cute", "emulate"):
            raise refused(backend, "; ".join(reasons))
        why = reasons[0]
    return Plan("cpu", block, f"{why}; torch operators over the tiles that the mask keeps", notes)


def refused(backend: str, reason: str) -> UnsupportedError:
    """The error of a GPU kernel that was asked for and cannot be had."""
    what = "a kernel compiled for a GPU" if backend == "cute" else "that kernel in the emulator"
    return UnsupportedError(
        f"backend={backend!r} asks for {what}, and there is none for this call: {reason}. "
        'backend="auto" takes torch operators instead (block-sparse, on any device)'
    )
