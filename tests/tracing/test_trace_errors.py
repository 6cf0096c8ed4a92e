"""Check that tracing errors point to the user's line and say what to write instead."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from attnkit.errors import AttnkitError, DTypeError, TraceError
from attnkit.mods import softcap
from attnkit.tracing.tracer import trace

TABLE = torch.randn(4, 8)
LIST = [1.0, 2.0, 3.0]
ARRAY = np.arange(8)


def branch(b: Any, h: Any, q: Any, kv: Any) -> Any:
    if q >= kv:
        return q > 3
    return q < 2


def chained(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return 0 <= q - kv < 128


def swallowed(b: Any, h: Any, q: Any, kv: Any) -> Any:
    try:
        return bool(q > kv)
    except Exception:
        return q >= kv


def in_place(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    s.add_(1)
    return s


def assigned(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    TABLE[h][q] = s
    return s


# name -> (function, kind, parts of the message)
CASES: dict[str, tuple[Callable[..., Any], Any, tuple[str, ...]]] = {
    "if": (branch, "mask", ("torch.where", "if q >= kv:", "^^^^^^^", "in branch")),
    "chained comparison": (chained, "mask", ("a < b < c", "0 <= q - kv < 128", "torch.where")),
    "swallowed": (swallowed, "mask", ("the truth of a traced value", "bool(q > kv)")),
    "and": (lambda b, h, q, kv: (q > kv) and (h > 0), "mask", ("`&`", "truth")),
    "not": (lambda b, h, q, kv: not (q > kv), "mask", ("`~`",)),
    "max()": (lambda s, b, h, q, kv: max(s, 0), "score", ("torch.maximum", "max(s, 0)")),
    "float()": (lambda s, b, h, q, kv: float(s), "score", ("cannot become a Python number",)),
    "item": (lambda s, b, h, q, kv: s.item(), "score", ("cannot become a Python number",)),
    "math.exp": (lambda s, b, h, q, kv: math.exp(s), "score", ("use the torch.* function",)),
    "list index": (lambda s, b, h, q, kv: LIST[h], "score", ("in place of a list",)),
    "numpy index": (lambda b, h, q, kv: ARRAY[q] > kv, "mask", ("Python number",)),
    "numpy operand": (lambda b, h, q, kv: q + ARRAY > kv, "mask", ("torch.from_numpy",)),
    "range": (lambda s, b, h, q, kv: sum(range(q)), "score", ("range()",)),
    "random": (lambda s, b, h, q, kv: s + torch.rand(()), "score", ("rand is random",)),
    "dropout": (
        lambda s, b, h, q, kv: torch.nn.functional.dropout(s),
        "score",
        ("dropout is not supported",),
    ),
    "in place": (in_place, "score", ("changes a value in place", "write add")),
    "assignment": (assigned, "score", ("assigning into a traced value",)),
    "assignment at an index": (
        lambda s, b, h, q, kv: torch.zeros(4).__setitem__(h, 1.0),
        "score",
        ("assigning at a traced index", "torch.where"),
    ),
    "captured tensor in place": (
        lambda s, b, h, q, kv: s + TABLE.add_(1)[h, q],
        "score",
        ("add_ changes a captured tensor", "outside of the function"),
    ),
    "part of a captured tensor in place": (
        lambda s, b, h, q, kv: s + TABLE[1:].mul_(2)[h, q],
        "score",
        ("mul_ changes a captured tensor",),
    ),
    "captured tensor as an output": (
        lambda s, b, h, q, kv: s + torch.exp(TABLE, out=TABLE)[h, q],
        "score",
        ("exp changes a captured tensor",),
    ),
    "captured tensor in a function": (
        lambda s, b, h, q, kv: s + torch.nn.functional.relu(TABLE, inplace=True)[h, q],
        "score",
        ("relu changes a captured tensor",),
    ),
    "unknown function": (
        lambda s, b, h, q, kv: torch.cumsum(s, 0),
        "score",
        ("cumsum is not supported",),
    ),
    "unknown attribute": (lambda s, b, h, q, kv: s.rows, "score", ("no attribute 'rows'",)),
    "too many indices": (
        lambda s, b, h, q, kv: s + TABLE[h, q, kv],
        "score",
        ("too many indices (3)", "(4, 8)"),
    ),
    "constant index": (
        lambda s, b, h, q, kv: s + TABLE[4, q],
        "score",
        ("index 4 is out of range for dimension 0 of size 4",),
    ),
    "view as a shape": (
        lambda s, b, h, q, kv: s + TABLE[h, :2].view_as(TABLE[q % 4, :2]).sum(),
        "score",
        ("view_as and expand_as are not supported for values with a shape",),
    ),
    "index that is a number": (
        lambda s, b, h, q, kv: torch.nn.functional.embedding(3, s.view(1, 1)),
        "score",
        ("expected a tensor of integer indices, got a number",),
    ),
    "index that is a float": (
        lambda s, b, h, q, kv: s + torch.gather(TABLE[0], 0, s.view(1))[0],
        "score",
        ("expected a tensor of integer indices, got torch.float32",),
    ),
    "integer power": (
        lambda b, h, q, kv: q**kv > 3,
        "mask",
        ("integer power q ** kv; convert to float",),
    ),
    "float index": (
        lambda s, b, h, q, kv: s + TABLE[h, q / 2],
        "score",
        ("index must be an integer",),
    ),
    "bool index": (lambda s, b, h, q, kv: s + TABLE[h, q > 2], "score", ("torch.where",)),
    "not reduced": (lambda s, b, h, q, kv: s + TABLE[h], "score", ("shape (8,)", "one number")),
    "long reduction": (
        lambda s, b, h, q, kv: s + torch.ones(4, 1000)[h].sum(),
        "score",
        ("1000 elements", "128"),
    ),
    "division by zero": (lambda b, h, q, kv: q // 0 > kv, "mask", ("division by zero",)),
    "bits of a float": (lambda s, b, h, q, kv: s & 1, "score", ("ints or bools",)),
    "bool minus bool": (lambda b, h, q, kv: (q > 1) - (kv > 1), "mask", ("subtracting bools",)),
    "condition": (lambda s, b, h, q, kv: torch.where(q, s, 0), "score", ("bool condition",)),
    "unsigned int": (lambda b, h, q, kv: q.to(torch.uint32) > 0, "mask", ("torch.uint32",)),
    "complex": (lambda s, b, h, q, kv: s * 1j, "score", ("complex",)),
    "big int": (lambda b, h, q, kv: q < 2**40, "mask", ("32 bits",)),
    "string": (lambda s, b, h, q, kv: s + "1", "score", ("unsupported operand",)),
    "None": (lambda s, b, h, q, kv: None, "score", ("returned NoneType",)),
    "tuple": (lambda s, b, h, q, kv: (s, s), "score", ("returned tuple", "one tensor")),
    "mask returns ints": (
        lambda b, h, q, kv: q - kv,
        "mask",
        ("returned torch.int32", "expected torch.bool"),
    ),
    "mask returns floats": (lambda b, h, q, kv: q / 2, "mask", ("returned torch.float32",)),
    "mod returns bool": (
        lambda s, b, h, q, kv: s > 0,
        "score",
        ("returned torch.bool", "expected a score", "block_mask"),
    ),
    "arity": (lambda b, h, q: q > h, "mask", ("cannot be called as mask_mod(b, h, q, kv)",)),
    "mask as mod": (
        lambda b, h, q, kv: q > kv,
        "score",
        ("cannot be called as score_mod(score, b, h, q, kv)", "pass it as block_mask"),
    ),
    "mod as mask": (
        lambda s, b, h, q, kv: s,
        "mask",
        ("cannot be called as mask_mod(b, h, q, kv)", "pass it as score_mod"),
    ),
    "factory": (
        softcap,
        "score",
        ("cannot be called as score_mod(score, b, h, q, kv)", "pass what it returns: softcap(...)"),
    ),
    "not callable": (3, "mask", ("must be a callable mask_mod(b, h, q, kv)", "3")),  # type: ignore[dict-item]
    "own error": (lambda s, b, h, q, kv: {}["x"], "score", ("raised KeyError", "'x'")),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    function, kind, parts = CASES[name]
    with pytest.raises(TraceError) as caught:
        trace(function, kind)
    for part in parts:
        assert part in str(caught.value)


def test_message_points_at_file_line_and_column() -> None:
    with pytest.raises(TraceError) as caught:
        trace(branch, "mask")
    message = str(caught.value).splitlines()
    assert message[1].strip().startswith(__file__)
    assert f":{branch.__code__.co_firstlineno + 1} in branch" in message[1]
    start = message[2].index("q >= kv")
    assert message[3] == " " * start + "^" * len("q >= kv")


def test_classes_of_the_errors() -> None:
    with pytest.raises(DTypeError):
        trace(lambda b, h, q, kv: q, "mask")
    assert issubclass(TraceError, TypeError)
    assert issubclass(TraceError, AttnkitError)


def test_tensors_made_while_tracing_may_be_edited() -> None:
    def own(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        steps = torch.zeros(8)
        steps[2:] = 1.0
        steps += 1
        slopes = TABLE.sum(0)
        slopes.clamp_(max=1)
        return s + steps[h] + slopes[q % 8]

    before = TABLE.clone()
    assert str(trace(own, "score")) == "score(score, b, h, q, kv) = score + t0[h] + t1[q % 8]"
    assert torch.equal(TABLE, before)
