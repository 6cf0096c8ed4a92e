"""Check that `explain` describes what a variant computes and how it would run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnkit
from attnkit import UnsupportedError, Variant, explain
from attnkit.errors import ConflictError
from attnkit.schedule.plan import has_dsl

SLOPES = torch.rand(4)
IDS = torch.arange(4096) // 300


def alibi(s: object, b: object, h: object, q: object, kv: object) -> object:
    return s + SLOPES[h] * (kv - q)  # type: ignore[index,operator]


def unproven(s: object, b: object, h: object, q: object, kv: object) -> object:
    same = IDS[q] == IDS[kv]  # type: ignore[index]
    return s + IDS[torch.where(same, q - kv, 0) * 12]  # type: ignore[call-overload,operator]


def document(b: object, h: object, q: object, kv: object) -> object:
    return (q >= kv) & (IDS[q] == IDS[kv])  # type: ignore[index,operator]


def test_report() -> None:
    found = explain(alibi, document, q_len=4096, heads=4)
    report = str(found)
    for part in (
        "score(score, b, h, q, kv) = score + SLOPES[h] * f32(kv - q)",
        "mask(b, h, q, kv) = (kv <= q) & (IDS[q] == IDS[kv])",
        "d score' / d score = 1",
        "d SLOPES[h] = grad * f32(kv - q)",
        "head       1 ops   SLOPES[h]",
        "row        1 ops   IDS[q]",
        "column     1 ops   IDS[kv]",
        "linear in the score: factor 1.0, bias SLOPES[h] * f32(kv - q)",
        "B=1 H=4 Sq=4096 Skv=4096",
        "shared by batch and heads",
        "template cpu",
        "tiles    128 x 128",
    ):
        assert part in report
    assert found.runs is not None
    empty, partial, full = found.runs.counts()
    assert empty + partial + full == 32 * 32
    assert f"{empty} empty, {partial} partial, {full} full of 1024" in report


def test_nothing_to_explain() -> None:
    report = str(explain(q_len=64))
    assert "no score_mod, no mask" in report
    assert "all tiles full" in report


def test_variant_and_other_lengths() -> None:
    variant = Variant(lambda s, b, h, q, kv: torch.tanh(s), lambda b, h, q, kv: q >= kv)
    report = str(explain(variant, q_len=10, kv_len=300, batch=2, backend="eager"))
    assert "Sq=10 Skv=300" in report
    assert "template eager" in report
    assert "1 - tanh" in report.replace("  ", " ") or "tanh" in report


def test_plan_is_that_of_the_operator() -> None:
    for backend in ("cute", "emulate"):
        with pytest.raises(UnsupportedError, match="computes bfloat16 and float16, the query is f"):
            explain(alibi, q_len=64, heads=4, backend=backend, dtype=torch.float32)
    if has_dsl():
        assert explain(alibi, q_len=64, heads=4, backend="emulate").plan.template == "emulate:sm90"
        with pytest.raises(UnsupportedError, match="could not be proven to stay inside it"):
            explain(unproven, q_len=600, backend="emulate")


def test_errors_are_those_of_the_operator() -> None:
    with pytest.raises(attnkit.OptionError, match="q_len must be a positive int"):
        explain(alibi, q_len=0)
    with pytest.raises(attnkit.BoundsError, match="IDS"):
        explain(alibi, document, q_len=8192, heads=4)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"normalization": "softmax1"}, ["weight = exp(s) / (1 + sum(exp(s)))"]),
        ({"normalization": "sigmoid"}, ["d weight / d s = weight * (1 - weight)"]),
        ({"normalization": "none"}, ["weight = s, 0 where masked"]),
        ({"sink": torch.zeros(4)}, ["weight = exp(s) / (exp(sink[h]) + sum(exp(s)))"]),
        (
            {"dropout_p": 0.1},
            ["weight = exp(s) / sum(exp(s))", "probability 26/256, or else multiplied by 256/230"],
        ),
        (
            {"dropout_p": 0.5, "normalization": "none"},
            ["weight = s, 0 where masked", "probability 128/256"],
        ),
        (
            {"return_aux": attnkit.AuxRequest(entropy=True, column_sums=True)},
            ["entropy: of the same pass", "column_sums: a second pass over the tiles, one more"],
        ),
    ],
)
def test_what_makes_the_weights(options: dict[str, Any], parts: list[str]) -> None:
    before = torch.random.get_rng_state()
    report = str(explain(alibi, document, q_len=512, heads=4, **options))
    assert all(part in report for part in parts)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert "\nweights\n" not in str(explain(alibi, document, q_len=512, heads=4))


def test_the_plan_follows_the_weights() -> None:
    """Tile sizes and the program are those of the call, as far as a kernel has others for it."""
    if not has_dsl():
        pytest.skip("no kernel without the DSL")
    options: dict[str, Any] = {"q_len": 512, "head_dim": 256, "backend": "emulate"}
    plain, dropped = (explain(**options, dropout_p=p).plan.block for p in (0.0, 0.5))
    assert plain != dropped
    sigmoid = explain(**options, normalization="sigmoid")
    assert sigmoid._program.score is not None
    assert "softmax" not in sigmoid.formula


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"normalization": "max"}, attnkit.OptionError, "normalization must be one of"),
        ({"dropout_p": 1.0}, attnkit.OptionError, r"dropout_p must be in \[0, 1\)"),
        ({"sink": torch.zeros(3)}, attnkit.ShapeError, r"sink has shape \(3,\); expected \(4,\)"),
        ({"sink": torch.zeros(4), "normalization": "sigmoid"}, ConflictError, "denominator"),
        ({"normalization": "none", "arch": "sm_90a"}, attnkit.OptionError, "leave arch out"),
        (
            {"normalization": "none", "return_aux": attnkit.AuxRequest(lse=True)},
            attnkit.OptionError,
            "asks for a statistic of a softmax",
        ),
    ],
)
def test_weights_that_no_call_has(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        explain(alibi, q_len=64, heads=4, **options)


def test_tables_by_distance() -> None:
    """The report lists what a GPU kernel reads from tables, and from which size on."""
    bias = torch.rand(4, 8)
    mod = lambda s, b, h, q, kv: s + bias[h, (q - kv).clamp(0, 7)]
    table = "table[h, q - kv] = bias[h, min(max(q - kv, 0), 7)]"
    small, large = (explain(mod, q_len=n, heads=4).staging for n in (512, 2048))
    assert f"once per distance, in calls of 16777216 scores or more:\n  {table}" in small
    assert f"once per distance:\n  {table}" in large
    assert "once per distance" not in explain(alibi, q_len=2048, heads=4).staging
