"""Check compiled kernels: C interface on the CPU, calls, errors, and use in the emulator."""

from __future__ import annotations

import gc
import json
import re
import resource
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cutlass")

from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from attnkit import emulator
from attnkit.emulator import Undefined
from attnkit.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    LaunchError,
    OptionError,
    ShapeError,
)
from attnkit.jit import kernel as compiled
from attnkit.jit import loader
from attnkit.jit.abi import Signature, _gatherer
from attnkit.jit.arg_specs import Dim, NumberSpec, StreamSpec, TensorSpec, load_spec
from attnkit.jit.artifact import Artifact
from attnkit.jit.build import compile_source
from attnkit.jit.disk_cache import KernelCache
from attnkit.jit.kernel import Build, Source
from attnkit.jit.loader import Entry
from tests.jit import compiled_kernels as kernels


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "_kernels", {})


def affine_source(key: str = "affine", constant: float = 0.0, captured: int = 2) -> Source:
    return Source(key, "sm_90a", lambda: kernels.affine(constant, captured), name=key)


def no_stream(device: int) -> int:
    return 0


# -- what a compilation runs in ----------------------------------------------------------------


class _Measured(Exception):
    pass


def _most_faults() -> int:
    """Return the largest number of page faults of 500 calls, over stack depths from 0 to 249."""

    def nothing() -> None:
        pass

    def at(depth: int) -> int:
        if depth:
            return at(depth - 1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(500):
            nothing()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    return max(at(depth) for depth in range(250))


def test_calls_while_compiling_need_no_new_memory() -> None:
    found = []

    def build() -> Build:
        found.append(_most_faults())
        raise _Measured

    with pytest.raises(_Measured):
        compile_source(Source("", "sm_90a", build))
    assert found[0] < 100


# -- the C interface: what a host function receives --------------------------------------------


def _report_fakes() -> tuple[Any, ...]:
    narrow, wide = cute.sym_int, cute.sym_int64
    tensors = [
        make_fake_compact_tensor(Int32, (narrow(),)),
        make_fake_compact_tensor(Float32, (narrow(), narrow(divisibility=4)), stride_order=(1, 0)),
        make_fake_tensor(Float32, (narrow(), 3, narrow()), (wide(), wide(), 1)),
        make_fake_tensor(Float32, (wide(), narrow()), (narrow(), wide())),
        make_fake_tensor(Float32, (narrow(), narrow()), (0, 1)),
        make_fake_tensor(Float32, (narrow(), 5), (wide(divisibility=8), 1), assumed_align=16),
    ]
    out = make_fake_compact_tensor(Int64, (narrow(),))
    return out, tensors, Int32(0), Float32(0), Int64(0), Boolean(True)


@cache
def reporter() -> Artifact:
    return compile_source(Source("", "sm_90a", lambda: Build(kernels.report, _report_fakes())))


def _meta(shape: tuple[int, ...], stride: tuple[int, ...], dtype: Any = torch.float32) -> Any:
    """Return a tensor on the meta device, which has no memory."""
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


SIZES = st.integers(0, 2**31 - 1)
LONG = st.integers(0, 2**40)


@given(
    n=st.tuples(SIZES, SIZES.map(lambda n: n // 8), SIZES, SIZES, SIZES, SIZES, SIZES),
    s=st.tuples(LONG, LONG, st.integers(0, 2**31 - 1), LONG, LONG.map(lambda n: n // 8)),
    a=st.integers(-(2**31), 2**31 - 1),
    b=st.floats(-1e9, 1e9, width=32).map(float),
    c=st.integers(-(2**63), 2**63 - 1),
    d=st.booleans(),
)
def test_a_host_function_receives_what_was_passed(
    n: Any, s: Any, a: int, b: float, c: int, d: bool
) -> None:
    """A host function receives sizes, 64-bit strides, addresses and numbers in order."""
    report = reporter()
    n = tuple(max(x, 2) for x in n)  # strides of axes with one element may change
    tensors = [
        _meta((n[0],), (1,), torch.int32),
        _meta((n[2], 4 * n[1]), (4 * n[1], 1)),
        _meta((n[3], 3, n[4]), (s[0], s[1], 1)),
        _meta((n[5], n[6]), (s[2], s[3])),
        _meta((n[0], n[3]), (0, 1)),
        _meta((n[2], 5), (8 * s[4], 1)),
    ]
    out = torch.full((64,), -1)
    entry = Entry(report.image, report.code, report.function, report.signature)
    quick, device = report.signature._generated((out.to("meta"), *tensors, a, b, c, d), no_stream)
    assert device == -1
    slow, _ = report.signature.checked((out.to("meta"), *tensors, a, b, c, d), no_stream)
    assert list(quick) == list(slow)
    entry([out.data_ptr(), *quick[1:]])
    want = [x for t in tensors for x in (*t.shape, *t.stride(), t.data_ptr())]
    want += [a, int(b), c, int(d)]
    assert out[: len(want)].tolist() == want
    assert (out[len(want) :] == -1).all()


def test_calls_from_many_threads_do_not_mix() -> None:
    report = reporter()
    entry = Entry(report.image, report.code, report.function, report.signature)
    packing, _ = report.signature.layout
    count = len(packing.unpack(bytes(packing.size)))
    wrong: list[tuple[int, int]] = []

    def calls(number: int) -> None:
        out = torch.zeros(64, dtype=torch.int64)
        for i in range(2000):
            c = number * 1_000_000 + i
            entry([out.data_ptr(), *range(count - 3), c, True])
            if out[32] != c:
                wrong.append((c, int(out[32])))

    threads = [threading.Thread(target=calls, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_an_object_that_was_not_linked_runs_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a C compiler, the object file is loaded by the DSL's linker and works equally."""
    report = reporter()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    made = compile_source(Source("", "sm_90a", lambda: Build(kernels.report, _report_fakes())))
    assert made.image == b""
    assert report.image != b""
    outs = []
    for artifact in (made, report):
        out = torch.zeros(64, dtype=torch.int64)
        entry = Entry(artifact.image, artifact.code, artifact.function, artifact.signature)
        packing, _ = artifact.signature.layout
        count = len(packing.unpack(bytes(packing.size)))
        entry([out.data_ptr(), *range(count - 3), 7, True])
        outs.append(out.tolist())
    assert outs[0] == outs[1]
    assert sum(outs[0]) > 100


def test_the_status_of_the_host_function_is_an_error() -> None:
    """Without a driver, loading and launching raise LaunchError with the CUDA status."""
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    artifact = compiled.kernel(affine_source()).artifact
    entry = Entry(artifact.image, artifact.code, artifact.function, artifact.signature)
    with pytest.raises(LaunchError, match="cannot be loaded: cudaError"):
        entry.prepare(0)
    x, c = torch.zeros(4, 8), torch.zeros(4)
    values, _ = artifact.signature.gather((x, x, c, c, 1.0, 4), no_stream)
    with pytest.raises(LaunchError, match="launch of a kernel failed: cudaError"):
        entry(values)


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_again_after_a_compilation(enabled: bool) -> None:
    seen = []

    def build() -> Build:
        seen.append(gc.isenabled())
        raise ZeroDivisionError

    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ZeroDivisionError):
            compile_source(Source("", "sm_90a", build))
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [False]


# -- signatures ----------------------------------------------------------------------------------


def test_stand_ins_become_specifications() -> None:
    made = compiled.kernel(affine_source(captured=1)).signature
    rows = TensorSpec("float32", (Dim(32, 1), Dim(32, 8)), (Dim(64, 8), 1), 16)
    column = TensorSpec("float32", (Dim(32, 1),), (1,), made.specs[2].align)  # type: ignore[union-attr]
    numbers = (NumberSpec("Float32"), NumberSpec("Int32"))
    assert made.specs == (rows, rows, column, *numbers, StreamSpec())
    assert made.arity == 5
    assert str(rows) == "float32 [n, 8n] with strides [8n, 1], aligned to 16 bytes"


def test_a_signature_without_arguments() -> None:
    assert Signature(()).gather((), no_stream) == ((), -1)
    assert Signature((StreamSpec(),)).gather((), lambda device: 7) == ((7,), -1)


def test_what_cannot_be_passed_is_refused() -> None:
    with pytest.raises(ArgumentError, match="argument 1 of a kernel is of type str"):
        compile_source(Source("", "sm_90a", lambda: Build(kernels.Affine(), (Int32(1), "x"))))
    with pytest.raises(ArgumentError, match="argument 0, 1 of a kernel is of type dict"):
        compile_source(Source("", "sm_90a", lambda: Build(kernels.Affine(), ([Int32(1), {}],))))
    with pytest.raises(ArgumentError, match="2 streams"):
        Signature((StreamSpec(), StreamSpec()))
    function, arguments = kernels.affine().function, kernels.affine().arguments
    build = Build(function, arguments, "--gpu-arch sm_80")
    with pytest.raises(OptionError, match="--gpu-arch"):
        compile_source(Source("", "sm_90a", lambda: build))


SPECS = (
    TensorSpec("bfloat16", (Dim(), 64), (Dim(64, 8), 1), 16),
    TensorSpec("float32", (Dim(),), (1,), 4),
    NumberSpec("Float32"),
    NumberSpec("Int32"),
    StreamSpec(),
)


def _good() -> list[Any]:
    return [torch.zeros(5, 64).bfloat16(), torch.zeros(5), 1.5, 7]


def test_gathered_values_are_in_order() -> None:
    x, y, a, n = _good()
    values, device = Signature(SPECS).gather((x, y, a, n), lambda device: 99)
    assert list(values) == [x.data_ptr(), 5, 64, y.data_ptr(), 5, 1.5, 7, 99]
    assert device == -1


@pytest.mark.parametrize(
    ("at", "value", "error", "text"),
    [
        (0, torch.zeros(5, 64), DTypeError, "argument 0: dtype torch.float32, .* for bfloat16"),
        (0, torch.zeros(5, 32).bfloat16(), ShapeError, r"argument 0: shape \(5, 32\)"),
        (0, torch.zeros(64).bfloat16(), ShapeError, "argument 0: shape"),
        (0, torch.zeros(64, 5).bfloat16().T, ShapeError, r"strides \(1, 5\).*\[8n, 1\]"),
        (0, torch.zeros(5, 68).bfloat16()[:, :64], ShapeError, r"strides \(68, 1\)"),
        (0, torch.zeros(5, 72).bfloat16()[:, 4:68], ArgumentError, "not a multiple of 16 bytes"),
        (0, [1], ArgumentError, "argument 0: expected a tensor, got list"),
        (1, torch.zeros(5, device="meta"), DeviceError, "different devices: cpu, meta"),
        (2, torch.zeros(()), ArgumentError, "argument 2: expected a Python number for Float32"),
        (2, True, None, ""),
        (2, 3, None, ""),
        (2, 1e39, ArgumentError, "argument 2: 1e.39 does not fit into Float32"),
        (3, 1.0, ArgumentError, "argument 3: expected a Python number for Int32, got float"),
        (3, 2**31, ArgumentError, "argument 3: 2147483648 does not fit into Int32"),
    ],
)
def test_arguments_are_checked(
    at: int, value: Any, error: type[Exception] | None, text: str
) -> None:
    signature = Signature(SPECS)
    arguments = _good()
    arguments[at] = value
    for gather in (signature.gather, signature.checked):
        if error is DeviceError and gather == signature.gather:
            continue  # neither tensor is on a GPU, which is all that it looks at
        if error is None:
            gather(arguments, no_stream)
        elif "does not fit" in text and gather == signature.gather:
            packing, _ = signature.layout  # numbers are checked where they are packed
            with pytest.raises((struct.error, OverflowError)):
                packing.pack(*gather(arguments, no_stream)[0])
        else:
            with pytest.raises(error, match=text):
                gather(arguments, no_stream)
    with pytest.raises(ArgumentError, match="3 arguments: the kernel takes 4"):
        signature.gather(arguments[:3], no_stream)


def test_strides_without_effect_are_replaced() -> None:
    signature = Signature(SPECS[:1])
    odd = torch.zeros(5, 68).bfloat16()[:1, :64]
    assert odd.stride() == (68, 1)
    values, _ = signature.gather((odd,), no_stream)
    assert list(values) == [odd.data_ptr(), 1, 72]
    empty = torch.zeros(0, 64).bfloat16()
    assert signature.gather((empty,), no_stream)[0][1:] == (0, 64)


# -- kernels -------------------------------------------------------------------------------------


def _emulated(kernel: compiled.CompiledKernel, constant: float) -> None:
    x, c = torch.randn(300, 8), [torch.randn(300), torch.randn(300)]
    y = torch.full((300, 8), float("nan"))
    report = emulator.run(kernel.executable(), x, Undefined(y), *c, 2.0, 250)
    assert report.launches[0].warp_instructions > 0
    want = 2 * x[:250, 0].double() + constant + c[0][:250] + c[1][:250]
    assert torch.allclose(y[:250, 0].double(), want, atol=1e-5)
    assert y[250:, 0].isnan().all()


def test_the_emulator_runs_the_very_kernel() -> None:
    kernel = compiled.kernel(affine_source(constant=3.0))
    _emulated(kernel, 3.0)
    compiled._kernels.clear()
    again = compiled.kernel(affine_source(constant=3.0))
    assert again is not kernel
    assert again.artifact.code == kernel.artifact.code
    assert again.ptx == kernel.ptx
    _emulated(again, 3.0)


def test_a_kernel_is_made_once() -> None:
    builds: list[str] = []

    def source(key: str, constant: float) -> Source:
        def build() -> Build:
            builds.append(key)
            return kernels.affine(constant)

        return Source(key, "sm_90a", build)

    assert not compiled.is_compiled(source("one", 1.0))
    first = compiled.kernel(source("one", 1.0))
    assert compiled.kernel(source("one", 1.0)) is first
    assert compiled.is_compiled(source("one", 1.0))
    assert not compiled.is_compiled(source("two", 2.0))
    assert compiled.kernel(source("two", 2.0)) is not first
    assert builds == ["one", "two"]
    compiled._kernels.clear()
    assert compiled.is_compiled(source("one", 1.0))  # on disk
    assert compiled.kernel(source("one", 1.0)).stats == first.stats
    assert builds == ["one", "two"]


def test_an_artifact_survives_the_disk() -> None:
    artifact = compiled.kernel(affine_source()).artifact
    again = Artifact.load(artifact.dump())
    assert again.signature.specs == artifact.signature.specs
    assert (again.stats, again.seconds) == (artifact.stats, artifact.seconds)
    assert (again.problems, artifact.problems) == ((), ())
    slow = compile_source(Source("", "sm_90a", lambda: kernels.register_product(True)))
    assert Artifact.load(slow.dump()).problems == slow.problems != ()
    assert (again.code, again.image, again.ptx) == (artifact.code, artifact.image, artifact.ptx)
    assert ".target sm_90a" in again.ptx
    (stats,) = again.stats
    assert (stats.threads, stats.stack) == (128, 0)
    assert stats.registers > 0


PLANTED = "float32 or planted.append(1)"
SPEC = {"is": "TensorSpec", "dtype": "float32", "shape": [5], "stride": [1], "align": 4}


@pytest.mark.parametrize(
    "spec",
    [
        SPEC | {"dtype": PLANTED},
        SPEC | {"dtype": "load"},
        SPEC | {"dtype": None},
        SPEC | {"align": PLANTED},
        SPEC | {"align": 0},
        SPEC | {"align": True},
        SPEC | {"align": 4.0},
        SPEC | {"shape": [PLANTED]},
        SPEC | {"shape": [5, 5]},
        SPEC | {"shape": 5},
        SPEC | {"shape": [None]},
        SPEC | {"stride": [{"width": 32, "divisibility": PLANTED}]},
        SPEC | {"stride": [{"width": 16, "divisibility": 1}]},
        SPEC | {"stride": [{"width": 32, "divisibility": 0}]},
        SPEC | {"stride": [{"wide": 32}]},
        SPEC | {"more": 1},
        {"is": "TensorSpec"},
        {"is": "NumberSpec", "kind": PLANTED},
        {"is": "NumberSpec", "kind": []},
        {"is": PLANTED},
        {"is": []},
        {},
        [],
        "TensorSpec",
        None,
    ],
)
def test_a_spec_from_a_file_has_values_of_the_tables_only(spec: Any) -> None:
    assert load_spec(SPEC) == TensorSpec("float32", (5,), (1,), 4)
    with pytest.raises(ArgumentError):
        load_spec(spec)


@pytest.mark.parametrize(
    "edit",
    [
        {"signature": [SPEC | {"dtype": PLANTED}]},
        {"signature": [SPEC | {"is": "StreamSpec"}]},
        {"signature": [{"is": "StreamSpec"}] * 2},
        {"signature": None},
        {"function": "cutlass; rm"},
        {"function": "café"},
        {"function": 1},
        {"arch": "sm_90a\x1b[2J"},
        {"problems": ["\x1b[2J"]},
        {"problems": [1]},
        {"seconds": "1"},
        {"seconds": float("nan")},
        {"stats": [{"name": "k"}]},
        {"stats": [{"name": "k", "registers": "9", "stack": 0, "shared": 0, "code": 0}]},
        {"stats": [{"name": "k", "registers": -1, "stack": 0, "shared": 0, "code": 0}]},
        {"stats": [{"name": "\n", "registers": 1, "stack": 0, "shared": 0, "code": 0}]},
        {"parts": [1, 2, 4]},
        {"parts": [3, -1, 4]},
        {"parts": [3, 3]},
        {"parts": ["1", 2, 3]},
    ],
)
def test_an_artifact_from_a_file_is_checked(edit: dict[str, Any]) -> None:
    head = {"function": "f", "arch": "sm_90a", "signature": [SPEC], "stats": [], "problems": []}
    head |= {"seconds": 1.0, "parts": [1, 2, 3]}

    def load(head: dict[str, Any]) -> Artifact:
        text = json.dumps(head).encode()
        return Artifact.load(struct.pack("<Q", len(text)) + text + b"abcdef")

    assert load(head).packed_ptx == b"def"
    with pytest.raises(ArgumentError, match=r"not a compiled kernel|streams"):
        load(head | edit)


@given(st.binary(max_size=100))
def test_bytes_that_are_no_artifact_are_refused(data: bytes) -> None:
    for prefix in (b"", struct.pack("<Q", len(data))):
        with pytest.raises(ArgumentError):
            Artifact.load(prefix + data)
    nested = b"[" * 100_000
    with pytest.raises(ArgumentError):
        Artifact.load(struct.pack("<Q", len(nested)) + nested)


def test_the_generated_text_has_integers_and_names_of_ours_only() -> None:
    text = "\n".join(_gatherer(SPECS))
    names = set(re.findall(r"[a-zA-Z_]\w*", text))
    ours = {n for n in names if re.fullmatch(r"(a|p|dtype)\d|[ns]\d_\d", n)}
    keywords = {"def", "if", "is", "not", "and", "or", "in", "return", "None"}
    known = {"gather", "arguments", "stream", "device", "__class__", "float", "int", "bool"}
    methods = {"get_device", "data_ptr", "shape", "stride", "dtype"}
    assert names - ours <= keywords | known | methods
    assert "'" not in text
    assert '"' not in text


def test_an_entry_with_other_content_is_compiled_again() -> None:
    source = affine_source()
    cache, key = KernelCache(), compiled.full_key(source)
    good = compiled.kernel(source).artifact
    for content in (b"", b"no artifact", replace(good, arch="a card").dump()):
        cache.put(key, content)
        compiled._kernels.clear()
        assert compiled.kernel(source).artifact.code == good.code
        assert cache.get(key) != content


def test_a_kernel_that_was_not_linked_is_linked_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel stored without being linked is linked and stored again by the next process.

    Otherwise a C compiler that is missing or fails once would make later processes slow.
    """
    source = affine_source()
    with monkeypatch.context() as patch:
        patch.setattr(loader, "_c_compiler", lambda: None)
        assert compiled.kernel(source).artifact.image == b""
    for _ in range(2):
        compiled._kernels.clear()
        assert compiled.kernel(source).artifact.image != b""
        monkeypatch.setattr(compiled, "link", None)  # the second one is on disk


def test_the_table_of_kernels_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "TABLE_SIZE", 2)
    made: list[str] = []

    def artifact(source: Source) -> Artifact:
        made.append(source.key)
        return Artifact("f", "sm_90a", Signature(()), (), (), 0.0, b"", b"", b"")

    monkeypatch.setattr(compiled, "_artifact", artifact)
    first = compiled.kernel(affine_source("a"))
    for key in "bac":
        compiled.kernel(affine_source(key))
    assert made == ["a", "b", "c"]
    assert compiled.kernel(affine_source("a")) is first  # used again before c came
    compiled.kernel(affine_source("b"))
    assert made == ["a", "b", "c", "b"]


def test_code_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is read again uses the code that is already loaded.

    Loaded code is never unloaded, so loading it again would take memory again.
    """
    monkeypatch.setattr(loader, "_entries", {})
    report = reporter()
    parts = report.image, report.code, report.function, report.signature
    first = loader.loaded_entry(*parts)
    again = Artifact.load(report.dump())
    assert loader.loaded_entry(again.image, again.code, again.function, again.signature) is first
    steps: list[str] = []
    monkeypatch.setattr(Entry, "_initialise", lambda self, step, *numbers: steps.append(step))
    for device in (0, 1, 0):
        first.prepare(device)
    assert steps.count("load_to_device") == 2


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_89", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_120f", (12, 1), True),
    ],
)
def test_code_runs_on_its_architecture(
    arch: str, capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiled.runs_on(arch, capability) == runs
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old card")
    with pytest.raises(DeviceError, match="affine for sm_90a> cannot run on cuda:0, an old card"):
        compiled.kernel(affine_source()).prepare(0)


def test_an_empty_list_is_no_argument(recwarn: pytest.WarningsRecorder) -> None:
    kernel = compiled.kernel(affine_source("alone", captured=0))
    assert kernel.signature.arity == 4
    x, y = torch.randn(5, 8), torch.zeros(5, 8)
    emulator.run(kernel.executable(), x, y, 2.0, 5)
    assert torch.equal(y[:, 0], 2 * x[:, 0])
    assert list(recwarn) == []


def test_cpu_tensors_are_refused() -> None:
    kernel = compiled.kernel(affine_source())
    x, c = torch.zeros(4, 8), torch.zeros(4)
    with pytest.raises(DeviceError, match=r"affine for sm_90a> takes CUDA tensors.*executable"):
        kernel(x, x, c, c, 1.0, 4)
    with pytest.raises(ShapeError):
        kernel(x, x, c, c.expand(4, 4), 1.0, 4)


def test_a_kernel_on_disk_needs_no_dsl() -> None:
    """A fresh process reads, checks and loads a cached kernel without the DSL or the emulator."""
    program = """
import sys
import torch
from attnkit.jit import kernel as compiled
from attnkit.jit.loader import Entry

def build():
    from tests.jit import compiled_kernels
    return compiled_kernels.affine()

compiled._sources = lambda: "unchanged"
k = compiled.kernel(compiled.Source("fresh", "sm_90a", build))
a = k.artifact
Entry(a.image, a.code, a.function, a.signature)
k.signature.gather((torch.zeros(4, 8),) * 2 + (torch.zeros(4),) * 2 + (1.0, 4), lambda d: 0)
print(*(name in sys.modules for name in ("cutlass", "attnkit.emulator")), a.signature.arity)
"""
    root = Path(__file__).parents[2]
    printed = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
        )
        printed.append(done.stdout.strip())
    assert printed == ["True False 6", "False False 6"]
