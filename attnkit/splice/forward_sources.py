"""Build the `Source` of each forward kernel, from which `jit` compiles the kernel."""

from __future__ import annotations

import functools
from typing import Any

from attnkit.graph import ir
from attnkit.jit.kernel import Build, Source
from attnkit.schedule.targets import Target
from attnkit.splice.captured_arguments import TensorKind
from attnkit.splice.forward_variant import ForwardVariant
from attnkit.splice.template_registry import forward_template
from attnkit.util import caches


@functools.lru_cache(maxsize=1024)
def forward_source(
    target: Target,
    variant: ForwardVariant,
    config: tuple[tuple[str, Any], ...],
    head_dims: tuple[int, int],
    captured: tuple[TensorKind, ...],
    positive: bool,
    reads_numbers: bool = False,
) -> Source:
    """Return the source of the forward kernel of a variant; the kernel compiles at its first call.

    Args:
        target: the target that the kernel is compiled for.
        variant: the graphs, in the form that the kernel computes.
        config: arguments of a `ForwardConfig`, in order of their names.
        head_dims: head dims of query and key, and of value.
        captured: kinds of the captured tensors that the kernel reads.
        positive: whether the softmax scale is above 0.
        reads_numbers: whether the kernel reads numbers from tables. What is known of them is then
            part of the key.
    """
    template = forward_template(target)
    parts = [variant.form.factor, variant.form.bias, variant.form.slope, variant.form.row]
    parts += [variant.mask, *(n for pair in variant.ends or () for n in pair)]
    graph = "|".join("" if n is None else ir.text(n) for n in parts)
    ends = None if variant.ends is None else len(variant.ends)
    loads = variant.indices.flags(ir.topo(*variant.nodes()))
    extra = (
        head_dims,
        captured,
        len(variant.slots[0]),
        positive,
        ends,
        loads,
        variant.lists_override_mask,
        *(("sink",) if variant.sink else ()),
        *((variant.form.weight,) if variant.form.weight else ()),
        *(("dropout",) if variant.dropout else ()),
        *((("numbers", variant.form.positive),) if reads_numbers else ()),
    )
    return Source(
        "\n".join([f"{target.template} forward", graph, repr(list(config)), repr(extra)]),
        target.arch,
        lambda: template.build(variant, dict(config), head_dims, captured, positive),
        f"forward {dict(config)['dtype']} {head_dims[0]}x{head_dims[1]}",
    )


caches.register(forward_source.cache_clear)


@functools.lru_cache(maxsize=64)
def combine_source(
    dtype: str,
    value_dim: int,
    tile: tuple[int, int],
    arch: str,
    sink: TensorKind | None = None,
    softmax: bool = True,
) -> Source:
    """Return the source of the combine kernel, which merges the partial results of split KV.

    `sink` is the kind of the attention sink, which the kernel adds once; None without a sink.
    Without `softmax` the parts are summed.
    """

    def build() -> Build:
        from attnkit.splice.fake_arguments import combine_arguments
        from attnkit.templates.common.combine import Combine
        from attnkit.templates.common.sum_parts import SumParts

        arguments = combine_arguments(dtype, value_dim, tile, sink)
        merge = Combine(dtype, value_dim, sink is not None)
        return Build(merge if softmax else SumParts(dtype, value_dim), arguments)

    key = f"combine for {arch}\n{dtype} {value_dim} {tile}"
    key += "" if sink is None else f" {sink}"
    key += "" if softmax else " sum"
    return Source(key, arch, build, f"combine {dtype} {value_dim}")


caches.register(combine_source.cache_clear)
