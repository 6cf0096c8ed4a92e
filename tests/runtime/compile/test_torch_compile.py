"""Check that flex_attention inside torch.compile gives one graph and bit-identical results."""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.variables import higher_order_ops
from torch.nn.attention import flex_attention as flex
from torch.utils.checkpoint import checkpoint

import attnkit
import attnkit.graph.ir
from attnkit import AuxRequest, Variant, create_block_mask, flex_attention, masks, mods
from attnkit.masks._examples import examples as mask_examples
from attnkit.mods._examples import examples as mod_examples
from attnkit.runtime.compile import op
from attnkit.runtime.compile.op import Request
from attnkit.tracing.tracer import trace
from tests.sampling import crossed

LENGTH = 150
TABLE = torch.randn(4, 2 * LENGTH)
WINDOW = 20
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(length: int = LENGTH, *, kv_heads: int = 4, batch: int = 2) -> list[Tensor]:
    """Return query, key and value as transposed views of [B, S, H, D] tensors, as in a model."""
    return [
        torch.randn(batch, length, h, 16).transpose(1, 2).requires_grad_()
        for h in (4, kv_heads, kv_heads)
    ]


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, **{"fullgraph": True, "backend": "aot_eager"} | options)


def check(
    function: Callable[..., Any],
    made: list[Tensor],
    learned: tuple[Tensor, ...] = (),
    **options: Any,
) -> None:
    """Check that outputs and gradients are bit-identical to those of the uncompiled function."""
    found = []
    for call in (compiled(function, **options), function):
        results = call(*made)
        results = results if isinstance(results, tuple) else (results,)
        total = sum(torch.where(r == -math.inf, 0, r).sin().sum() for r in results)
        found.append((*results, *torch.autograd.grad(total, (*made, *learned))))
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected)
        assert ours.stride() == expected.stride()


# --- what a mod may capture


def test_functions_made_outside() -> None:
    bias = torch.randn(4, requires_grad=True)
    documents = torch.arange(LENGTH) // 40
    mod = lambda s, b, h, q, kv: torch.tanh(s) * 2 + bias[h] + TABLE[h, q - kv + LENGTH]
    mask = lambda b, h, q, kv: (q - kv < WINDOW) & (documents[q] == documents[kv])
    check(lambda q, k, v: flex_attention(q, k, v, mod, mask), inputs(), (bias,))


def test_functions_made_inside() -> None:
    bias = torch.randn(4, requires_grad=True)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        slopes = bias.exp()  # learned, and computed on the way

        def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return s + slopes[h] * (kv - q)

        out: Tensor = flex_attention(query * 2, key, value, mod, causal)
        return out + 1

    check(call, inputs(), (bias,))


def test_values_of_captured_tensors_alone() -> None:
    bias = torch.randn(4, requires_grad=True)
    mod = lambda s, b, h, q, kv: s + (bias * 3 + TABLE[:, 0])[h] + torch.tensor(0.5) * bias.sum()
    check(lambda q, k, v: flex_attention(q, k, v, mod), inputs(), (bias,))


class Layer(nn.Module):
    def __init__(self, window: int = 30) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 2 * LENGTH))
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("documents", torch.arange(LENGTH) // 40)
        self.window = window

    def mod(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score * self.gain + self.table[h, q - kv + LENGTH]

    def mask(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv < self.window) & (self.documents[q] == self.documents[kv])

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = flex_attention(query, key, value, self.mod, self.mask)
        return out


def test_methods_of_a_module() -> None:
    layer = Layer()
    check(layer, inputs(), (layer.table, layer.gain))
    layer.window = 9  # compiled again
    check(layer, inputs(), (layer.table, layer.gain))


def test_masks_of_the_library() -> None:
    documents = masks.document(torch.arange(LENGTH) // 40)
    mask = (masks.causal() & documents) | masks.prefix_lm(10)
    check(lambda q, k, v: flex_attention(q, k, v, mods.softcap(5.0), mask), inputs())
    apart = ~documents
    check(lambda q, k, v: flex_attention(q, k, v, None, masks.causal() & apart), inputs())


def test_masks_of_other_kinds() -> None:
    some = functools.partial(lambda b, h, q, kv, size: q - kv < size, size=12)
    check(lambda q, k, v: flex_attention(q, k, v, None, some), inputs())
    check(lambda q, k, v: flex_attention(q, k, v, None, attnkit.noop_mask), inputs())
    check(lambda q, k, v: flex_attention(q, k, v), inputs())
    variant = Variant(mods.alibi(4), masks.sliding_window(20))
    check(lambda q, k, v: variant(q, k, v), inputs())


def test_block_masks() -> None:
    documents = torch.arange(LENGTH) // 40
    mask = lambda b, h, q, kv: (q >= kv) & (documents[q] == documents[kv])
    ours = create_block_mask(mask, None, None, LENGTH, LENGTH, BLOCK_SIZE=(64, 32))
    theirs = flex.create_block_mask(mask, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=32)
    for block_mask in (ours, theirs):
        check(functools.partial(flex_attention, block_mask=block_mask), inputs())


def test_lists_that_overrule_the_mask() -> None:
    count = torch.tensor([[[1, 1, 0, 2]]], dtype=torch.int32)
    index = torch.tensor([[[[2, 0, 0, 0], [3, 0, 0, 0], [1, 1, 1, 1], [0, 3, 0, 0]]]])
    for mod in (lambda b, h, q, kv: kv % 3 > 0, None):
        lists = flex.BlockMask.from_kv_blocks(count, index.int(), BLOCK_SIZE=16, mask_mod=mod)
        check(functools.partial(flex_attention, block_mask=lists), inputs(64))


@pytest.mark.parametrize(("kind", "part"), crossed(["score", "mask"], range(3)))
def test_graphs_of_the_library_are_those_of_a_trace(kind: Any, part: int) -> None:
    seen: list[Request] = []

    def recorder(graph: Any, _: Any) -> Any:
        calls = [n for n in graph.graph.nodes if n.target is torch.ops.attnkit.attention.default]
        seen.extend(Request.parse(n.args[9]) for n in calls)
        return graph.forward

    examples: dict[str, Any] = mask_examples(48) if kind == "mask" else mod_examples(48)
    for name, example in list(examples.items())[part::3]:
        torch._dynamo.reset()
        function = example.mask if kind == "mask" else example.mod
        given = {"block_mask": function} if kind == "mask" else {"score_mod": function}
        shapes = [(example.batch, example.heads, n, 8) for n in (example.q_len, example.kv_len)]
        query, key = (torch.randn(shape) for shape in shapes)
        with torch.no_grad():
            compiled(functools.partial(flex_attention, **given), backend=recorder)(query, key, key)
        request = seen.pop()
        root = trace(function, kind).root
        assert attnkit.graph.ir.text(root) == (request.mask if kind == "mask" else request.score), (
            name
        )
        assert not seen


def test_tables_made_inside() -> None:
    check(lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s * torch.arange(LENGTH)[j] / 50), inputs())  # fmt: skip
    heads = attnkit.per_head([masks.causal(), masks.sliding_window(5), masks.causal(), causal])
    check(lambda q, k, v: flex_attention(q, k, v, None, heads), inputs())
    entries = attnkit.per_batch([masks.causal(), masks.prefix_lm(9)])
    check(lambda q, k, v: flex_attention(q, k, v, None, entries), inputs())


def test_mods_of_any_captured_objects() -> None:
    rows = torch.randn(LENGTH, 8, requires_grad=True)
    settings = {"slope": 0.3, "tables": [torch.randn(4), torch.randn(LENGTH)]}
    shifts = torch.tensor([1, 7])
    some: dict[str, tuple[Any, Any]] = {
        "a product of rows": (lambda s, b, h, q, kv: s + torch.dot(rows[q], rows[kv]), None),
        "a sum over rows": (lambda s, b, h, q, kv: s + (rows[q] * rows[kv]).sum(), None),
        "a dict": (lambda s, b, h, q, kv: s + settings["slope"] * settings["tables"][1][kv], None),  # type: ignore[index,operator]
        "a part": (lambda s, b, h, q, kv: s + TABLE[1, 5:][kv - 5], None),
        "scores that are masked": (lambda s, b, h, q, kv: torch.where(q < kv, -math.inf, s), None),
        "a shift": (None, masks.causal().shift(q=shifts)),
        "a reduction": (None, lambda b, h, q, kv: torch.stack([q == kv, kv < 3]).any()),
    }
    for mod, mask in some.values():
        learned = (rows,) if mod is not None and "rows" in mod.__code__.co_freevars else ()
        check(functools.partial(flex_attention, score_mod=mod, block_mask=mask), inputs(), learned)


def test_a_block_mask_made_inside() -> None:
    documents = torch.arange(LENGTH) // 40

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = lambda b, h, q, kv: (q >= kv) & (documents[q] == documents[kv])
        block_mask = create_block_mask(mask, None, None, query.shape[2], key.shape[2])
        first: Tensor = flex_attention(query, key, value, block_mask=block_mask)
        out: Tensor = flex_attention(first, key, value, block_mask=block_mask)
        return out

    check(call, inputs())


def test_parts_are_merged() -> None:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = [
            flex_attention(query, key[:, :, at], value[:, :, at], return_lse=True)
            for at in (slice(0, 64), slice(64, None))
        ]
        return attnkit.merge_states(*parts[0], *parts[1])[0]

    check(call, inputs())


# --- lengths, edits


def test_one_graph_for_all_lengths() -> None:
    layer, counter = Layer(), CompileCounterWithBackend("aot_eager")
    call = compiled(layer, backend=counter, dynamic=True)
    for length in (64, 100, 77, 150, 33):
        made = inputs(length)
        assert torch.equal(call(*made), layer(*made))
        call(*made).sum().backward()
    assert counter.frame_count == 1


def test_masks_and_mods_of_the_library_made_inside() -> None:
    def call(query: Tensor, key: Tensor, value: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = masks.document(ids) & masks.sliding_window(9)
        mask = (packed | masks.prefix_lm(lengths)) & masks.padding(lengths + 30)
        mod = mods.compose(mods.alibi(4), mods.softcap(20.0))
        out: Tensor = flex_attention(query, key, value, mod, mask)
        return out

    counter = CompileCounterWithBackend("aot_eager")
    whole = compiled(call, backend=counter, dynamic=True)
    for length in (64, 100, 77):
        ids, lengths = torch.arange(length) // 7, torch.tensor([5, length - 40])
        made = inputs(length)
        assert torch.equal(whole(*made, ids, lengths), call(*made, ids, lengths))
    assert counter.frame_count == 1


def test_a_length_that_a_mod_reads() -> None:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = query.shape[2]
        mod = lambda s, b, h, q, kv: s * ((q + 1.0) / length)
        out: Tensor = flex_attention(query, key, value, mod, lambda b, h, q, kv: kv < length - q)
        return out

    for length in (64, 100, 77):
        check(call, inputs(length), dynamic=True)


def test_a_number_that_changes() -> None:
    size = 5
    call = compiled(lambda q, k, v: flex_attention(q, k, v, None, lambda b, h, i, j: i - j < size))
    made = inputs()
    for size in (5, 9, 140):
        expected = flex_attention(*made, block_mask=lambda b, h, i, j, n=size: i - j < n)
        assert torch.equal(call(*made), expected)


def test_an_edited_table_is_honoured() -> None:
    documents = torch.arange(LENGTH) // 40
    mask = lambda b, h, q, kv: documents[q] == documents[kv]
    call, made = compiled(functools.partial(flex_attention, block_mask=mask)), inputs()
    for divisor in (40, 70, 13):
        documents.copy_(torch.arange(LENGTH) // divisor)
        assert torch.equal(call(*made), flex_attention(*made, block_mask=mask))


def test_repeated_calls_are_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, made = Layer(), inputs()
    call = compiled(layer)
    call(*made).sum().backward()
    prepared: list[Any] = []
    plain = op.prepare
    monkeypatch.setattr(op, "prepare", lambda *a, **k: prepared.append(a) or plain(*a, **k))
    for _ in range(3):
        call(*made).sum().backward()
    assert not prepared
    call(*inputs(70)).sum().backward()
    assert prepared


# --- options


def test_results() -> None:
    options: list[dict[str, Any]] = [
        {"return_lse": True},
        {"return_lse": True, "scale": 0.3},
        {"kernel_options": {"BLOCK_M": 32, "num_warps": 4}},
        {"deterministic": True, "backend": "cpu"},
    ]
    for own in options:
        check(functools.partial(flex_attention, score_mod=mods.alibi(4), block_mask=causal, **own), inputs())  # fmt: skip
    call = lambda q, k, v: flex_attention(q, k, v, kernel_options={"BLOCK_M": 64, "BLOCK_N": 64})
    check(call, inputs(), dynamic=True)  # Dynamo makes the integers of the call symbolic
    shared = functools.partial(flex_attention, block_mask=causal, enable_gqa=True)
    check(shared, inputs(kv_heads=2))


def test_auxiliary_results() -> None:
    made = inputs()
    call = lambda q, k, v: flex_attention(
        q, k, v, None, causal, return_aux=AuxRequest(lse=True, max_scores=True)
    )
    (out, aux), (expected, own) = compiled(call)(*made), call(*made)
    assert torch.equal(out, expected)
    assert torch.equal(aux.lse, own.lse)
    assert torch.equal(aux.max_scores, own.max_scores)
    assert not aux.max_scores.requires_grad


def test_other_dtypes() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        made = [t.detach().to(dtype).requires_grad_() for t in inputs()]
        check(lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s / 3 + 0.1 * h), made)


# --- around it


def test_autocast_and_checkpointing() -> None:
    layer = Layer()

    def call(*qkv: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = checkpoint(layer, *qkv, use_reentrant=False)
        return out

    check(call, inputs(), (layer.table, layer.gain))


def test_operators_are_what_they_claim() -> None:
    """`torch.library.opcheck` accepts both operators: schema, fake tensors and autograd."""
    table = torch.randn(4, 2 * LENGTH, requires_grad=True)
    documents = torch.arange(LENGTH) // 40
    score = trace(lambda s, b, h, q, kv: s + table[h, q - kv + LENGTH], "score")
    mask = trace(lambda b, h, q, kv: documents[q] == documents[kv], "mask")
    request = op.request_of(score, mask, "plain", (), (), "auto", False, False, False, True, True)
    sink = torch.randn(4, requires_grad=True)
    arguments = (*inputs(), [table, sink], [documents], [], [], [], [], request.text, None)
    torch.library.opcheck(torch.ops.attnkit.attention.default, arguments)
    for dtype in (torch.float32, torch.bfloat16):
        query, key, value = (t.detach().to(dtype) for t in inputs())
        results = torch.ops.attnkit.attention(query, key, value, *arguments[3:])
        out, lse, _, entropy, digest = results
        grads = [torch.randn_like(t) for t in (out, lse, entropy)]
        scores = [table.detach(), sink.detach()]
        saved = (*grads, query, key, value, out, lse, entropy, digest, scores, *arguments[4:])
        saved = (*saved, [True, True])
        tests = ("test_schema", "test_faketensor")  # it has no gradient of its own
        torch.library.opcheck(torch.ops.attnkit.attention_backward.default, saved, test_utils=tests)


def test_strides_are_those_of_the_fake() -> None:
    """Results have the strides of the fake tensors, also for expanded or non-dense queries."""
    given = inputs()
    shape = given[0].shape
    queries = [torch.randn(shape[::-1]).permute(3, 2, 1, 0)]
    queries += [torch.randn(shape[-1]).expand(shape), torch.randn(1, *shape[1:]).expand(shape)]
    request = op.request_of(None, None, "plain", (), (), "auto", *[False] * 5)
    for query in queries:
        tensors = (query, *(t.detach() for t in given[1:]))
        arguments = (*tensors, *([] for _ in range(6)), request.text, None)
        checked = ("test_faketensor",)
        torch.library.opcheck(torch.ops.attnkit.attention.default, arguments, test_utils=checked)
        out, lse, _, entropy, digest = torch.ops.attnkit.attention(*arguments)
        grads = torch.randn_like(out), torch.randn_like(lse), entropy
        saved = (*grads, *tensors, out, lse, entropy, digest, *arguments[3:])
        torch.library.opcheck(
            torch.ops.attnkit.attention_backward.default, (*saved, []), test_utils=checked
        )


def test_a_captured_tensor_that_is_a_view_of_a_result() -> None:
    """The backward of `view` relies on the strides of the gradient of the captured tensor."""
    weight = torch.randn(16, 4 * LENGTH, requires_grad=True)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        bias = (query[:, 0] @ weight).view(2, LENGTH, 4, LENGTH).permute(0, 2, 1, 3)

        def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return s + bias[b, h, q, kv]

        return flex_attention(query, key, value, mod)

    check(call, inputs(), (weight,))


def test_strides_of_operators_with_captured_tensors() -> None:
    """Both backward operators give gradients with the strides of the fake ones."""
    importlib.import_module("attnkit.runtime.compile.column_sums_op")  # registers the second one
    tables = [torch.randn(5, 4).t(), torch.randn(4, 10)[:, ::2], torch.randn(1, 5).expand(4, 5)]
    tables.append(torch.randn(3, 4, 5)[1].t().contiguous().t())
    score = trace(lambda s, b, h, q, kv: s + sum(t[h, q % 5] for t in tables), "score")
    request = op.request_of(score, None, "plain", (), (), "auto", *[False] * 5)
    query, key, value = (t.detach() for t in inputs())
    rest = list(score.tensors), *([] for _ in range(5)), request.text, None
    out, lse, _, entropy, digest = torch.ops.attnkit.attention(query, key, value, *rest)
    grads, results = [torch.randn_like(out), torch.randn_like(lse), entropy], [out, lse, entropy]
    needed = [True, True, False, True]
    saved = *grads, query, key, value, *results, digest, *rest, needed
    checked = ("test_faketensor",)
    torch.library.opcheck(torch.ops.attnkit.attention_backward.default, saved, test_utils=checked)
    grad = torch.randn(2, 4, LENGTH)
    saved = query, key, value, *rest, lse, grad, digest, needed
    torch.library.opcheck(torch.ops.attnkit.column_sums_backward.default, saved, test_utils=checked)


def test_inductor() -> None:
    layer, made = Layer(), inputs()
    call = torch.compile(layer, fullgraph=True)
    found, expected = (
        torch.autograd.grad((c(*made) * 2).sin().sum(), [*made, layer.table]) for c in (call, layer)
    )
    for ours, own in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool) -> None:
    layer, made = Layer(), tuple(t.detach() for t in inputs())
    program = torch.export.export(layer, made, strict=strict)
    assert torch.equal(program.module()(*made), layer(*made))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    layer, made = Layer(), inputs()
    expected = layer(*made)
    with mode():
        call = compiled(layer)
        for _ in range(2):
            assert torch.equal(call(*made), expected)


def test_what_dynamo_cannot_read_runs_outside_of_the_graph() -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        torch._dynamo.graph_break()
        return s * 2

    made = inputs()
    call = lambda q, k, v: flex_attention(q + 0, k, v, mod, causal) + 1
    assert torch.equal(torch.compile(call, backend="aot_eager")(*made), call(*made))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(call)(*made)


def test_another_dynamo_runs_it_outside_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(attnkit.runtime.compile, "dynamo", raising=False)
    monkeypatch.setitem(sys.modules, "attnkit.runtime.compile.dynamo", None)
    monkeypatch.delitem(higher_order_ops._hop_name_to_variable_class, "attnkit_attention", False)
    made = inputs()
    call = lambda q, k, v: flex_attention(q + 0, k, v, mods.alibi(4), causal) + 1
    assert torch.equal(torch.compile(call, backend="aot_eager")(*made), call(*made))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="attnkit_attention"):
        compiled(call)(*made)


def test_errors_are_those_of_the_operator() -> None:
    block_mask = create_block_mask(causal, None, None, LENGTH, LENGTH)
    call = compiled(functools.partial(flex_attention, block_mask=block_mask))
    with pytest.raises(attnkit.ShapeError, match="created for query length 150"):
        call(*inputs(70))
    call(*inputs())
    longer = create_block_mask(causal, None, None, LENGTH, LENGTH + 1)
    with pytest.raises(attnkit.ShapeError, match="created for query length 150 and kv length 151"):
        compiled(functools.partial(flex_attention, block_mask=longer))(*inputs())
    with pytest.raises(attnkit.ShapeError, match="enable_gqa=True"):
        compiled(flex_attention)(*inputs(kv_heads=2))
    with pytest.raises(attnkit.UnsupportedError, match=r"torch\.compile"):
        compiled(functools.partial(flex_attention, backend="eager"))(*inputs())
    with pytest.raises(attnkit.BoundsError, match="it ranges from 0 to 318"):
        compiled(
            lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s + TABLE[h, i + j])
        )(*inputs(160))


def test_compiled_function_that_is_a_score() -> None:
    with pytest.raises(torch._dynamo.exc.UserError, match="expected a score"):
        compiled(lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s > 0))(*inputs())
