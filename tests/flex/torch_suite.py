"""Run PyTorch's own tests of FlexAttention through `attnkit.flex`.

    python -m tests.flex.torch_suite PATH/test_flex_attention.py

PATH is the user's copy of `test/inductor/test_flex_attention.py` of PyTorch; the file is not part of
this repository. It is loaded with one change, that of the import: its names of
`torch.nn.attention.flex_attention` come from `attnkit.flex`. Tests that PyTorch skips on a CPU run
there too, with gradients, since attnkit has them. Left out are tests that read what Inductor or
Dynamo generate, and those in `EXCLUDED`, each with its reason. Of an expected error the class is
compared, not the wording. The exit status is 1 if a test fails, 2 if none runs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import re
import sys
import types
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.testing._internal import common_device_type

IMPORT = re.compile(r"\b(from|import) torch\.nn\.attention\.flex_attention\b")
# What a test reads, if its text has this word, and attnkit does not make.
READS = {
    "run_and_get_code": "reads the code that Inductor generates",
    "FileCheck": "reads the code that Inductor generates",
    "normalize_gm": "reads the graph of Dynamo",
    "CompileCounter": "counts the graphs of Dynamo",
    "EagerAndRecordGraphs": "reads the graph of Dynamo",
    "counters[": "counts the graphs of Dynamo",
    "make_fx": "reads the graph of PyTorch's operator",
    "metrics.": "counts Inductor's kernels",
    "InductorError": "expects an error of Inductor",
    "_inductor.kernel": "replaces a part of Inductor",
    "TritonTemplate": "replaces a part of Inductor",
    "compile_fx": "reads the graph of Inductor",
    "py_impl": "registers an implementation of PyTorch's operator",
    "flex_attention_hop(": "calls PyTorch's operator",
    "higher_order.flex_attention": "calls PyTorch's operator",
    "_higher_order_ops": "calls PyTorch's operator",
    "torch.nn.attention.flex_attention.flex_attention(": "calls PyTorch's function by its full name",
    "TRITON_DECODE": "asks for a kernel of Triton",
    "CUDAGraph": "captures a graph on a GPU",
}
EXCLUDED = {
    "test_backward_error_with_none_q_indices": "attnkit computes what PyTorch refuses",
    "test_invalid_block_size": "attnkit takes any block size",
    "test_cant_lower_error_message": "attnkit computes what PyTorch cannot lower",
    "test_large_batch_heads_grid_dimension": "needs the memory and the speed of a GPU",
    "test_return_aux_deprecation_warnings": "attnkit has not deprecated return_lse",
    "test_debug_flag_disables_internal_compilation": "attnkit needs no torch.compile",
    "test_autograd_function_in_score_mod": "Dynamo of torch 2.13 fails in it, with gradients",
    "test_flex_attention_logging": "reads the log of Inductor",
    "test_comparison_vs_sdpa_with_learnable_bias": "compares roundings with those of SDPA on a GPU",
    "test_load_rel_bias": "for pages that are not reserved its index leaves the table: refused",
    # its page table has no pages for most batch elements, and PyTorch reads block -1
    "test_flex_attention_stride_ordering_mode_paged_attention_permute_order3": (
        "attnkit refuses pages that are not reserved"
    ),
    "test_mixed_dtype": "attnkit refuses float8, and inputs of two dtypes",
    "test_mixed_device_error_message": "needs two devices",
    "test_captured_wrong_device_error_message": "needs two devices",
}
# Reasons of unittest.skipUnless that are about PyTorch's kernels.
KERNELS = re.compile("Triton")


def reason(name: str, function: Callable[..., Any], helpers: dict[str, str]) -> str:
    """Return why a test is left out, or "" if it runs.

    Args:
        name: name of the test, with the suffixes of its parameters.
        function: the test.
        helpers: text of the helper methods by name; a test that calls one is read with it.
    """
    for excluded, why in EXCLUDED.items():
        if name.startswith(excluded):
            return why
    with contextlib.suppress(OSError, TypeError):
        text = inspect.getsource(inspect.unwrap(function))
        text += "".join(t for n, t in helpers.items() if f"self.{n}(" in text)
        for word, what in READS.items():
            if word in text:
                return what
    return ""


def load(path: Path, device: str) -> types.ModuleType:
    """Load the file with the names of `attnkit.flex`, for tests on `device`."""
    text = IMPORT.sub(lambda found: f"{found[1]} attnkit.flex", path.read_text())
    module = types.ModuleType("torch_flex_tests")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # Dynamo and pickle find it by its name
    instantiate = common_device_type.instantiate_device_type_tests

    def for_device(tests: type, scope: dict[str, Any], *args: Any, **options: Any) -> None:
        instantiate(tests, scope, only_for=device)

    def unless(condition: Any, reason: str) -> Callable[[Any], Any]:
        return plain(condition or KERNELS.search(reason), reason)

    plain = unittest.skipUnless
    replaced: dict[str, Any] = {"instantiate_device_type_tests": for_device}
    for name in ("flex_attention_supported_platform",):
        replaced[name] = lambda test: test
    for name in ("skipCPUIf", "largeTensorTest"):
        replaced[name] = lambda *arguments: lambda test: test
    with contextlib.ExitStack() as stack:
        for name, new in replaced.items():
            stack.enter_context(patch.object(common_device_type, name, new))
        stack.enter_context(patch.object(unittest, "skipUnless", unless))
        exec(compile(text, str(path), "exec"), module.__dict__)
    supported = getattr(module, "DEVICE_SUPPORTS_BACKWARDS", None)
    if supported is not None:
        supported.items.add(device)
    return module


def chosen(module: types.ModuleType, only: str) -> tuple[unittest.TestSuite, dict[str, str]]:
    """Return the tests that run, and the reason of each that is left out, by name."""
    suite, left_out = unittest.TestSuite(), {}
    for case in vars(module).values():
        if not (isinstance(case, type) and issubclass(case, unittest.TestCase)):
            continue
        if case.__module__ != module.__name__ and not hasattr(case, "device_type"):
            continue
        helpers = {
            n: inspect.getsource(f)
            for n, f in inspect.getmembers(case, inspect.isfunction)
            if not n.startswith("test") and f.__module__ == module.__name__
        }
        for name in unittest.defaultTestLoader.getTestCaseNames(case):
            if only not in name:
                continue
            why = reason(name, getattr(case, name), helpers)
            if why:
                left_out[name] = why
            else:
                suite.addTest(case(name))
    return suite, left_out


@contextlib.contextmanager
def adjusted(backend: str) -> Iterator[None]:
    """Compile with a backend that needs no compiler, and compare errors by class."""
    real = torch.compile

    @functools.wraps(real)
    def compiled(model: Any = None, **options: Any) -> Any:
        if options.get("backend", "inductor") == "inductor" and backend != "inductor":
            options["backend"] = backend
            options.pop("mode", None)
            options.pop("options", None)
        return real(model, **options)

    def raises(self: unittest.TestCase, kind: Any, wording: Any, *args: Any, **options: Any) -> Any:
        return self.assertRaises(kind, *args, **options)  # noqa: PT027

    with (
        patch.object(torch, "compile", compiled),
        patch.object(unittest.TestCase, "assertRaisesRegex", raises),
    ):
        yield


class Result(unittest.TestResult):
    """Prints one line for each test that fails, and keeps the count of those that pass."""

    passed = 0

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.passed += 1

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.passed += 1

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self.passed += 1  # attnkit computes what PyTorch cannot

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        torch._dynamo.reset()

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self.show(test, err)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self.show(test, err)

    def show(self, test: unittest.TestCase, err: Any) -> None:
        message = (str(err[1]).strip().splitlines() or [""])[0]
        name = test.id().rpartition(".")[2]
        print(f"FAILED {name}: {err[0].__name__}: {message[:200]}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path, help="PyTorch's test_flex_attention.py")
    parser.add_argument("--only", default="", help="run only tests whose name contains this")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile")
    parser.add_argument("--verbose", action="store_true", help="print the traces of failures")
    args = parser.parse_args(arguments)
    if not args.path.is_file():
        parser.error(
            f"no file {args.path}; it is test/inductor/test_flex_attention.py of the sources of "
            f"torch {torch.__version__.partition('+')[0]}"
        )
    with adjusted(args.backend):
        suite, left_out = chosen(load(args.path, args.device), args.only)
        result = Result()
        try:
            suite.run(result)
        except KeyboardInterrupt:
            print("interrupted: the counts are those of a part")
    for what, counts in (
        ("left out", Counter(left_out.values())),
        ("skipped by the test", Counter(text for _, text in result.skipped)),
    ):
        for why, count in counts.most_common():
            print(f"{count:5} {what}: {why}")
    bad = result.errors + result.failures
    if args.verbose:
        print(*(trace for _, trace in bad), sep="\n")
    print(f"{result.passed} passed, {len(bad)} failed, {len(result.skipped)} skipped, "
          f"{len(left_out)} left out, on {args.device}, torch {torch.__version__}")  # fmt: skip
    return 1 if bad else 0 if result.passed else 2


if __name__ == "__main__":
    sys.exit(main())
