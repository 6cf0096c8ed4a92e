"""Write the tables of docs/flex.md from a walk over PyTorch's module of FlexAttention.

The walk finds every function, argument, class, field, method, option and helper of the module. A
row says whether `attnkit.flex` has it, and names the difference that `DIFFERENCES` lists, if any.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import flex_attention as theirs

from attnkit import flex

PAGE = Path(__file__).parents[2] / "docs" / "flex.md"
TABLES = re.compile(r"(<!-- names -->\n).*?(<!-- end of names -->)", re.DOTALL)
VERSION = ".".join(torch.__version__.split(".")[:2])

OPTION = "checked; changes nothing"
NO_LISTS = "computed when it is read; follows edits of captured tensors"

# How a name differs from PyTorch's, by the name of its row.
DIFFERENCES = {
    "flex_attention(query)": "also with gradients on a CPU; no float8, one dtype for all three",
    "flex_attention(key)": "its batch may be 1 without a block mask too; no float8",
    "flex_attention(value)": "no float8",
    "flex_attention(score_mod)": "traced once, so that `print` and breakpoints see symbols; an index "
    "that leaves its tensor is an error",
    "flex_attention(block_mask)": "also a mask_mod or an `attnkit.Mask`; another number of "
    "batch entries or heads than the query's is an error",
    "flex_attention(scale)": "a tensor must hold one number; it gets its gradient",
    "flex_attention(return_lse)": "no warning; also on a CPU",
    "flex_attention(return_aux)": "`max_scores` on every device; `lse` with its gradient on every device",
    "flex_attention(kernel_options)": "a name or a `BACKEND` that PyTorch does not have is an error",
    "create_block_mask": "computes no tiles",
    "create_block_mask(mask_mod)": "also an `attnkit.Mask`",
    "create_block_mask(B)": "None for a mask that reads `b` is an error",
    "create_block_mask(H)": "None for a mask that reads `h` is an error",
    "create_block_mask(Q_LEN)": "0 is an error",
    "create_block_mask(KV_LEN)": "0 is an error",
    "create_block_mask(_compile)": "changes nothing, without a warning",
    "create_block_mask(separate_full_blocks)": "for the fields; attention knows full blocks anyway",
    "create_block_mask(compute_dq_write_order)": "for the fields; attnkit has "
    "`deterministic=True` of its own",
    "create_block_mask(dq_kv_order)": "for the fields",
    "create_mask": "an index that leaves its tensor is an error, and so is a mask that returns no bool",
    "and_masks": "returns an `attnkit.Mask`, which has no truth value: write `is not None`",
    "or_masks": "returns an `attnkit.Mask`, which has no truth value: write `is not None`",
    "BlockMask.mask_mod": "assigning another keeps the lists, as in PyTorch",
    "BlockMask.seq_lengths": "assigning others keeps the lists, as in PyTorch",
    "BlockMask.dq_kv_order": "kept; attention does not read it",
    "BlockMask.dq_kv_order_spt": "kept; attention does not read it",
    "BlockMask.__getitem__": "an int beyond the end is an `IndexError`; PyTorch returns an empty mask",
    "BlockMask._adjust": "classifies again, so that blocks at the new ends are partial; works for "
    "longer lengths too",
    "BlockMask.to": "for a mask_mod whose captured tensors are on that device",
    "FlexKernelOptions.BLOCK_M": "size of tiles where the mask is a function",
    "FlexKernelOptions.BLOCK_N": "size of tiles where the mask is a function",
    "FlexKernelOptions.BACKEND": "checked; changes nothing: `backend=` chooses attnkit's",
    "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": "PyTorch's own setting; changes nothing here",
    "create_nested_block_mask": "refused: attnkit takes no nested tensors; torch 2.13 has no such "
    "function",
}


class Row(NamedTuple):
    """Holds a row of the table.

    Attributes:
        name: of PyTorch's object; "function(argument)" for an argument.
        there: whether attnkit.flex has it, with the same default and kind.
        difference: in words; "" if it means the same.
    """

    name: str
    there: bool
    difference: str


def own(module: Any) -> dict[str, Any]:
    """Return what a module of PyTorch defines, by name, without what it imports."""
    found = {}
    for name, value in vars(module).items():
        home = getattr(value, "__module__", None)
        constant = isinstance(value, bool | int | set) and not name.startswith("__")
        if name in module.__all__ or home == module.__name__ or constant:
            found[name] = value
    return found


def arguments(name: str, function: Any, ours: Any) -> Iterator[Row]:
    """Return a row for each argument of a function."""
    parameters = inspect.signature(ours).parameters
    for argument, expected in inspect.signature(function).parameters.items():
        got = parameters.get(argument)
        there = got is not None and (got.default, got.kind) == (expected.default, expected.kind)
        row = f"{name}({argument})"
        if name in ("and_masks", "or_masks", "noop_mask"):
            there = got is None or there  # positional names differ: b and batch
        yield Row(row, there, DIFFERENCES.get(row, ""))


def members(name: str, cls: type, ours: type) -> Iterator[Row]:
    """Return a row for each field, method and property that a class defines."""
    fields = [*getattr(cls, "__annotations__", {})]
    methods = [n for n, v in vars(cls).items() if callable(getattr(v, "__func__", v)) or
               isinstance(v, property)]  # fmt: skip
    hidden = {"__module__", "__weakref__", "__dict__", "__new__", "__class__"}
    for member in dict.fromkeys([*fields, *methods]):
        if member in hidden or (cls.__name__ != "BlockMask" and member.startswith("_")):
            continue
        row = f"{name}.{member}"
        there = hasattr(ours, member) or member in getattr(ours, "__annotations__", {})
        difference = DIFFERENCES.get(row, "")
        if not difference and name == "FlexKernelOptions":
            difference = OPTION
        if not difference and member in fields and re.search("num_blocks|indices|write", member):
            difference = NO_LISTS
        yield Row(row, there, difference)


def rows() -> list[Row]:
    """Return the rows of PyTorch's public names, in its order, then of those that it lacks."""
    found: list[Row] = []
    for name, value in own(theirs).items():
        if name.startswith("_"):
            continue
        ours = getattr(flex, name, None)
        found.append(Row(name, ours is not None, DIFFERENCES.get(name, "")))
        if isinstance(value, type):
            found += members(name, value, ours or object)
        elif callable(value):
            found += arguments(name, value, ours or (lambda: None))
    for name in sorted(set(flex.__all__) - {row.name for row in found} - set(private())):
        found.append(Row(name, True, DIFFERENCES.get(name, "only in attnkit.flex")))
    return found


def private() -> list[str]:
    """Return the private names of PyTorch's module."""
    return [name for name in own(theirs) if name.startswith("_")]


def text() -> str:
    """Return the tables in Markdown."""
    lines = ["| PyTorch | attnkit.flex | difference |", "| --- | --- | --- |"]
    for row in rows():
        mark = "refused" if row.difference.startswith("refused") else "yes" if row.there else "no"
        lines.append(f"| `{row.name}` | {mark} | {row.difference} |")
    same = [n for n in private() if getattr(flex, n) is getattr(theirs, n)]
    other = [n for n in private() if n not in same]
    lines += [
        "",
        f"attnkit.flex defines {', '.join(f'`{n}`' for n in other)} itself. The other private names",
        f"are PyTorch's own objects: {', '.join(f'`{n}`' for n in same)}.",
    ]
    return f"\nThe names of torch {VERSION}:\n\n" + "\n".join(lines)


def files() -> dict[Path, str]:
    """Return {path: text} of the page, with its tables filled in."""
    return {PAGE: TABLES.sub(lambda m: f"{m[1]}{text()}\n\n{m[2]}", PAGE.read_text())}
