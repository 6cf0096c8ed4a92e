"""Compile kernels ahead of time, without a GPU: `attnkit compile`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attnkit.cli.arguments import FAILED, OK, TARGET, batch_and_heads, dtypes, lengths, size
from attnkit.errors import UnsupportedError
from attnkit.schedule.plan import NoKernelError
from attnkit.schedule.targets import TARGETS, missing_arch, of_arch

if TYPE_CHECKING:
    from attnkit.cli.arguments import Subparsers
    from attnkit.jit.kernel import CompiledKernel, Source

LENGTH = 512


@dataclass(frozen=True)
class Request:
    """Describes a call whose kernels are to be compiled.

    Attributes:
        variant: the `Variant` to call.
        dtype: of query, key and value.
        arch: architecture, such as "sm_90a".
        batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim: sizes of query, key and value.
            Kernels serve all lengths, batches and heads; these sizes must fit the variant.
        backward: whether to compile the kernels of the gradients too.
    """

    variant: Any
    dtype: torch.dtype
    arch: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    backward: bool


def register(subparsers: Subparsers) -> None:
    """Add the parser of `attnkit compile`."""
    parser = subparsers.add_parser("compile", help="compile kernels ahead of time, without a GPU")
    parser.description = (
        "Compile the kernels of a variant into the cache folder (ATTNKIT_CACHE_DIR) and print what "
        "they use; needs no GPU. Exit status 0: done, 1: done, but a kernel is slower than it "
        "should be or cannot be kept, 2: could not be done."
    )
    parser.set_defaults(run=run)
    parser.add_argument("target", help=TARGET)
    parser.add_argument(
        "--arch",
        default="sm_90a",
        metavar="A",
        help=f"one of {', '.join(t.arch for t in TARGETS)}; default sm_90a",
    )
    parser.add_argument(
        "--dtype",
        type=dtypes,
        default=[torch.bfloat16],
        metavar="D,...",
        help="float16, bfloat16; default bfloat16",
    )
    for name, default, what in (
        ("head-dim", 128, "head dim of query and key"),
        ("value-dim", None, "head dim of value; default head-dim"),
        ("heads", None, "query heads; default as many as the variant's tables have, or 1"),
        ("kv-heads", None, "key and value heads; default heads"),
        (
            "q-len",
            None,
            f"query length that the variant is built for; default that of the mask, or {LENGTH}",
        ),
        ("kv-len", None, "kv length that it is built for; default that of the mask, or q-len"),
        ("batch", None, "batch size; default that of the variant's tables, or 1"),
    ):
        text = what if default is None else f"{what}; default {default}"
        parser.add_argument(f"--{name}", type=size, default=default, metavar="N", help=text)
    parser.add_argument(
        "--backward", action="store_true", help="compile the kernels of the gradients too"
    )


def run(options: argparse.Namespace) -> int:
    """Compile the variant's kernels, print a line for each, and return the exit status."""
    from attnkit.testing.load import load

    variant = load(options.target)
    unique: dict[Source, None] = {}
    q_len, kv_len = lengths(variant.mask, options, LENGTH)
    batch, heads = batch_and_heads(options, variant.score_mod, variant.mask)
    for dtype in options.dtype:
        request = Request(
            variant,
            dtype,
            options.arch,
            batch,
            heads,
            options.kv_heads or heads,
            q_len,
            kv_len,
            options.head_dim,
            options.value_dim or options.head_dim,
            options.backward,
        )
        unique |= dict.fromkeys(sources(request))
    return compile_all(list(unique))


def sources(request: Request) -> Sequence[Source]:
    """Return the sources of the kernels that a call needs, without compiling or running them.

    Raises:
        UnsupportedError: no GPU kernel serves the call.
    """
    from attnkit.jit import emulation
    from attnkit.jit.kernel import requested_sources

    r = request
    if of_arch(r.arch) is None:
        raise UnsupportedError(f"--arch {r.arch}: {missing_arch(r.arch)}")
    shapes = (
        (r.batch, r.heads, r.q_len, r.head_dim),
        (r.batch, r.kv_heads, r.kv_len, r.head_dim),
        (r.batch, r.kv_heads, r.kv_len, r.value_dim),
    )
    tensors = [torch.zeros(s, dtype=r.dtype, requires_grad=r.backward) for s in shapes]
    # A call in the emulator requests the same kernels as on a GPU, but takes CPU tensors.
    with emulation.session(execute=False), requested_sources() as requested:
        try:
            out = r.variant(*tensors, backend=f"emulate:{r.arch}", enable_gqa=r.heads != r.kv_heads)
        except NoKernelError as error:
            raise UnsupportedError(f"there is no kernel to compile: {error.reason}") from None
        if r.backward:
            out.sum().backward()
    return requested


def compile_all(sources: Sequence[Source]) -> int:
    """Compile sources, and print a line for each kernel and for each problem of a kernel.

    Returns:
        Exit status: 1 if a kernel has a problem, such as spilled registers or serialised products,
        or if the cache folder does not take it.
    """
    from attnkit.jit import kernel as compiled
    from attnkit.jit.disk_cache import KernelCache

    print(f"{'kernel':32} {'registers':>9} {'stack':>7} {'shared':>9} {'code':>9} {'seconds':>8}")
    status = OK
    for source in sources:
        kernel = compiled.kernel(source)
        for line in _lines(kernel):
            print(line)
        for problem in kernel.artifact.problems:
            print(f"  problem: {problem}")
            status = FAILED
    cache = KernelCache()
    if all(cache.get(compiled.full_key(source)) is not None for source in sources):
        print(f"kept in {cache.folder}")
        return status
    print(f"not kept: {cache.folder} cannot be used, see `attnkit doctor --security`")
    return FAILED


def _lines(kernel: CompiledKernel) -> Iterator[str]:
    """Yield a line for each device function. The first line has the compile time of all of them."""
    seconds = f"{kernel.artifact.seconds:8.2f}"
    shared = _shared(kernel)
    many = len(kernel.stats) > 1
    for i, s in enumerate(kernel.stats):
        name = f"{kernel.name} {i + 1}/{len(kernel.stats)}" if many else kernel.name
        yield (
            f"{name:32} {s.registers:9} {s.stack:5} B {shared.get(s.name, '?'):>9} "
            f"{s.code / 1024:5.1f} KiB {seconds}"
        )
        seconds = ""


def _shared(kernel: CompiledKernel) -> dict[str, str]:
    """Return the shared memory per CTA of each device function, as text, by running the host code.

    The result is empty without a C compiler, because the host code cannot run then.
    """
    from attnkit.jit.emulator_runs import launches

    static = {s.name: s.shared for s in kernel.stats}
    try:
        captured = launches(kernel)
    except UnsupportedError:
        return {}
    return {x.kernel.name: f"{(x.shared + static[x.kernel.name]) / 1024:.1f} KiB" for x in captured}
