"""Define `Program`, which holds the graphs of a variant and converts to text and back."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.ir import Node
from attnkit.util import caches


@dataclass(frozen=True)
class Program:
    """Holds the graphs of a variant. Its text form goes into operators and cache keys.

    Attributes:
        score: f32 root over score, b, h, q, kv; None if there is no score_mod.
        mask: bool root over b, h, q, kv; None keeps everything.
        checked: loads of either graph whose index range is not proven; these are checked at run
            time.
        names: names of the tensors that the score and the mask capture, for the messages of those
            checks; empty where nothing is checked, so that equal graphs are equal programs.
        lists_override_mask: whether block lists override the mask: a FULL tile is kept whole
            whatever the mask says.
    """

    score: Node | None = None
    mask: Node | None = None
    checked: frozenset[Node] = frozenset()
    names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    lists_override_mask: bool = False

    @functools.cached_property
    def text(self) -> str:
        """Return the program as canonical text; `Program.parse` reads it back."""
        parts = ["" if root is None else ir.text(root) for root in (self.score, self.mask)]
        parts.append("listed" if self.lists_override_mask else "")
        if self.checked:
            order = [n for n in self._order() if n in self.checked]
            parts += [ir.text(*order), *(",".join(names) for names in self.names)]
        return "|".join(parts)

    def _order(self) -> list[Node]:
        return ir.topo(*(r for r in (self.score, self.mask) if r is not None))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> Program:
        """Parse the `text` of a program. Its graphs are the same objects, as nodes are interned."""
        first, second, lists_override_mask, *checks = text.split("|")
        score, mask = (ir.parse(part) if part else None for part in (first, second))
        program = Program(score, mask, lists_override_mask=bool(lists_override_mask))
        if not checks:
            return program
        loads, *names = checks
        score_names, mask_names = (tuple(n.split(",")) if n else () for n in names)
        checked = frozenset(ir.parse_all(loads))
        return replace(program, checked=checked, names=(score_names, mask_names))


def compute_dtype(query: Tensor) -> torch.dtype:
    """Return the dtype of scores and row statistics: float64 for float64, else float32."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


caches.register(Program.parse.cache_clear)
