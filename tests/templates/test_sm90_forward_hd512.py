"""Compare the Hopper forward for head dims above 256 with the dense float64 oracle.

The kernels run on the CPU as in `test_sm90_forward`: in program order, in adversarial orders and
under the race detector.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import AuxRequest, flex_attention, masks

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit import emulation
from attnkit.schedule.kernel_table import kernels, padded_head_dims
from tests.sampling import sampled
from tests.templates.test_sm90_forward import BF16, FP16, MASKS, MODS, check, close, draw

WIDE, MLA = (512, 512), (576, 512)
DIMS = [
    (WIDE, BF16),  # each chunk of K has its own stage
    ((384, 384), FP16),  # two parts of 192 value columns
    (MLA, BF16),
    ((512, 256), BF16),
    ((264, 392), FP16),  # the last columns of the second part do not exist
    (MLA, FP16),  # the query tile leaves room for half of a block of K
    ((40, 512), BF16),  # stages that are computed at run time
    ((256, 264), BF16),
    ((512, 72), FP16),  # one part
]


@pytest.mark.parametrize(("dims", "dtype"), sampled(DIMS, 4))
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    check(draw(140, dims=dims, dtype=dtype, heads=(1, 1)), None, masks.causal())


SIDES = [(n, d) for n in ((129, 7), (1, 1), (7, 300), (193, 128)) for d in (WIDE, MLA)]


@pytest.mark.parametrize(("lengths", "dims"), sampled(SIDES, 8))
def test_lengths(lengths: tuple[int, int], dims: tuple[int, int]) -> None:
    """Chunks of keys beyond the end, and query heads that share a key head."""
    check(draw(*lengths, dims=dims, heads=(3, 1)))


@pytest.mark.parametrize("name", sampled([(n,) for n in MASKS], 9))
def test_masks(name: str) -> None:
    batch = (2, 2) if name == "by head and batch" else (1, 1)
    check(draw(300, 310, batch=batch, dims=WIDE), None, MASKS[name]())


MODDED = [(n, d) for n in ("alibi", "softcap", "relative bias", "all parts") for d in (WIDE, MLA)]


@pytest.mark.parametrize(("name", "dims"), sampled(MODDED, 8))
def test_mods(name: str, dims: tuple[int, int]) -> None:
    check(draw(140, 200, dims=dims), MODS[name](), masks.causal())


def test_a_value_for_each_score() -> None:
    """A load for each score halves the columns of a tile, so that a block has one chunk of V."""
    table = torch.randn(140, 200)
    check(
        draw(140, 200, dims=WIDE, heads=(1, 1)),
        lambda s, b, h, q, kv: s + table[q, kv],
        masks.causal(),
    )


def test_fully_masked_rows_and_maxima() -> None:
    """Both parts of the value columns are written, LSE and maxima by the first one only."""
    result = check(
        draw(200, dims=WIDE, heads=(1, 1)), None, lambda b, h, q, kv: q >= kv + 130, top=True
    )
    assert bool((result.out[:, :, :130] == 0).all())
    assert bool((result.lse[:, :, :130] == -math.inf).all())


@pytest.mark.parametrize("dims", sampled([(WIDE,), (MLA,)], 2))
def test_rows_that_are_split_along_kv(dims: tuple[int, int]) -> None:
    qkv = draw(75, 800, heads=(1, 1), dims=dims)
    result = check(qkv, None, lambda b, h, q, kv: (kv >= q * 10) & (q != 5), ctas=4)
    assert result.kernels == 2


def attend(tensors: list[Tensor], backend: str, **options: Any) -> tuple[Any, ...]:
    """Return the results of a causal call, with the gradient of a captured scale per head."""
    query, key, value, slope = tensors

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + slope[h] * (kv - q)

    out, aux = flex_attention(
        query, key, value, mod, masks.causal(), backend=backend, enable_gqa=True, **options
    )
    return (out, *(x for x in (aux.lse, aux.entropy) if x is not None))


OPTIONS: list[dict[str, Any]] = [
    {"sink": torch.tensor([0.5, -2.0]), "return_aux": AuxRequest(lse=True, entropy=True)},
    {"normalization": "sigmoid", "return_aux": AuxRequest()},
]


@pytest.mark.parametrize("options", sampled([(o,) for o in OPTIONS], 2))
def test_other_results(options: dict[str, Any]) -> None:
    """Sinks, entropies and weights without a softmax, and their gradients."""
    torch.manual_seed(3)
    drawn = [*draw(140, dims=(512, 264)), torch.tensor([0.1, 0.02])]
    results = []
    for backend, given in (
        ("emulate", drawn), ("eager", [t.double() for t in drawn]), ("eager", drawn),
    ):  # fmt: skip
        learned = [t.detach().requires_grad_() for t in given]
        with emulation.session(mode="check", seeds=1) as ran:
            found = attend(learned, backend, **options)
        assert ran.ok, "\n".join(str(report) for _, report in ran.reports)
        assert len(ran.reports) == (1 if backend == "emulate" else 0)
        with emulation.session(deterministic=False):
            gradients = torch.autograd.grad(found[0].float().sum(), learned)
        results.append(tuple(t.detach() for t in (*found, *gradients)))
    for i, (ours, exact, dense) in enumerate(zip(*results, strict=True)):
        close(f"result {i}", ours, exact, dense)


@pytest.mark.exhaustive
def test_dropout_drops_what_torch_operators_drop() -> None:
    query, key, value = draw(140, dims=WIDE, heads=(1, 1))
    found = []
    for backend in ("emulate", "cpu"):
        torch.manual_seed(5)
        found.append(flex_attention(query, key, value, dropout_p=0.4, backend=backend).double())
    assert (found[0] - found[1]).abs().max() < 2**-6 * found[1].abs().max()


@pytest.mark.parametrize(
    ("dims", "expected"),
    [(WIDE, (512, 256)), (MLA, (576, 256)), ((264, 264), (384, 192)), ((512, 72), (512, 96)),
     ((40, 512), (128, 256)), ((200, 384), (256, 192)), ((192, 128), (192, 128))],
)  # fmt: skip
def test_padding(dims: tuple[int, int], expected: tuple[int, int]) -> None:
    (kernel, *_) = kernels(*dims)
    assert kernel.value_parts == (2 if dims[1] > 256 else 1)
    assert padded_head_dims(dims, kernel.value_parts) == expected
