"""Define `Program`, the score and mask graphs of a variant, which converts to text and back."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.ir import Node
from attnkit.graph.simplify import build
from attnkit.util import caches

NORMALIZATIONS = ("softmax", "sigmoid", "none")  # of a program; softmax1 is a softmax with a sink


@dataclass(frozen=True)
class Program:
    """Holds the score and mask graphs of a variant.

    The text form serves as an argument of custom operators and as a part of cache keys.

    Attributes:
        score: float32 root over score, b, h, q, kv; None if there is no score_mod.
        mask: bool root over b, h, q, kv; None to keep everything.
        checked: loads of either graph whose index is not proven to be in range. It is checked at
            run time.
        names: names of the tensors that the score and the mask capture, for the messages of those
            checks; empty if nothing is checked, so that equal graphs are equal programs.
        lists_override_mask: whether block lists override the mask, so that the mask is not applied
            to FULL tiles.
        sink: whether each softmax has an attention sink. The sink is then the last of the score's
            tensors; the graphs do not read it.
        normalization: how the modified scores become the weights of the values, one of
            `NORMALIZATIONS`: by a softmax over each row, by a sigmoid of each score, or not at all.
        dropout: whether elements of the softmax are dropped. The state of dropout is then the last
            of the score's tensors, or the last but the sink; the graphs do not read it.
    """

    score: Node | None = None
    mask: Node | None = None
    checked: frozenset[Node] = frozenset()
    names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    lists_override_mask: bool = False
    sink: bool = False
    normalization: str = "softmax"
    dropout: bool = False

    @functools.cached_property
    def text(self) -> str:
        """Return the canonical text of the program, which `Program.parse` converts back."""
        parts = ["" if root is None else ir.text(root) for root in (self.score, self.mask)]
        flags = (
            ("listed", self.lists_override_mask),
            ("sink", self.sink),
            ("dropout", self.dropout),
        )
        words = [name for name, is_set in flags if is_set]
        parts.append(" ".join(words if self.has_softmax else [*words, self.normalization]))
        if self.checked:
            order = [n for n in self._order() if n in self.checked]
            parts += [ir.text(*order), *(",".join(names) for names in self.names)]
        return "|".join(parts)

    @property
    def has_softmax(self) -> bool:
        """Return whether a softmax makes the weights of a row; otherwise no score needs others."""
        return self.normalization == "softmax"

    @functools.cached_property
    def weights(self) -> Program:
        """Return the program with a sigmoid as a part of the score graph.

        A sigmoid needs one score alone, so that it is one more operation of the graph: its
        derivative and the gradients of captured tensors follow from the adjoint. The normalization
        is then "none". A program with a softmax is returned unchanged.
        """
        if self.normalization != "sigmoid":
            return self
        score = build("sigmoid", ir.arg("score") if self.score is None else self.score)
        return replace(self, score=score, normalization="none")

    def without_sink(self) -> Program:
        """Return the program without an attention sink."""
        return replace(self, sink=False) if self.sink else self

    def bare(self) -> Program:
        """Return the program without an attention sink and dropout."""
        plain = self.without_sink()
        return replace(plain, dropout=False) if plain.dropout else plain

    def split_sink(self, scores: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
        """Split the score's tensors into those that the graph reads and the sink (or None)."""
        return (scores[:-1], scores[-1]) if self.sink else (scores, None)

    def split_dropout(self, scores: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
        """Split the first of the results of `split_sink` into the graph's tensors and the state."""
        return (scores[:-1], scores[-1]) if self.dropout else (scores, None)

    @property
    def extras(self) -> int:
        """Return how many of the score's tensors the graph does not read: the last ones."""
        return self.sink + self.dropout

    def _order(self) -> list[Node]:
        return ir.topo(*(r for r in (self.score, self.mask) if r is not None))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> Program:
        """Build a program from its `text`.

        The graphs are the same objects as before, because nodes are interned.
        """
        first, second, words, *checks = text.split("|")
        score, mask = (ir.parse(part) if part else None for part in (first, second))
        flags = words.split()
        kind = next((name for name in NORMALIZATIONS if name in flags), "softmax")
        program = Program(
            score,
            mask,
            lists_override_mask="listed" in flags,
            sink="sink" in flags,
            normalization=kind,
            dropout="dropout" in flags,
        )
        if not checks:
            return program
        loads, *names = checks
        score_names, mask_names = (tuple(n.split(",")) if n else () for n in names)
        checked = frozenset(ir.parse_all(loads))
        return replace(program, checked=checked, names=(score_names, mask_names))


def compute_dtype(query: Tensor) -> torch.dtype:
    """Return the dtype of scores and row statistics: float64 for a float64 query, else float32."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


caches.register(Program.parse.cache_clear)
