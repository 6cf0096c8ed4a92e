"""Compare calls with dropout with dense float64 attention whose elements the definition drops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attnkit
from attnkit import AuxRequest, flex_attention
from attnkit.errors import ArgumentError, OptionError, UnsupportedError
from attnkit.runtime.reuse import fast_path
from attnkit.util.dropout import draw_state, kept, survivor_scale
from tests.docs_code import functions_of

F64 = torch.float64
LENGTHS = 40, 50
CPU = torch.device("cpu")
PAGE = functions_of("tutorials/dropout.md", "draw", "is_kept")


def late(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Keep no key in the first rows."""
    return kv <= q - 5


def draw(dtype: torch.dtype = F64) -> list[Tensor]:
    """Return query [2, 4, 40, 16], key and value [2, 2, 50, 16], and a sink [4]."""
    random = torch.Generator().manual_seed(0)
    shapes = [(2, 4, LENGTHS[0], 16), (2, 2, LENGTHS[1], 16), (2, 2, LENGTHS[1], 16), (4,)]
    tensors = [torch.randn(s, generator=random, dtype=F64) for s in shapes]
    wide = F64 if dtype == F64 else torch.float32
    return [t.to(d).requires_grad_() for t, d in zip(tensors, (dtype,) * 3 + (wide,), strict=True)]


def attend(tensors: list[Tensor], score_mod: Any = None, seed: int = 3, **options: Any) -> Any:
    *qkv, sink = tensors
    torch.manual_seed(seed)
    defaults = {"enable_gqa": True, "return_lse": True, "backend": "cpu", "dropout_p": 0.3}
    return flex_attention(*qkv, score_mod, late, sink=sink, **(defaults | options))


def factors(p: float, shape: tuple[int, int], seed: int = 3) -> Tensor:
    """Return 0 for elements that the page's program drops, else its scale, [2, 4, *shape]."""
    torch.manual_seed(seed)
    numbers = PAGE["draw"](p).tolist()
    rows, columns = shape
    keep = [
        [
            [
                [PAGE["is_kept"](*numbers, b, h, 4, q, kv) for kv in range(columns)]
                for q in range(rows)
            ]
            for h in range(4)
        ]
        for b in range(2)
    ]
    return torch.tensor(keep).double() * (256 / (256 - math.floor(p * 256 + 0.5)))


def dense(tensors: list[Tensor], slopes: Tensor, factor: Tensor) -> Any:
    query, key, value, sink = tensors
    key, value = (t.repeat_interleave(2, 1) for t in (key, value))
    rows, columns = (torch.arange(n) for n in LENGTHS)
    scores = query @ key.mT / 4 - slopes[:, None, None] * (rows[:, None] - columns)
    scores = scores.masked_fill(columns > rows[:, None] - 5, -math.inf)
    scores = torch.cat([scores, sink[:, None, None].expand(2, 4, LENGTHS[0], 1)], -1)
    return (scores.softmax(-1)[..., :-1] * factor) @ value, scores.logsumexp(-1)


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_is_the_softmax_without_the_elements_that_the_page_drops(backend: str) -> None:
    """Output, LSE and all gradients: of query, key, value, sink and a captured tensor."""
    tensors, slopes = draw(), torch.rand(4, dtype=F64).requires_grad_()
    expected = dense(tensors, slopes, factors(0.3, LENGTHS))
    weights = [torch.randn_like(t) for t in expected]
    learned = [*tensors, slopes]
    exact = torch.autograd.grad(expected, learned, weights)
    mod = lambda s, b, h, q, kv: s - slopes[h] * (q - kv)
    for _ in range(3):  # the slow path, the call cache, the fast path
        found = attend(tensors, mod, backend=backend)
        gradients = torch.autograd.grad(found, learned, weights)
        for ours, true in zip((*found, *gradients), (*expected, *exact), strict=True):
            torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["sigmoid", "none"])
@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_drops_weights_that_are_no_softmax(backend: str, name: str) -> None:
    """The same elements as of a softmax; column sums are those before."""
    tensors, slopes = draw(), torch.rand(4, dtype=F64).requires_grad_()
    query, key, value, _ = tensors
    keys, values = (t.repeat_interleave(2, 1) for t in (key, value))
    rows, columns = (torch.arange(n) for n in LENGTHS)
    scores = query @ keys.mT / 4 - slopes[:, None, None] * (rows[:, None] - columns)
    scores = scores.sigmoid() if name == "sigmoid" else scores
    scores = torch.where(columns <= rows[:, None] - 5, scores, 0.0)
    exact_out = (scores * factors(0.3, LENGTHS)) @ values
    learned = [query, key, value, slopes]
    weight = torch.randn_like(exact_out)
    exact = torch.autograd.grad(exact_out, learned, weight, retain_graph=True)
    mod = lambda s, b, h, q, kv: s - slopes[h] * (q - kv)
    options: dict[str, Any] = {"normalization": name, "backend": backend}
    for _ in range(3):
        out = attend([query, key, value, None], mod, return_lse=False, **options)  # type: ignore[list-item]
        gradients = torch.autograd.grad(out, learned, weight)
        for ours, true in zip((out, *gradients), (exact_out, *exact), strict=True):
            torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-12)
    request = AuxRequest(column_sums=True)
    _, aux = attend(
        [query, key, value, None],  # type: ignore[list-item]
        mod,
        return_lse=False,
        return_aux=request,
        **options,
    )
    torch.testing.assert_close(aux.column_sums, scores.sum(2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["sigmoid", "none"])
def test_no_kernel_drops_weights_that_are_no_softmax(name: str) -> None:
    pytest.importorskip("cutlass")
    tensors = [t.detach() for t in draw(torch.bfloat16)[:3]]
    options: dict[str, Any] = {"normalization": name, "return_lse": False}
    with pytest.raises(
        UnsupportedError, match=f"with normalization='{name}' no kernel has dropout"
    ):
        attend([*tensors, None], backend="emulate", **options)  # type: ignore[list-item]
    out = attend([*tensors, None], backend="auto", **options)  # type: ignore[list-item]
    assert torch.equal(out, attend([*tensors, None], **options))  # type: ignore[list-item]


def test_gradients_are_those_of_finite_differences() -> None:
    tensors = [t.detach()[..., :5, :3].clone() if t.ndim == 4 else t.detach() for t in draw()]
    learned = [t.requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(lambda *t: attend(list(t), dropout_p=0.5), learned)


@given(
    st.integers(0, 1000),
    st.floats(1 / 512, 511 / 512, exclude_max=True),
    st.sampled_from([None, 16, 32]),
    st.booleans(),
    st.integers(1, 90),
    st.integers(1, 200),
)
def test_statistics_do_not_change_and_backends_agree(
    seed: int, p: float, block: int | None, causal: bool, q_len: int, kv_len: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(1, 2, n, 8, generator=random, dtype=F64) for n in (q_len, kv_len, kv_len)
    )
    mask = (lambda b, h, q, kv: kv <= q + 3) if causal else None
    options: dict[str, Any] = {
        "block_mask": mask,
        "return_aux": AuxRequest(lse=True, max_scores=True, entropy=True),
        "kernel_options": None if block is None else {"BLOCK_M": block, "BLOCK_N": block},
    }
    results = []
    for backend in ("cpu", "eager"):
        torch.manual_seed(seed)
        results.append(flex_attention(query, key, value, dropout_p=p, backend=backend, **options))
    plain, aux = flex_attention(query, key, value, backend="eager", **options)
    for out, found in results:
        torch.testing.assert_close(out, results[1][0], rtol=1e-10, atol=1e-10)
        for ours, true in zip(found, aux, strict=True):
            if true is not None:
                torch.testing.assert_close(ours, true, rtol=1e-10, atol=1e-10)
    # the mean over the elements' draws is the output without dropout: here exactly, by its parts
    torch.manual_seed(seed)
    state = draw_state(p, CPU)
    assert state is not None
    zero = torch.zeros(1, dtype=torch.int64)
    keep = kept(state, zero[:, None], torch.arange(2), 2, (0, q_len), (0, kv_len))
    if keep.all():
        torch.testing.assert_close(results[0][0], plain * survivor_scale(state, F64))


def test_states_come_from_torchs_generator() -> None:
    tensors = draw()
    same, again, other = (attend(tensors, seed=s)[0] for s in (1, 1, 2))
    assert torch.equal(same, again)
    assert not torch.equal(same, other)
    torch.manual_seed(1)
    *qkv, sink = tensors
    options: dict[str, Any] = {"enable_gqa": True, "dropout_p": 0.3, "sink": sink}
    first, second = (flex_attention(*qkv, None, late, **options) for _ in range(2))
    assert torch.equal(first, same)
    assert not torch.equal(first, second)


def test_zero_is_no_dropout_and_draws_nothing() -> None:
    tensors = draw()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    found = attend(tensors, seed=5, dropout_p=0)
    assert torch.equal(before, torch.get_rng_state())
    *qkv, sink = tensors
    plain = flex_attention(*qkv, None, late, sink=sink, enable_gqa=True, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_the_fast_path_takes_a_new_state_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    attnkit.clear_caches()
    hits: list[bool] = []
    whole = fast_path.try_fast_path

    def noted(*arguments: Any) -> Any:
        found = whole(*arguments)
        hits.append(found is not None)
        return found

    monkeypatch.setattr("attnkit.runtime.reuse.try_fast_path", noted)
    qkv = [torch.randn(1, 2, 40, 16) for _ in range(3)]
    results = []
    for p in (0.2, 0.2, 0.2, 0.7, 0.0, 0.2):  # one entry serves all probabilities but 0
        torch.manual_seed(0)
        results.append(flex_attention(*qkv, dropout_p=p))
    assert hits == [False, False, True, True, False, True]
    torch.manual_seed(0)
    exact = flex_attention(*qkv, dropout_p=0.7, backend="eager")
    torch.testing.assert_close(results[3], exact, rtol=1e-4, atol=1e-5)
    assert torch.equal(results[5], results[0])
    assert torch.equal(results[4], flex_attention(*qkv))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_bits(reentrant: bool) -> None:
    tensors = draw()

    def step(*given: Tensor) -> Tensor:
        *qkv, sink = given
        options: dict[str, Any] = {"enable_gqa": True, "dropout_p": 0.4, "sink": sink}
        once = flex_attention(*qkv, None, late, **options)
        found: Tensor = flex_attention(once, *qkv[1:], None, late, **options)
        return found

    gradients = []
    for run in (step, lambda *t: checkpoint(step, *t, use_reentrant=reentrant)):
        torch.manual_seed(1)
        gradients.append(torch.autograd.grad(run(*tensors).square().sum(), tensors)) if (
            run is step or not reentrant
        ) else gradients.append(_backward(run, tensors))
    for ours, true in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-12)


def _backward(run: Any, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Return gradients by `backward`, because reentrant checkpointing has no other way."""
    for t in tensors:
        t.grad = None
    run(*tensors).square().sum().backward()
    return tuple(t.grad for t in tensors if t.grad is not None)


def test_in_torch_compile() -> None:
    tensors = draw(torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(*given: Tensor) -> Any:
        *qkv, sink = given
        return flex_attention(
            *qkv, None, late, enable_gqa=True, return_lse=True, sink=sink, dropout_p=0.3
        )

    torch.manual_seed(3)
    found = compiled(*tensors)
    expected = attend(tensors)
    weights = [torch.randn_like(t) for t in expected]
    gradients = [torch.autograd.grad(x, tensors, weights) for x in (found, expected)]
    for ours, true in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        assert torch.equal(ours, true)


def test_without_data() -> None:
    qkv = [torch.empty(1, 2, 40, 16, device="meta") for _ in range(3)]
    assert flex_attention(*qkv, dropout_p=0.1).shape == (1, 2, 40, 16)


def test_in_the_drop_in_module() -> None:
    from attnkit import flex

    qkv = [torch.randn(1, 2, 40, 16) for _ in range(3)]
    results = []
    for function in (flex.flex_attention, flex_attention):
        torch.manual_seed(0)
        results.append(function(*qkv, dropout_p=0.2))
    assert torch.equal(*results)
    empty = torch.randn(1, 2, 0, 16)
    assert flex.flex_attention(qkv[0], empty, empty, dropout_p=0.2).abs().max() == 0
    with pytest.raises(OptionError, match="dropout_p"):
        flex.flex_attention(qkv[0], empty, empty, dropout_p=2.0)


@pytest.mark.parametrize(
    ("p", "error", "text"),
    [
        (1.5, OptionError, r"dropout_p must be in \[0, 1\), got 1.5"),
        ("x", ArgumentError, "dropout_p must be a number"),
    ],
)
def test_errors(p: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        attend(draw(), dropout_p=p)


def test_vmap_is_refused() -> None:
    qkv = torch.randn(3, 1, 2, 20, 8)
    with pytest.raises(UnsupportedError, match=r"dropout_p=0.1: torch cannot draw"):
        torch.func.vmap(lambda q: flex_attention(q, q, q, dropout_p=0.1))(qkv)


@pytest.mark.parametrize("wrong", [1.5, -0.1, math.nan])
def test_a_wrong_probability_that_changes_is_named_in_compiled_code(wrong: float) -> None:
    """Dynamo shows the error of attnkit, not one about its text."""
    torch._dynamo.reset()
    query = torch.randn(1, 2, 16, 8)
    function = lambda q, p: flex_attention(q, q, q, dropout_p=p)
    compiled = torch.compile(function, fullgraph=True, backend="eager", dynamic=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"dropout_p must be in \[0, 1\)"):
        compiled(query, wrong)
    compiled = torch.compile(function, backend="eager", dynamic=True)
    with pytest.raises(OptionError, match=rf"dropout_p must be in \[0, 1\), got {wrong}"):
        compiled(query, wrong)


def test_a_probability_that_compiled_code_would_round_is_named() -> None:
    torch._dynamo.reset()
    query = torch.randn(1, 2, 16, 8)
    compiled = torch.compile(
        lambda q, p: flex_attention(q, q, q, dropout_p=p), fullgraph=True, backend="eager"
    )
    for p in (0.1, 0.2, 0.3):  # from the second on it is a symbol
        compiled(query, p)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="dropout_p would be rounded to 0"):
        compiled(query, 1e-6)
