"""Configure pytest so that test runs are repeatable.

This file sets the hypothesis profiles, fixed seeds and one torch thread, and the rules for tests
that need a GPU or the libraries of the CuTe DSL.
"""

from __future__ import annotations

import collections
import gc
import os
import signal
from pathlib import Path

import hypothesis
import pytest
import torch

from attnkit.jit import dsl_runtime

GPU_TESTS = Path(__file__).parent / "gpu"

# With --dsl-libraries, each test of machine code runs its first case and every fifth one after it. The
# products of lists there are of 2, 3, 4 and 8 entries: a distance prime to them meets entries of all.
EVERY = 5

# dev: new random examples at each run, failures kept in .hypothesis (plain `pytest`).
# ci: the same examples at every run (`make test`).
# thorough: a long search (`make test HYPOTHESIS_PROFILE=thorough`).
hypothesis.settings.register_profile("dev", deadline=None, max_examples=50, print_blob=True)
hypothesis.settings.register_profile(
    "ci", deadline=None, max_examples=50, print_blob=True, derandomize=True, database=None
)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000, print_blob=True)


class _TorchRandom:
    """Expose torch's generator to hypothesis, so that each example starts from the same state."""

    def seed(self, value: int) -> None:
        torch.manual_seed(value)

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


_torch_random = _TorchRandom()  # hypothesis holds it weakly


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--dsl-libraries",
        metavar="BUILD",
        help="the build of the DSL's libraries that must be in use, as cu13; takes a sample of the "
        "tests of machine code (make test-assemblers)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background jobs with SIGINT ignored, which subprocesses of tests would inherit.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    wanted = config.getoption("--dsl-libraries")
    if wanted and wanted not in (found := dsl_runtime.library()).parts[-3:]:
        raise pytest.UsageError(
            f"--dsl-libraries={wanted}, and the DSL in use has {found}: put the folder with "
            f"nvidia_cutlass_dsl/{wanted} on PYTHONPATH"
        )
    # Emulated kernels compile faster; a finding has its PTX line, but no Python line.
    os.environ.setdefault("ATTNKIT_EMULATE_LINES", "0")
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
    hypothesis.register_random(_torch_random)
    # Tests are small and run side by side; one thread also fixes the order of every reduction.
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all tests under tests/gpu with the marker `gpu`.

    Without a CUDA device they are skipped, or the run fails if `-m gpu` requests them. With
    --dsl-libraries, a sample of the tests of machine code stays: those that differ in their
    parameters alone ask another assembler the same question, and the default one assembles all.
    """
    if config.getoption("--dsl-libraries"):
        _keep_sample(config, items)
    gpu_items = [item for item in items if GPU_TESTS in item.path.parents]
    for item in gpu_items:
        item.add_marker("gpu")
    if torch.cuda.is_available():
        return
    if config.getoption("markexpr") == "gpu":
        raise pytest.UsageError("-m gpu needs a CUDA device, and torch.cuda sees none")
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _keep_sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect all tests marked `assembled` but each `EVERY`-th case of a test function."""
    seen: collections.Counter[str] = collections.Counter()
    kept, others = [], []
    for item in items:
        function = item.nodeid.partition("[")[0]
        assembled = item.get_closest_marker("assembled") is not None
        (others if assembled and seen[function] % EVERY else kept).append(item)
        seen[function] += assembled
    items[:] = kept
    config.hook.pytest_deselected(items=others)


def pytest_collectstart() -> None:
    """Seed torch before a module is imported, so that its random tables are the same in every run.

    What modules draw before it depends on the order of sets.
    """
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """Collect garbage less often: modules, tests and graphs of the DSL live long, and are many."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
