"""Check that a signal during a compilation takes effect after the compilation, once."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from attnkit.jit.held_signals import held_signals

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_an_interrupt_is_raised_after_the_block() -> None:
    done = []

    @held_signals()
    def work() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append(1)
        signal.raise_signal(signal.SIGINT)
        done.append(2)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_is_raised_once() -> None:
    calls = []

    def count(number: int, frame: FrameType | None) -> None:
        calls.append(number)

    signal.signal(signal.SIGINT, count)
    with held_signals(), held_signals():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert calls == []
    assert calls == [signal.SIGINT]
    signal.raise_signal(signal.SIGINT)
    assert calls == [signal.SIGINT] * 2


def test_every_signal_acts_though_one_handler_raises() -> None:
    calls = []
    signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))

    @held_signals()
    def work() -> None:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert calls == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_comes_before_an_error_of_the_block() -> None:
    @held_signals()
    def work() -> None:
        signal.raise_signal(signal.SIGINT)
        raise ZeroDivisionError

    with pytest.raises(KeyboardInterrupt):
        work()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signals_that_python_does_not_handle_stay_as_they_are() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with held_signals():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_other_threads_hold_nothing() -> None:
    seen = []

    def work() -> None:
        with held_signals():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


# Sends itself a Ctrl-C during a compilation, then requests the kernel again.
COMPILE = """
import os, signal
from attnkit.jit import kernel
from attnkit.jit.disk_cache import KernelCache
kernel._sources = lambda: "unchanged"
steps = []

def build():
    from tests.jit import compiled_kernels
    os.kill(os.getpid(), signal.SIGINT)
    steps.append("built")
    return compiled_kernels.affine()

source = kernel.Source("interrupted", "sm_90a", build)
try:
    kernel.kernel(source)
    print("swallowed")
except KeyboardInterrupt:
    print("interrupted after", *steps)
print("stored", KernelCache().get(kernel.full_key(source)) is not None)
print("linked", bool(kernel.kernel(source).artifact.image), *steps)
"""


def test_an_interrupted_compilation_ends_first_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cutlass")
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = ["interrupted after built", "stored True", "linked True built"]
    assert done.stdout.splitlines() == said
