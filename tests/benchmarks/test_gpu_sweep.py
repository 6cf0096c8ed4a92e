"""Check that each contender of the GPU benchmark is timed with its fastest setting."""

from __future__ import annotations

import importlib
import signal
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as flex

gpu_contenders = importlib.import_module("gpu_contenders")
gpu_sweep = importlib.import_module("gpu_sweep")
gpu_timing = importlib.import_module("gpu_timing")
gpu_variants = importlib.import_module("gpu_variants")

FOLDER = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")


class Clockwork:
    """Timer that takes the milliseconds from the function, and records the order."""

    def __init__(self) -> None:
        self.measured: list[float] = []

    def prepare(self, function: Any) -> float:
        return float(function.ms)

    def measure(self, function: Any, prepared: float) -> Any:
        self.measured.append(prepared)
        return gpu_timing.Reading(prepared, 1.5)


def setting(ms: float, error: float = 0.001, seconds: Callable[[], None] = lambda: None) -> Any:
    """Return a builder of a contender.

    Args:
        ms: time of its function.
        error: error of its result.
        seconds: called while it is built.
    """

    def build(p: Any) -> Any:
        seconds()

        def function() -> list[float]:
            return [error]

        function.ms = ms  # type: ignore[attr-defined]
        return SimpleNamespace(directed=lambda grad: function, shown=lambda t: t)

    return build


def refusing(error: Exception) -> Any:
    def build(p: Any) -> Any:
        raise error

    return build


def checked(found: list[float]) -> Any:
    return SimpleNamespace(error=found[0], allowed=0.01)


checked.backward = False  # type: ignore[attr-defined]


def prepare(seconds: float = 60, **contenders: Any) -> tuple[Any, Any, Clockwork]:
    p: Any = SimpleNamespace(dropout_p=0.0, query=torch.zeros(1), grad=None)
    timer = Clockwork()
    sweeper = gpu_sweep.Sweeper(p, checked, timer, seconds)
    named = {name.replace("_", " "): settings for name, settings in contenders.items()}
    return *sweeper.prepare(named), timer


def test_the_fastest_setting_takes_part() -> None:
    runs, known, timer = prepare(peer={"default": setting(3), "a": setting(1), "b": setting(2)})
    assert runs["peer"].ms == 1
    assert known["peer"] == {
        "error": 0.001,
        "error_allowed": 0.01,
        "setting": "a",
        "settings": {"default": 3.0, "a": 1.0, "b": 2.0},
    }
    assert timer.measured == [3, 1, 2, *(3, 1, 2, 2, 1, 3, 3, 1, 2)]  # one to warm up, in turns


def test_a_single_setting_is_not_probed() -> None:
    runs, known, timer = prepare(attnkit={"default": setting(3)})
    assert (known["attnkit"]["setting"], known["attnkit"]["settings"]) == ("default", {})
    assert list(runs) == ["attnkit"]
    assert timer.measured == []


def test_a_fast_setting_that_is_wrong_or_raises_is_left_out() -> None:
    runs, known, _ = prepare(
        peer={
            "default": setting(3),
            "wrong": setting(1, error=0.5),
            "nan": setting(1, error=float("nan")),
            "raises": refusing(ValueError("no such block\nmore")),
            "refuses": refusing(gpu_contenders.Unsuitable("no heads")),
            "b": setting(2),
        }
    )
    assert runs["peer"].ms == 2
    row = known["peer"]
    assert (row["setting"], row["settings"]) == ("b", {"default": 3.0, "b": 2.0})
    assert row["settings_left_out"] == {
        "wrong": "wrong: 5.0e-01 off, 5.0e-02 allowed",
        "nan": "wrong: nan off, 5.0e-02 allowed",
        "raises": "ValueError: no such block",
        "refuses": "no heads",
    }
    assert "skipped" not in row


def test_a_peer_whose_default_fails_takes_part_with_another_setting() -> None:
    runs, known, _ = prepare(peer={"default": refusing(ValueError("x")), "a": setting(1)})
    assert runs["peer"].ms == 1
    assert (known["peer"]["setting"], known["peer"]["settings"]) == ("a", {})


def test_a_contender_without_a_setting_says_why() -> None:
    runs, known, _ = prepare(
        peer={"default": refusing(ValueError("first")), "a": refusing(ValueError("second"))},
        attnkit={"default": setting(1, error=0.02)},
        attnkit_deterministic={"default": refusing(ValueError("x"))},
    )
    assert runs == {}
    assert known["peer"] == {"skipped": "ValueError: first"}
    assert known["attnkit"]["failed"]  # the allowed 5 % error is for peers only
    assert known["attnkit deterministic"] == {"skipped": "ValueError: x", "failed": True}


def test_settings_beyond_the_time_limit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(gpu_sweep, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def slow() -> None:
        clock.now += 40

    several = {name: setting(ms, seconds=slow) for name, ms in (("default", 3), ("a", 2), ("b", 1))}
    runs, known, _ = prepare(60, peer=several, other=several)
    for name in ("peer", "other"):  # each has a limit of its own
        assert runs[name].ms == 2
        assert known[name]["settings_left_out"] == {"b": "not tried within 60 s"}


def test_a_slow_setting_is_stopped_and_the_default_is_not() -> None:
    ended: list[str] = []

    def busy() -> None:
        for _ in range(2000):
            try:
                time.sleep(0.01)
            except Exception:  # as a compiler that tries its choices
                continue
        ended.append("busy")

    def patient() -> None:
        time.sleep(0.2)
        ended.append("patient")

    before = signal.getsignal(signal.SIGALRM)
    settings = {"default": setting(3, seconds=patient), "late": setting(2)}
    _, known, _ = prepare(0.1, peer=settings)
    assert known["peer"]["settings_left_out"] == {"late": "not tried within 0.1 s"}
    _, known, _ = prepare(0.5, peer={"default": setting(3), "slow": setting(1, seconds=busy)})
    assert known["peer"]["settings_left_out"] == {"slow": "not ready within 0.5 s"}
    assert known["peer"]["setting"] == "default"
    assert ended == ["patient"]
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def small(case: dict[str, Any]) -> Any:
    cases = tomllib.loads((FOLDER / "gpu_cases.toml").read_text())
    shape = gpu_variants.Shape.of(cases["shape"])
    shape = replace(shape, batch=1, heads=2, kv_heads=2, length=64, head_dim=16, value_dim=16)
    return gpu_variants.problem({"name": "x"} | case, shape, CPU, False)


def test_settings_of_flex_attention_compile_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each setting of FlexAttention has its own compile cache.

    There are more settings than torch's limit of recompiles allows for one function.
    """
    compiled, seen = torch.compile, []

    def compile_eagerly(function: Any, *, mode: Any, **options: Any) -> Any:
        def backend(graph: Any, inputs: Any) -> Any:
            seen.append((function.__code__, mode))
            return graph

        return compiled(function, backend=backend, **options)

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", compile_eagerly)
    p = small({"mask": "causal", "score": "alibi"})
    names = [*gpu_contenders.CONTENDERS["Flex Triton"].values()]
    runs = [build(p) for build in names]
    # torch's own patch: monkeypatch restores by `del`, which hides the setting from torch as well
    with torch._dynamo.config.patch(recompile_limit=2):
        first = [run.call() for run in runs]
        again = [run.call() for run in reversed(runs)]
    assert len(seen) == len(runs) == len({id(code) for code, _ in seen}) == 4  # no second compile
    assert [mode for _, mode in seen] == [None, None, *[gpu_contenders.AUTOTUNE] * 2]
    for out in (*first, *again):
        torch.testing.assert_close(out, first[0])
    assert all(code is not flex.flex_attention.__code__ for code, _ in seen)


def test_flex_attention_gets_blocks_where_it_has_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_contenders, "_flash_attention_4", SimpleNamespace)
    seen, create = [], flex.create_block_mask

    def noted(*args: Any, **options: Any) -> Any:
        mask = create(*args, **options)
        seen.append(mask.BLOCK_SIZE)
        return mask

    monkeypatch.setattr(flex, "create_block_mask", noted)
    p = small({"mask": "causal"})
    for name in ("Flex Triton", "Flex FLASH"):
        for build in gpu_contenders.CONTENDERS[name].values():
            build(p)
    assert seen == [(128, 128), (64, 64), (128, 128), (64, 64), (128, 128), (256, 128), (64, 128)]
    whole = small({})
    with pytest.raises(gpu_contenders.Unsuitable, match="no block mask"):
        gpu_contenders.CONTENDERS["Flex FLASH"]["blocks 256x128"](whole)
    gpu_contenders.CONTENDERS["Flex FLASH"]["default"](whole)


def test_flash_attention_packs_heads_where_they_are_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def flash(q: Any, k: Any, v: Any, **options: Any) -> Any:
        seen.append(options)
        return q, None

    interface = SimpleNamespace(flash_attn_func=flash, flash_attn_varlen_func=flash)
    monkeypatch.setattr(gpu_contenders, "_flash_attention_4", lambda: interface)
    settings = gpu_contenders.CONTENDERS["FlashAttention-4"]
    alone = small({"mask": "causal"})
    for name in ("pack_gqa", "no pack_gqa"):
        with pytest.raises(gpu_contenders.Unsuitable, match="none are shared"):
            settings[name](alone)
    shape = replace(alone.shape, kv_heads=1)
    shared = gpu_variants.problem({"name": "x", "mask": "causal"}, shape, CPU, False)
    for build in settings.values():
        build(shared).call()
    assert [options.get("pack_gqa") for options in seen] == [None, True, False]


@pytest.mark.parametrize("backward", [False, True])
def test_dropout_is_compared_with_the_bits_of_attnkit(backward: bool) -> None:
    """Other contenders drop other elements, so that their results are not compared."""
    p = small({"mask": "causal", "dropout_p": 0.3})
    p = p.for_backward() if backward else p
    sweeper = gpu_sweep.Sweeper(p, gpu_sweep.Check(p, backward), Clockwork(), 10)
    ours = partial(gpu_contenders.attnkit_run, backend="cpu")
    _, row = sweeper._checked("attnkit", ours)
    assert 0 < row["error"] <= row["error_allowed"]
    fused = replace(p, query=p.query * 1.5)  # another result
    _, row = sweeper._checked("peer", lambda _: ours(fused))
    assert row == {"error": None, "error_allowed": None}
    sweeper = replace(sweeper, p=replace(p, dropout_p=0.0))
    _, row = sweeper._checked("attnkit", ours)
    assert "skipped" in row
