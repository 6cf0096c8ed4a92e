"""Check that invalid sizes, devices, dtypes and seeds raise errors that say what was expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import attnkit
from attnkit import create_block_mask, create_mask, explain, intervals, testing
from attnkit.errors import (
    ArgumentError,
    AttnkitError,
    BoundsError,
    DeviceError,
    DTypeError,
    OptionError,
)
from attnkit.inspection import picture, summary, timeline
from attnkit.util.arguments import (
    AuxOutput,
    AuxRequest,
    index_instead,
    lacks_memory,
    shown,
)

LONG = 2**31
IDS = torch.zeros(8, dtype=torch.int64)


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def block_mask() -> attnkit.BlockMask:
    return create_block_mask(causal, 1, 1, 32, 32, BLOCK_SIZE=16)


CASES: dict[str, tuple[Callable[[], Any], type[AttnkitError], str]] = {
    "a length beyond int32": (
        lambda: create_block_mask(causal, 1, 1, LONG, 16),
        OptionError,
        "Q_LEN must be at most 2147483647, as positions are int32; got 2147483648",
    ),
    "a batch beyond int32": (
        lambda: create_block_mask(lambda b, h, q, kv: q > b, LONG, 1, 16, 16),
        OptionError,
        "B must be at most 2147483647",
    ),
    "a tile beyond int32": (
        lambda: create_block_mask(causal, 1, 1, 16, 16, BLOCK_SIZE=2**40),
        OptionError,
        "BLOCK_SIZE must be at most 2147483647",
    ),
    "explain a length beyond int32": (
        lambda: explain(q_len=LONG),
        OptionError,
        "q_len must be at most 2147483647",
    ),
    "intervals of a length beyond int32": (
        lambda: intervals(causal, LONG, 16),
        OptionError,
        "q_len must be at most 2147483647",
    ),
    "a numpy int": (
        lambda: create_block_mask(causal, 1, 1, np.int64(16), 16),  # type: ignore[arg-type]
        OptionError,
        "Q_LEN must be a positive int, got np.int64(16)",
    ),
    "create_mask, batch 0": (
        lambda: create_mask(causal, 0, 1, 4, 4),
        OptionError,
        "B must be a positive int, got 0",
    ),
    "create_mask, negative heads": (
        lambda: create_mask(causal, 1, -1, 4, 4),
        OptionError,
        "H must be a positive int, got -1",
    ),
    "create_mask, heads as text": (
        lambda: create_mask(causal, 1, "x", 4, 4),  # type: ignore[arg-type]
        OptionError,
        "H must be a positive int, got 'x'",
    ),
    "create_mask, too many positions": (
        lambda: create_mask(causal, 1, 1, 2**30, 2**30),
        OptionError,
        "has 1152921504606846976 positions, expected at most 68719476736; create_block_mask",
    ),
    "create_mask, device": (
        lambda: create_mask(causal, 1, 1, 4, 4, device="gpu:3"),
        DeviceError,
        "device must be a torch.device or a name such as 'cpu' or 'cuda:0', and this machine must "
        "have it; got 'gpu:3'",
    ),
    "create_mask, device of the wrong type": (
        lambda: create_mask(causal, 1, 1, 4, 4, device=2.5),  # type: ignore[arg-type]
        DeviceError,
        "got 2.5",
    ),
    "create_mask, captured elsewhere": (
        lambda: create_mask(lambda b, h, q, kv: IDS.to("meta")[q] > 0, 1, 1, 4, 4),
        DeviceError,
        "on meta, query is on cpu; move it",
    ),
    "create_mask, an index out of range": (
        lambda: create_mask(lambda b, h, q, kv: IDS[q] == IDS[kv], 1, 1, 9, 9),
        BoundsError,
        "'IDS' has 8 entries but index `q` reaches 8",
    ),
    "create_mask, division by zero": (
        lambda: create_mask(lambda b, h, q, kv: q // kv > 0, 1, 1, 4, 4),
        BoundsError,
        "0",
    ),
    "create_mask, remainder of a table": (
        lambda: create_mask(lambda b, h, q, kv: q % IDS[kv] > 0, 1, 1, 4, 4),
        BoundsError,
        "`q % IDS[kv]`",
    ),
    "a device without a name": (
        lambda: create_block_mask(causal, 1, 1, 16, 16, device="nowhere"),
        DeviceError,
        "got 'nowhere'",
    ),
    "to a device": (lambda: block_mask().to("nowhere"), DeviceError, "got 'nowhere'"),
    "tiles on meta": (
        lambda: block_mask().to("meta").runs,
        DeviceError,
        "a BlockMask on the meta device has no tiles",
    ),
    "the class itself": (
        lambda: attnkit.BlockMask(
            causal, batch=1, heads=1, q_len=0, kv_len=4, block=(16, 16), device="cpu"
        ),
        OptionError,
        "q_len must be a positive int, got 0",
    ),
    "index of tiles": (
        lambda: block_mask()[2.5],
        BoundsError,
        "a BlockMask is indexed by up to three ints, slices or index tensors",
    ),
    "index beyond the batch": (lambda: block_mask()[3], BoundsError, "index 3 is out of range"),
    "block lists": (
        lambda: attnkit.BlockMask.from_kv_blocks([1], [2]),
        ArgumentError,
        "PyTorch's BlockMask.from_kv_blocks refuses these arguments",
    ),
    "explain, device": (lambda: explain(q_len=16, device="x"), DeviceError, "got 'x'"),
    "explain, dtype": (
        lambda: explain(q_len=16, dtype=torch.int8),
        DTypeError,
        "dtype must be one of float16, bfloat16, float32, float64, got torch.int8",
    ),
    "explain, no dtype": (
        lambda: explain(q_len=16, dtype="float32"),  # type: ignore[arg-type]
        DTypeError,
        "got 'float32'",
    ),
    "explain, arch": (
        lambda: explain(q_len=16, arch=90),  # type: ignore[arg-type]
        ArgumentError,
        "arch must be a name such as 'sm_100a' or None, got 90",
    ),
    "explain, a list as arch": (
        lambda: explain(q_len=16, arch=["sm_90a"]),  # type: ignore[arg-type]
        ArgumentError,
        "arch must be a name such as 'sm_100a' or None, got ['sm_90a']",
    ),
    "trace, device": (
        lambda: attnkit.Variant(None, causal).trace("x"),  # type: ignore[arg-type]
        DeviceError,
        "got 'x'",
    ),
    "mask & number": (
        lambda: attnkit.masks.causal() & 3,  # type: ignore[operator]
        ArgumentError,
        "a mask must be a function mask_mod(b, h, q, kv), got int",
    ),
    "number | mask": (
        lambda: 3 | attnkit.masks.causal(),  # type: ignore[operator]
        ArgumentError,
        "a mask must be a function mask_mod(b, h, q, kv), got int",
    ),
    "label": (
        lambda: attnkit.Mask(causal, 3),  # type: ignore[arg-type]
        ArgumentError,
        "label must be a str or None, got int",
    ),
    "show, at": (
        lambda: picture.show(block_mask(), at=0),  # type: ignore[arg-type]
        OptionError,
        "at must be a pair (batch entry, head), got 0",
    ),
    "save, path": (
        lambda: picture.save(3, causal, 16),  # type: ignore[arg-type]
        ArgumentError,
        "path must be a string or a Path, got 3",
    ),
    "summarize": (
        lambda: summary.summarize(causal),  # type: ignore[arg-type]
        ArgumentError,
        "blocks must be a BlockMask of attnkit.create_block_mask, got function",
    ),
    "save_timeline": (
        lambda: timeline.save_timeline("x.svg", None),  # type: ignore[arg-type]
        ArgumentError,
        "forecast must be a Forecast",
    ),
    "Case, a size": (
        lambda: testing.Case(4, "x"),  # type: ignore[arg-type]
        OptionError,
        "kv_len must be a positive int, got 'x'",
    ),
    "Case, dtype": (lambda: testing.Case(4, 4, dtype=torch.int8), DTypeError, "got torch.int8"),
    "Case, spread": (
        lambda: testing.Case(4, 4, spread=float("nan")),
        OptionError,
        "spread must be a number from 0 to 1e+30, got nan",
    ),
    "Case, seed": (lambda: testing.Case(4, 4, seed=2**70), OptionError, "seed must be an int"),
    "Limits": (
        lambda: testing.Limits(q_len=3),  # type: ignore[arg-type]
        OptionError,
        "q_len must be a range (low, high), got 3",
    ),
    "lengths": (
        lambda: testing.lengths(5, 2),
        OptionError,
        "low must be at most high, got low=5 and high=2",
    ),
    "check_variant, backends": (
        lambda: testing.check_variant(None, causal, backends="cpu"),
        ArgumentError,
        "backends must be a list of names, got 'cpu'",
    ),
    "check_variant, dtype": (
        lambda: testing.check_variant(None, causal, dtype=torch.int8),
        DTypeError,
        "got torch.int8",
    ),
    "check_case, variant": (
        lambda: testing.check_case(causal, testing.Case(4, 4)),  # type: ignore[arg-type]
        ArgumentError,
        "variant must be an attnkit.Variant, got function",
    ),
    "load": (
        lambda: testing.load(3),  # type: ignore[arg-type]
        ArgumentError,
        "target must be a string such as 'file.py:name'",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    call, kind, text = CASES[name]
    with pytest.raises(AttnkitError) as caught:
        call()
    assert isinstance(caught.value, kind)
    assert text in str(caught.value)


def test_a_message_computes_nothing() -> None:
    """Error messages show the type of a wrong value and never compute its repr."""

    class Long:
        def __repr__(self) -> str:
            raise AssertionError("the repr of an argument was computed")

    with pytest.raises(OptionError, match="Q_LEN must be a positive int, got Long"):
        create_block_mask(causal, 1, 1, Long(), 16)  # type: ignore[arg-type]
    with pytest.raises(attnkit.TraceError, match="got Long"):
        create_mask(Long(), 1, 1, 4, 4)  # type: ignore[arg-type]


def test_a_block_mask_can_be_iterated_over() -> None:
    """Iterating over a BlockMask yields its batch entries and ends."""
    mask = create_block_mask(lambda b, h, q, kv: q >= kv + b, 3, 1, 32, 32, BLOCK_SIZE=16)
    assert len(list(mask)) == 3  # type: ignore[call-overload]


@pytest.mark.parametrize("name", AuxOutput._fields)
def test_an_output_is_returned_if_it_is_requested(name: str) -> None:
    lse, maxima, entropy, sums = torch.randn(4, 1, 2, 3)
    computed = {"lse": lse, "max_scores": maxima, "entropy": entropy, "column_sums": sums}
    computed["max_logits"] = maxima.amax(-1)
    request = AuxRequest(**{name: True})
    assert request.needs_row_maxima == name.startswith("max_")
    found = AuxOutput.of(request, lse, maxima, entropy, sums)
    for field, value in zip(AuxOutput._fields, found, strict=True):
        assert (value is not None) == (field == name)
        assert value is None or torch.equal(value, computed[field])
    assert AuxOutput.of(request, lse, None, None).max_logits is None


def test_a_head_without_queries_has_no_largest_score() -> None:
    nothing = torch.zeros(2, 3, 0)
    largest = AuxOutput.of(AuxRequest(max_logits=True), nothing, nothing, None).max_logits
    assert largest is not None
    assert torch.equal(largest, torch.full((2, 3), -torch.inf))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float64])
def test_memory_must_reach_to_the_last_element(dtype: torch.dtype) -> None:
    view = torch.zeros(3, 8, dtype=dtype)[1:, 2:7:2]  # elements 10 to 22
    needed = 23 * dtype.itemsize
    for size in (24 * dtype.itemsize, needed, needed - 1, 4 * dtype.itemsize, 1, 0):
        view.untyped_storage().resize_(size)
        assert lacks_memory(view) == (size < needed)
    assert not lacks_memory(view[:0])
    assert not lacks_memory(torch.empty(3, device="meta"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (3, "3"),
        (True, "True"),
        (2.5, "2.5"),
        ("a" * 99, "'aaaaaaaaaaaa...aaaaaaaaaaaaa'"),
        ((1, "b"), "(1, 'b')"),
        ([1, None], "[1, None]"),
        ([1, torch.zeros(1)], "list"),
        (torch.float16, "torch.float16"),
        (torch.device("cpu"), "device(type='cpu')"),
        (np.int64(3), "np.int64(3)"),
        (dict, "the class dict"),
        (torch.zeros(2), "Tensor"),
        ({1: 2}, "dict"),
        (len, "builtin_function_or_method"),
    ],
)
def test_values_are_shown_in_a_line(value: Any, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    ("dimensions", "index"),
    [(0, "kv"), (1, "kv"), (2, "q, kv"), (3, "h, q, kv"), (4, "b, h, q, kv"), (5, "b, h, q, kv")],
)
def test_tensors_are_no_masks(dimensions: int, index: str) -> None:
    advice = f"; capture the tensor and index it: lambda b, h, q, kv: mask[{index}]"
    assert index_instead(torch.zeros((2,) * dimensions)) == advice
    assert not index_instead([True])
