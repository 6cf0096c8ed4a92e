"""Emit the loads of a full bias, such as table[h, q, kv], which has one element for each score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cutlass import BFloat16, Boolean, Float16, Float32, Int32, cute

from attnkit.codegen.emit_cute import load_place
from attnkit.codegen.load_indices import LoadIndices
from attnkit.codegen.staged_emitter import head_arguments
from attnkit.graph import ir
from attnkit.graph.ir import Node, arg
from attnkit.graph.staging import Level, index_level, reads_along_kv

PAIRED = (Float32, BFloat16, Float16)  # dtypes of a bias that is loaded in pairs


class BiasLoads:
    """Emits the loads of a bias.

    Args:
        roots: the expressions of the score_mod.
        indices: which loads wrap negative indices, and which are clamped.

    Attributes:
        loads: the loads of which each score has its own element.
    """

    def __init__(self, roots: Sequence[Node], indices: LoadIndices) -> None:
        loads = (n for n in ir.topo(*roots) if n.op == "load")
        self.loads = [n for n in loads if index_level(n) is Level.ELEMENT]
        self._indices = indices

    def along_rows(self, tensors: Sequence[Any]) -> bool:
        """Return whether the biases of a row are neighbours in memory."""
        found = [tensors[int(str(n.attr))] for n in self.loads]
        contiguous = (isinstance(t.stride[-1], int) and t.stride[-1] == 1 for t in found)
        exact = (
            reads_along_kv(n) and not self._indices.wraps(n) and n not in self._indices.clamp
            for n in self.loads
        )
        return all(t.element_type in PAIRED for t in found) and all(contiguous) and all(exact)

    def dtype(self, tensors: Sequence[Any]) -> Any:
        """Return the type of the only bias in memory."""
        (load,) = self.loads
        return tensors[int(str(load.attr))].element_type

    def by_batch(self) -> bool:
        """Return whether batch elements read different elements of a bias."""
        return any(arg("b") in ir.topo(n) for n in self.loads)

    def places(self, site: Any, tensors: Sequence[Any], q: Any, kv: Any) -> list[Any]:
        """Emit pointers to the elements that the score at (q, kv) reads."""
        places = []
        for n in self.loads:
            tensor, env = tensors[int(str(n.attr))], head_arguments(site, n.args)
            at = load_place(n, env | {"q": q, "kv": kv}, tensors, self._indices, slice(None))
            places.append(cute.domain_offset(tuple(at), tensor).iterator)
        return places

    def row(
        self, site: Any, tensors: Sequence[Any], q: Any, kv: Any, offsets: Sequence[Any],
        paired: bool,
    ) -> list[Mapping[Node, Any]]:  # fmt: skip
        """Emit the loads of the biases of several scores in row `q`.

        Call it only if `along_rows` returns True.

        Args:
            site: position of the tile, see `templates.common.hooks.Site`.
            tensors: captured tensors by slot.
            q: the row.
            kv: a column.
            offsets: columns of the scores, counted from `kv`.
            paired: load two neighbouring columns at once, see `pairs_are_aligned`.

        Returns:
            The values by load, for each score.
        """
        values: list[Any] = [{} for _ in offsets]
        for n, place in zip(self.loads, self.places(site, tensors, q, kv), strict=True):
            if paired:
                for t in range(0, len(offsets), 2):
                    values[t][n], values[t + 1][n] = _pair(place + offsets[t])
            else:
                for found, offset in zip(values, offsets, strict=True):
                    found[n] = Float32((place + offset).load())
        return values

    def pairs_are_aligned(self, site: Any, tensors: Sequence[Any]) -> Boolean:
        """Emit whether two biases, the first in an even column, are aligned for one load."""
        result = Boolean(True)
        for q in (0, 1):
            for place in self.places(site, tensors, Int32(q), Int32(0)):
                size = 2 * place.dtype.width // 8
                result = result & ((place.toint() & (size - 1)) == 0)
        return result


def factor_of(load: Node, root: Node) -> float | None:
    """Return the constant c for which `root` is c * load; None if it may be something else."""
    if root is load:
        return 1.0
    if root.op == "neg":
        inner = factor_of(load, root.args[0])
        return None if inner is None else -inner
    if root.op == "mul":
        for part, number in (root.args, root.args[::-1]):
            inner = factor_of(load, part) if number.op == "const" else None
            if inner is not None:
                return inner * float(str(number.attr))
    return None


def _pair(place: Any) -> tuple[Any, Any]:
    """Emit one load of two neighbouring floats from global memory, as Float32."""
    if place.dtype is Float32:
        text = "ld.global.v2.f32 { {$w0}, {$w1} }, [{$r0}];"
    else:
        kind = "bf16" if place.dtype is BFloat16 else "f16"
        text = (
            "{ .reg .b32 pair; .reg .b16 low, high; ld.global.b32 pair, [{$r0}];"
            " mov.b32 {low, high}, pair;"
            f" cvt.f32.{kind} {{$w0}}, low; cvt.f32.{kind} {{$w1}}, high; }}"
        )
    types = [Float32, Float32]
    first, second = cute.arch.inline_ptx(
        text, write_only_types=types, read_only_args=[place.toint()]
    )
    return first, second
