"""Check `attnkit bench`: what it compares, what it says of peers, and how it measures."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attnkit
from attnkit import Variant, masks, mods
from attnkit.cli import main
from attnkit.testing import Case, contenders, contest
from attnkit.testing.contenders import Attention, CannotRunError, Problem, sdpa
from attnkit.testing.contest import Contest, measure
from attnkit.testing.timing import Times, in_turns, method

SMALL = Case(40, 40, 1, 2, 2, head_dim=8, value_dim=8)
CPU = torch.device("cpu")
learned = torch.rand(4, requires_grad=True)


def slopes(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score - learned[h] * (q - kv).abs()


def squared(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score * score.abs()


@pytest.fixture(autouse=True)
def _without_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace Inductor by a function that says so: it takes half a minute on a CPU."""
    real: Any = torch.compile

    def compile_(function: Callable[..., object], **options: Any) -> Callable[..., object]:
        if "backend" in options:  # FlexAttention's eager function, which compiles nothing
            return real(function, **options)  # type: ignore[no-any-return]

        def fails(*arguments: object, **options: object) -> None:
            raise RuntimeError("no compiler\nand a long story")

        return fails

    monkeypatch.setattr(torch, "compile", compile_)


def run(
    variant: Variant, case: Case = SMALL, *, backward: bool = False, rounds: int = 2
) -> Contest:
    return measure(Problem(variant, case, CPU, backward), rounds=rounds, seconds=1)


def test_every_contender_is_compared_and_timed() -> None:
    found = run(Variant(mods.alibi(2), masks.causal()))
    assert found.ok
    ours, compiled, eager, dense = found.standings
    assert [s.name for s in found.standings] == list(contenders.CONTENDERS)
    for standing in (ours, eager, dense):
        assert 0 < standing.error <= 1
        assert standing.worst == "out"
        assert standing.forward is not None
        assert len(standing.forward.rounds) == 2
        assert standing.both is None
    assert compiled.forward is None
    assert compiled.reason == "RuntimeError: no compiler"
    text = str(found)
    assert "FlexAttention, compiled   cannot run: RuntimeError: no compiler\n" in text
    assert "method: medians of rounds in which all run in turns" in text
    assert "at q_len 40, kv_len 40, cpu" in text
    assert "forward and backward" not in text
    assert "WRONG" not in text


def test_gradients_are_compared_and_timed() -> None:
    found = run(Variant(slopes, masks.causal()), backward=True)
    ours, _, eager, dense = found.standings
    assert ours.both is not None
    assert 0 < ours.error <= 1
    assert dense.no_backward == "its bias is a constant here, and the score_mod learns learned"
    assert dense.forward is not None
    assert eager.forward is not None  # the forward alone still has a time
    assert eager.both is None
    assert "does not support backward on CPU" in eager.no_backward
    text = str(found)
    assert "FlexAttention, eager has no backward here: NotImplementedError" in text
    assert "error: largest error of output and gradients" in text


def test_what_cannot_run_is_named_once() -> None:
    text = str(run(Variant(squared), backward=True))
    assert "SDPA                      cannot run: the score_mod is more than a bias" in text
    assert "SDPA has no backward here" not in text


@pytest.mark.parametrize(
    ("variant", "case", "reason"),
    [
        (Variant(squared), SMALL, "the score_mod is more than a bias"),
        (Variant(mods.softcap(5.0), masks.causal()), SMALL, "the score_mod is more than a bias"),
    ],
)
def test_sdpa_says_what_it_has_not(variant: Variant, case: Case, reason: str) -> None:
    with pytest.raises(CannotRunError, match=reason):
        sdpa(Problem(variant, case, CPU, False))


@pytest.mark.parametrize("lengths", [(40, 40), (40, 56)])
def test_sdpa_computes_masks_and_biases(lengths: tuple[int, int]) -> None:
    case = dataclasses.replace(SMALL, q_len=lengths[0], kv_len=lengths[1], heads=4, kv_heads=2)
    for variant in (
        Variant(),
        Variant(None, masks.causal()),
        Variant(None, masks.sliding_window(9)),
        Variant(slopes, masks.causal()),
        Variant(mods.alibi(4)),
    ):
        problem = Problem(variant, case, CPU, False)
        q, k, v = (t.detach() for t in problem.inputs)
        expected = variant(q, k, v, enable_gqa=True)
        torch.testing.assert_close(sdpa(problem)(q, k, v), expected)


def test_wrong_results_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(p: Problem) -> Attention:
        right = sdpa(p)
        return lambda q, k, v: 2 * right(q, k, v)

    monkeypatch.setitem(contenders.CONTENDERS, "SDPA", doubled)
    found = run(Variant(None, masks.causal()))
    assert found.ok  # attnkit's own result is right
    assert found.standings[-1].error > 100
    assert "SDPA is WRONG or too far: out has " in str(found)
    monkeypatch.setitem(contenders.CONTENDERS, contenders.OURS, doubled)
    assert not run(Variant(None, masks.causal())).ok


def test_a_fully_masked_row_is_wrong_as_nan_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def nan(p: Problem) -> Attention:
        return lambda q, k, v: q * torch.nan

    monkeypatch.setitem(contenders.CONTENDERS, "SDPA", nan)
    found = run(Variant(None, lambda b, h, q, kv: q > kv))
    assert found.standings[0].error <= 1
    assert found.standings[-1].error == torch.inf
    assert "SDPA is WRONG" in str(found)


def test_results_are_compared_at_lengths_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "_SHORTEST", 16)
    room = 2 * contest._COPIES * 4 * 2 * 20 * 20
    monkeypatch.setattr(contest, "free_memory", lambda device: room)
    found = run(Variant(None, masks.causal()))
    assert found.compared == "q_len 20, kv_len 20, cpu"
    assert found.standings[0].forward is not None
    assert 0 < found.standings[0].error <= 1
    natten = Variant(None, masks.natten((8, 5), 3))  # for 40 positions only
    found = run(natten)
    assert found.compared.startswith("not compared: dense float64 attention does not fit in memory")
    assert "at shorter lengths the variant is refused" in found.compared
    assert found.standings[0].forward is not None
    assert "-      " in str(found).splitlines()[4]
    monkeypatch.setattr(contenders, "free_memory", lambda device: 1.0)
    found = run(Variant(None, masks.sliding_window(3)))
    for standing in found.standings[2:]:
        assert "more than half of the memory" in standing.reason


def test_times_in_turns() -> None:
    called: list[str] = []
    functions = {name: (lambda name=name: called.append(name)) for name in "ab"}
    times = in_turns(functions, CPU, rounds=3, seconds=60)
    assert called == list("abbaab")
    assert all(len(t.rounds) == 3 for t in times.values())
    called.clear()
    in_turns(functions, CPU, rounds=50, seconds=0)
    assert len(called) == 10
    times = Times((0.001, 0.002, 0.004, 0.0035, 1.5))
    assert times.median == 0.0035
    assert str(times) == "3.5 (1.4-902) ms"


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "my_model.py"
    file.write_text("def mod(score, b, h, q, kv):\n    return score - (q - kv) * (h + 1)\n")
    options = "--length 48 --heads 4 --kv-heads 2 --head-dim 16 --rounds 2 --backward --device cpu"
    arguments = ["bench", f"{file}:mod", "--mask", "masks:causal", "--batch", "2"]
    assert main([*arguments, "--dtype", "bfloat16", *options.split()]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    first, score, mask, sizes, *_ = out.splitlines()
    assert first.startswith(f"attnkit {attnkit.__version__}, torch {torch.__version__}, ")
    assert score.startswith("score(")
    assert mask == "mask(b, h, q, kv) = kv <= q"
    assert sizes == (
        "query [2, 4, 48, 16], key [2, 2, 48, 16], value [2, 2, 48, 16], bfloat16, cpu"
    )
    assert "attnkit's plan: cpu: query is not on a CUDA device" in out
    assert "method: " in out


def test_the_command_refuses_pytorchs_block_mask(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "my.py"
    file.write_text(
        "import attnkit\nblocks = attnkit.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, "
        "32, 32)\ntheirs = blocks.to_flex()\n"
    )
    assert main(["bench", f"{file}:theirs", "--length", "32", "--device", "cpu"]) == 2
    assert "the mask is PyTorch's BlockMask, whose block lists" in capsys.readouterr().err
    assert main(["bench", f"{file}:blocks", "--rounds", "1", "--device", "cpu"]) == 0
    assert "query [1, 1, 32, 64]" in capsys.readouterr().out


def test_times_on_a_gpu_come_from_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a pretended GPU advances by 1 ms a call, and the host waits for it."""
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = done.count("call")

        def elapsed_time(self, end: Event) -> float:
            assert done[-1] == "wait"
            return float(end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("wait"))
    cuda = torch.device("cuda")
    times = in_turns({"f": lambda: done.append("call")}, cuda, rounds=3, seconds=60)
    assert times["f"].rounds == pytest.approx((1e-3,) * 3)
    assert done.count("call") == 3 + 3 * 2  # 3 to see how many fill 2 ms, then 2 a round
    assert "CUDA events" in method(cuda)
