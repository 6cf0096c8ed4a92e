"""Check compiled kernels on a GPU: streams, threads, devices, graphs, more than 2^31 elements."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass")

from attnkit.errors import DeviceError
from attnkit.jit import kernel as compiled
from attnkit.jit.kernel import Build, CompiledKernel, Source
from attnkit.util import caches
from tests.jit import compiled_kernels as kernels


def arch() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}" + "a" * (major >= 9)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> CompiledKernel:
    """Return the affine kernel, loaded from the disk cache."""

    def build() -> Build:
        return kernels.affine(3.0)

    source = Source("affine on a GPU", arch(), build)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        compiled.kernel(source)
        compiled._kernels.pop(source)
        return compiled.kernel(source)


def _operands(n: int, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    x = torch.randn(n, 8, device=device)
    y = torch.full((n, 8), float("nan"), device=device)
    return x, y, torch.randn(n, device=device), torch.randn(n, device=device)


def _want(x: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    return 2 * x[:, 0] + 3 + c + d


def test_a_kernel_runs_and_runs_again(kernel: CompiledKernel) -> None:
    for n in (1, 300, 70_000):
        x, y, c, d = _operands(n)
        kernel(x, y, c, d, 2.0, n)
        assert torch.allclose(y[:, 0], _want(x, c, d))
        assert y[:, 1:].isnan().all()


def test_it_runs_on_the_current_stream_and_waits_for_nothing(kernel: CompiledKernel) -> None:
    x, y, c, d = _operands(5000)
    kernel(x, y, c, d, 2.0, 5000)
    torch.cuda.synchronize()
    x.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        x.fill_(1.0)  # the kernel sees it only if it comes after, on this stream
        kernel(x, y, c, d, 2.0, 5000)
        assert not stream.query()
    stream.synchronize()
    assert torch.allclose(y[:, 0], 5 + c + d)


def test_a_new_thread_can_launch(kernel: CompiledKernel) -> None:
    x, y, c, d = _operands(300)
    torch.cuda.synchronize()

    def launch() -> None:
        kernel(x, y, c, d, 2.0, 300)
        torch.cuda.synchronize()

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert torch.allclose(y[:, 0], _want(x, c, d))


def test_a_graph_captures_the_launch(kernel: CompiledKernel) -> None:
    x, y, c, d = _operands(300)
    kernel.prepare(x.get_device())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(x, y, c, d, 2.0, 300)
    assert y.isnan().all()
    for _ in range(2):
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.allclose(y[:, 0], _want(x, c, d))


def test_a_captured_launch_outlives_the_kernel(tmp_path: Path) -> None:
    """A captured launch can be replayed after `clear_caches` dropped the kernel."""
    source = Source("captured and dropped", arch(), lambda: kernels.affine(3.0))
    x, y, c, d = _operands(300)
    graph = torch.cuda.CUDAGraph()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path))
        compiled.kernel(source).prepare(x.get_device())
        with torch.cuda.graph(graph):
            compiled.kernel(source)(x, y, c, d, 2.0, 300)
        caches.clear_all()
        gc.collect()
        compiled.kernel(source)(x, torch.empty_like(y), c, d, 2.0, 300)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.allclose(y[:, 0], _want(x, c, d))


def test_rows_further_apart_than_32_bits_count(kernel: CompiledKernel) -> None:
    stride = 2**31 + 8
    if torch.cuda.mem_get_info()[0] < 3 * 4 * stride:
        pytest.skip("needs 26 GB of free GPU memory")
    memory = torch.empty(2 * stride, device="cuda")
    x = memory.as_strided((2, 8), (stride, 1))
    x.normal_()
    _, y, c, d = _operands(2)
    kernel(x, y, c, d, 2.0, 2)
    assert torch.allclose(y[:, 0], _want(x, c, d))


def test_every_device_runs_it(kernel: CompiledKernel) -> None:
    """A kernel runs on the device of its arguments, and the current device does not change."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    for i in reversed(range(count)):
        x, y, c, d = _operands(300, f"cuda:{i}")
        kernel(x, y, c, d, 2.0, 300)
        assert torch.cuda.current_device() == 0
        assert torch.allclose(y[:, 0], _want(x, c, d))
    x, y, c, d = _operands(300, "cuda:0")
    with pytest.raises(DeviceError, match="cuda:0, cuda:1"):
        kernel(x, y, c.to("cuda:1"), d, 2.0, 300)


def test_tensors_of_the_cpu_are_refused(kernel: CompiledKernel) -> None:
    x, y, c, d = _operands(300)
    with pytest.raises(DeviceError, match="cpu, cuda:0"):
        kernel(x, y, c.cpu(), d, 2.0, 300)
