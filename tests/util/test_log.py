"""Check what attnkit logs, where, and that the fast path of repeated calls logs nothing."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest
import torch

import attnkit
from attnkit import masks
from attnkit.util import log


class Records(logging.Handler):
    """Collects the records of the logger `attnkit`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record)

    def texts(self, name: str, level: int | None = None) -> list[str]:
        """Return the messages of a room's logger, of one level if it is given."""
        return [r.getMessage() for r in self.found if r.name == name and level in (None, r.levelno)]


@pytest.fixture
def records() -> Iterator[Records]:
    """Collect everything that is logged, at DEBUG."""
    attnkit.clear_caches()
    logger, handler = logging.getLogger("attnkit"), Records()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.setLevel(before)
    logger.removeHandler(handler)


def tensors(**options: object) -> list[torch.Tensor]:
    return [torch.randn(1, 2, 32, 16, **options) for _ in "qkv"]  # type: ignore[call-overload]


def test_a_preparation_and_its_reuse_are_logged(records: Records) -> None:
    q, k, v = tensors()
    mask = masks.causal()
    attnkit.flex_attention(q, k, v, block_mask=mask)
    first, second = records.texts("attnkit.runtime", logging.DEBUG)
    shapes = "query [1, 2, 32, 16], key [1, 2, 32, 16], float32 on cpu, mask causal()"
    assert first == (
        f"no kernel runs a call, {shapes}: query is not on a CUDA device; torch operators over the "
        "tiles that the mask keeps"
    )
    assert second.startswith("prepared a call in ")
    assert second.endswith(f" ms, {shapes}: cpu")
    records.found.clear()
    attnkit.flex_attention(q, k, v, block_mask=mask)
    assert records.texts("attnkit.runtime") == [
        f"reused the preparation of an earlier call, {shapes}"
    ]


def test_the_fast_path_neither_logs_nor_asks(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = tensors()
    mask = masks.causal()
    for _ in range(2):
        attnkit.flex_attention(q, k, v, block_mask=mask)
    records.found.clear()
    asked = []
    real = logging.Logger.isEnabledFor
    monkeypatch.setattr(
        logging.Logger,
        "isEnabledFor",
        lambda self, level: bool(asked.append(self.name)) or real(self, level),
    )
    attnkit.flex_attention(q, k, v, block_mask=mask)
    assert records.found == []
    assert asked == []
    attnkit.flex_attention(q, k, v, block_mask=masks.causal(), scale=0.5)
    assert "attnkit.runtime" in asked  # the test above can see it


def test_a_call_without_a_key_says_why(records: Records) -> None:
    class Settings:
        factor = 2.0

    settings = Settings()
    q, k, v = tensors()

    def mod(score, b, h, i, j):  # type: ignore[no-untyped-def]
        return score * settings.factor

    for _ in range(2):
        attnkit.flex_attention(q, k, v, mod)
    (told,) = records.texts("attnkit.runtime", logging.INFO)  # the second time at DEBUG
    assert told.startswith("a call is prepared again each time, query [1, 2, 32, 16]")
    assert told.endswith("a random number or a setting")
    assert "score_mod mod: the score_mod reads something that may change unseen" in told
    records.found.clear()
    attnkit.flex_attention(q, k, v, kernel_options={"BLOCK_M": 64, "BLOCK_N": 64})
    (told,) = records.texts("attnkit.runtime", logging.INFO)
    assert told.endswith("kernel_options or an option of another type than the usual one")


def test_a_gpu_call_in_torch_operators_is_told_at_info(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnkit.runtime import prepare
    from attnkit.schedule.plan import Plan

    call = types.SimpleNamespace(
        query=types.SimpleNamespace(is_cuda=True), described=lambda: "query [1]"
    )
    for _ in range(2):
        prepare._log_torch_operators(call, Plan("cpu", reason="head dims"))  # type: ignore[arg-type]
    levels = [(r.levelname, r.getMessage()) for r in records.found]
    message = "no kernel runs a call, query [1]: head dims"
    assert levels == [("INFO", message), ("DEBUG", message)]


def test_a_backward_in_torch_operators_says_why(records: Records) -> None:
    pytest.importorskip("cutlass")
    from attnkit.splice import backward
    from attnkit.splice.kernel_call import BackwardInputs, Captured, KernelCall
    from attnkit.splice.program import Program

    q, k, v = tensors(dtype=torch.bfloat16)
    lse = torch.zeros(1, 2, 32)
    inputs = BackwardInputs(q, k, v, q, lse, q, None, Captured((), ()), [], 0.25)
    call = KernelCall("sm90", Program(None, None), None)
    assert backward.reason_against(call, inputs) == "the query is not on a CUDA device"
    emulated = KernelCall("emulate:sm90", Program(None, None), None)
    assert backward.reason_against(emulated, inputs) == ""
    attnkit.splice.run_backward(call, inputs)
    assert records.texts("attnkit.splice", logging.INFO) == [
        "torch operators compute the backward of the sm90 kernel: the query is not on a CUDA device"
    ]


def test_copies_for_tma_are_told(records: Records) -> None:
    pytest.importorskip("cutlass")
    from attnkit.jit import emulation

    whole = torch.randn(3, 1, 1, 64, 20, dtype=torch.bfloat16)
    q, k, v = whole[..., 1:17]  # rows of 20 numbers, 40 bytes
    with emulation.session(execute=False):
        attnkit.flex_attention(q, k.contiguous(), v, backend="emulate")
    told = [t for t in records.texts("attnkit.splice", logging.INFO) if "copies" in t]
    assert [t.partition(" its ")[2].split()[0] for t in told] == ["query", "value"]
    assert "query [1, 1, 64, 16] with strides [1280, 1280, 20, 1] before the kernel" in told[0]


PROGRAM = """
import logging, sys
{before}
import torch, attnkit
q, k, v = torch.randn(3, 1, 1, 8, 4)
attnkit.flex_attention(q, k, v)
print([type(h).__name__ for h in logging.getLogger("attnkit").handlers])
print("attnkit.util.log" in sys.modules)
"""


def run(value: str | None, before: str = "") -> tuple[list[str], str]:
    """Run the program with ATTNKIT_LOG; return the lines of stdout, and stderr."""
    env = {k: v for k, v in os.environ.items() if k != "ATTNKIT_LOG"}
    if value is not None:
        env["ATTNKIT_LOG"] = value
    command = [sys.executable, "-c", PROGRAM.format(before=before)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=True)
    return done.stdout.splitlines(), done.stderr


def test_nothing_is_written_without_the_variable() -> None:
    out, err = run(None)
    assert out == ["['NullHandler']", "False"]
    assert err == ""


def test_the_variable_writes_to_stderr() -> None:
    out, err = run("Debug")
    assert out == ["['NullHandler', 'StreamHandler']", "True"]
    assert "attnkit.runtime: prepared a call in " in err
    assert run("info")[1] == ""  # a CPU call in torch operators is what one expects


@pytest.fixture
def logger_of_attnkit() -> Iterator[logging.Logger]:
    """Return attnkit's logger, whose settings are restored."""
    logger = logging.getLogger("attnkit")
    level, handlers = logger.level, logger.handlers[:]
    yield logger
    logger.setLevel(level)
    logger.handlers[:] = handlers


def test_lines_of_stderr(
    logger_of_attnkit: logging.Logger,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ATTNKIT_LOG", " Info ")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # those of pytest
    log.to_stderr()
    assert logger_of_attnkit.level == logging.INFO
    logging.getLogger("attnkit.jit").info("compiled %d kernels", 2)
    logging.getLogger("attnkit.jit").debug("too much detail")
    assert capsys.readouterr().err == "attnkit.jit: compiled 2 kernels\n"
    logging.getLogger().addHandler(logging.NullHandler())
    logging.getLogger("attnkit.jit").info("the program's own handlers write this")
    assert capsys.readouterr().err == ""


def test_a_level_that_is_none_is_named(
    logger_of_attnkit: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = logger_of_attnkit.handlers[:]
    monkeypatch.setenv("ATTNKIT_LOG", "loud")
    message = "ATTNKIT_LOG='loud' is ignored; expected info or debug"
    with pytest.warns(RuntimeWarning, match=message):
        log.to_stderr()
    assert logger_of_attnkit.handlers == handlers


def test_a_program_that_logs_gets_no_second_copy() -> None:
    _, err = run("debug", "logging.basicConfig(format='mine %(message)s')")
    assert err.count("prepared a call in ") == 1
    assert "mine prepared a call in " in err


def test_another_value_is_told() -> None:
    _, err = run("loud")
    assert "ATTNKIT_LOG='loud' is ignored; expected info or debug" in err
    assert "prepared" not in err


def test_once_forgets_the_oldest(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_MOST", 2)
    logger = logging.getLogger("attnkit.util")
    for text in ("a", "b", "a", "c", "a"):
        log.once(logger, text)
    assert records.texts("attnkit.util", logging.INFO) == ["a", "b", "c", "a"]
    assert records.texts("attnkit.util", logging.DEBUG) == ["a"]
