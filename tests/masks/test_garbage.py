"""Check that garbage arguments of library functions raise only attnkit's own errors.

Each argument of a valid call is replaced by each of many values of the wrong kind. A call may
succeed if the value is meaningful; its result is then used under the same condition.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from attnkit import AttnkitError, Mask, flex_attention, masks, mods
from attnkit.tracing.built_for import sizes_for

INTS = torch.tensor([2, 1], dtype=torch.int32)
TABLE = torch.ones(2, 5)


class Strange:
    """Object whose comparison and truth value raise errors."""

    def __eq__(self, other):
        raise ValueError("no comparison")

    def __bool__(self):
        raise ValueError("no truth value")

    __hash__ = None  # type: ignore[assignment]


def garbage() -> dict[str, Any]:
    """Return values of many kinds, by name."""
    floats = torch.ones(2, 3)
    return {
        "None": None, "str": "abc", "empty str": "", "bytes": b"x", "nan": math.nan, "inf": math.inf,
        "negative": -1, "zero": 0, "minus two": -2, "huge": 2**31, "huger": 2**62, "long": 10**5000,
        "float": 2.5, "complex": 1j, "bool": True, "False": False, "fraction": Fraction(1, 2),
        "list": [1, 2], "empty list": [], "empty tuple": (), "mixed": (1, "a"), "long tuple": (1,) * 99,
        "nested list": [[1], [2, 3]], "dict": {"a": 1}, "set": {1}, "function": lambda *a: a[0],
        "class": int, "object": object(), "strange": Strange(), "dtype": torch.float32,
        "device": torch.device("meta"), "numpy": np.ones(3), "numpy int": np.int64(2),
        "numpy strings": np.array(["top-left", "a"]), "range": range(3), "ellipsis": ...,
        "negatives": torch.tensor([-1, -5]), "big": torch.tensor([2**40, 1]), "0-d": torch.tensor(3),
        "rank 5": torch.ones(1, 1, 1, 1, 1), "empty": torch.ones(0), "floats": floats, "ints": INTS,
        "matrix": torch.ones(2, 2, dtype=torch.int64), "bools": torch.tensor([True, False]),
        "nans": floats * math.nan, "complexes": floats + 1j, "half": floats.half(),
        "uint16": INTS.to(torch.uint16), "float8": floats.to(torch.float8_e4m3fn),
        "meta": torch.ones(2, device="meta"), "meta ints": torch.ones(2, device="meta").int(),
        "meta matrix": torch.ones(2, 2, device="meta").int(), "sparse": torch.ones(2).int().to_sparse(),
        "sparse matrix": floats.to_sparse_csr(), "quantized": _quantized(),
        "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        "jagged": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }  # fmt: skip


def _quantized():
    return torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint32)


# valid arguments for each function, all of them given
CALLS: dict[Callable[..., Any], dict[str, Any]] = {
    masks.bigbird: {"random_blocks": INTS[None], "block": 2, "window_blocks": 1, "global_blocks": 1},
    masks.block_diagonal: {"size": 2, "kv_size": 3},
    masks.block_diffusion: {"length": 4, "block": 2},
    masks.causal: {"align": "bottom-right", "q_len": 2, "kv_len": INTS},
    masks.chunked: {"size": 2, "start": INTS, "align": "bottom-right", "q_len": 2, "kv_len": INTS},
    masks.dilated: {"left": 2, "dilation": 2, "right": 1, "align": "bottom-right", "q_len": 2, "kv_len": 3},
    masks.document: {"ids": INTS, "kv_ids": INTS, "sorted_ids": False, "padding": 1},
    masks.document_from_cu_seqlens: {"cu_seqlens": torch.tensor([0, 2]), "kv_cu_seqlens": torch.tensor([0, 3]), "total": 2, "within": masks.causal(), "align": "top-left"},
    masks.document_from_lengths: {"lengths": INTS, "kv_lengths": INTS, "total": 3, "within": masks.causal(), "align": "top-left"},
    masks.examples: {"length": 32, "device": "cpu", "seed": 1},
    masks.fixed: {"block": 3, "summary": 1},
    masks.image_spans: {"ids": INTS[None], "text": 1, "size": 2},
    masks.longformer: {"window": 1, "global_tokens": torch.tensor([True, False])},
    masks.natten: {"shape": (4, 4), "kernel": 3, "stride": 1, "dilation": 1, "causal": (True, False), "tile": 2},
    masks.padding: {"kv_lengths": INTS, "q_lengths": INTS, "side": "left", "q_len": 3, "kv_len": 3},
    masks.padding_from_mask: {"attention_mask": torch.tensor([[1, 0], [1, 1]]), "rows": True},
    masks.paged: {"mask": masks.causal(), "page_table": torch.tensor([[0, 1]]), "page_size": 2, "pages": 2, "lengths": INTS[:1]},
    masks.prefix: {"length": INTS},
    masks.prefix_lm: {"length": INTS},
    masks.shared_prefix: {"prefixes": INTS, "suffixes": INTS[:, None]},
    masks.sliding_tile: {"shape": (4, 4), "tile": 2, "kernel": 1, "text": 1},
    masks.sliding_window: {"left": 2, "right": 1, "size": None, "align": "bottom-right", "q_len": 2, "kv_len": 3},
    masks.streaming_llm: {"window": 2, "sinks": 1, "size": None, "align": "bottom-right", "q_len": 2, "kv_len": 3},
    masks.strided: {"stride": 2},
    masks.tile_order: {"shape": (4, 4), "tile": 2},
    masks.topk_blocks: {"selected": INTS[None], "q_block": 2, "kv_block": 2},
    masks.tree: {"parents": torch.tensor([-1, 0]), "context": INTS},
    masks.tree_from_table: {"table": torch.ones(2, 2).bool(), "context": INTS},
    masks.zero_padding: {"tensor": torch.ones(2, 1, 3, 1), "lengths": INTS, "side": "left"},
    mods.alibi: {"heads": torch.ones(2), "symmetric": True},
    mods.bias_2d: {"bias": torch.ones(2, 3, 3)},
    mods.compose: {"mods": mods.softcap(2.0)},
    mods.distance_decay: {"rate": torch.ones(2), "power": 2.0},
    mods.examples: {"length": 4, "heads": 2, "batch": 1, "device": "cpu", "dtype": torch.float32, "requires_grad": False, "seed": 1},
    mods.forgetting_gate: {"sums": torch.ones(2, 3)},
    mods.full_bias: {"bias": torch.ones(3, 3)},
    mods.graphormer: {"bias": TABLE, "distance": torch.ones(3, 3).int()},
    mods.head_gate: {"gate": torch.ones(2)},
    mods.head_scale: {"scale": torch.ones(2)},
    mods.kerple: {"rate": torch.ones(2), "scale": torch.ones(2)},
    mods.log_length: {"trained": 3, "length": INTS},
    mods.log_relu: {"power": 2.0},
    mods.log_sigmoid: {"bias": 1.0},
    mods.relative_bias: {"bias": TABLE},
    mods.sandwich: {"heads": 2, "length": 4, "dims": 4, "device": "cpu"},
    mods.scalable_softmax: {"scale": torch.ones(2), "length": INTS},
    mods.softcap: {"cap": 2.0},
    mods.t5_bias: {"bias": torch.ones(2, 32), "bidirectional": True, "max_distance": 64},
}  # fmt: skip
NAMES = {f"{f.__module__.split('.')[1]}.{f.__name__}": f for f in CALLS}


def call(function, arguments):
    """Call a function with keyword arguments; `compose` gets its argument by position."""
    return function(*arguments.values()) if function is mods.compose else function(**arguments)


def use(result):
    """Compute attention with a mask or mod, at sizes that fit its tables."""
    if not callable(result):
        return
    declared = sizes_for(result)
    lengths = getattr(result, "lengths", ((1, None),) * 2)
    q_len, kv_len = (most or max(2, least) for least, most in lengths)
    heads, batch = declared.get("h", 1), declared.get("b", 1)
    if max(q_len, kv_len, heads, batch) < 100:
        query, key = torch.ones(batch, heads, q_len, 4), torch.ones(batch, heads, kv_len, 4)
        is_mask = isinstance(result, Mask)
        flex_attention(query, key, key, None if is_mask else result, result if is_mask else None)


def test_every_function_is_called_with_all_its_arguments():
    listed = {
        f"{room.__name__.split('.')[1]}.{name}"
        for room in (masks, mods)
        for name in room.__all__
        if name not in ("Example", "ScoreMod")
    }
    assert set(NAMES) == listed
    for function, arguments in CALLS.items():
        assert list(arguments) == list(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_garbage_ends_in_our_own_errors(name):
    function = NAMES[name]
    arguments = CALLS[function]
    use(call(function, arguments))
    foreign = []
    for argument in arguments:
        for kind, value in garbage().items():
            try:
                use(call(function, arguments | {argument: value}))
            except AttnkitError:
                continue
            except Exception as error:  # the point of the test
                foreign.append(f"{argument}={kind}: {type(error).__name__}: {str(error)[:200]}")
    assert not foreign, "\n".join(foreign)
