"""Check `attnkit compile`: which kernels it compiles, its output, and its exit status."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass")

from attnkit.cli import compile as command
from attnkit.cli import main
from attnkit.jit import kernel
from attnkit.jit.emulator_runs import launches
from attnkit.jit.kernel import Source
from tests.jit import compiled_kernels as kernels


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernel, "_kernels", {})
    monkeypatch.setattr(kernel, "_sources", lambda: "unchanged")


GOOD = Source("good", "sm_90a", lambda: kernels.register_product(False), name="patient")
BAD = Source("bad", "sm_90a", lambda: kernels.register_product(True), name="hasty")


def test_kernels_are_compiled_and_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command.compile_all([GOOD]) == 0
    head, line, kept = capsys.readouterr().out.splitlines()
    assert head.split() == ["kernel", "registers", "stack", "shared", "code", "seconds"]
    (stats,) = kernel.kernel(GOOD).stats
    found = re.fullmatch(r"patient +(\d+) +0 B +([\d.]+) KiB +([\d.]+) KiB +\d+\.\d\d", line)
    assert found is not None, line
    assert int(found[1]) == stats.registers
    # 64 x 64 elements of two bytes, and the kilobyte that the architecture takes for itself
    assert 8.0 <= float(found[2]) <= 10.0
    assert float(found[3]) == round(stats.code / 1024, 1)
    assert kept == f"kept in {tmp_path}"
    assert [p.suffix for p in tmp_path.iterdir()] == [".kernel"]


def test_a_slow_kernel_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.compile_all([GOOD, BAD]) == 1
    out = capsys.readouterr().out
    assert len(re.findall("problem: .*products are serialised", out)) == 1
    assert out.index("hasty") < out.index("problem:")


def test_a_kernel_that_cannot_be_kept_is_a_failure(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="everybody may write"):
        assert command.compile_all([GOOD]) == 1
    assert f"not kept: {tmp_path} cannot be used" in capsys.readouterr().out


def test_a_second_run_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    command.compile_all([GOOD])

    def build() -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(kernel, "_kernels", {})
    assert command.compile_all([Source("good", "sm_90a", build)]) == 0  # type: ignore[arg-type]


def test_shared_memory_is_asked_for_by_the_host_code() -> None:
    (launch,) = launches(kernel.kernel(GOOD))
    assert (launch.block, launch.grid, launch.cluster) == ((128, 1, 1), (1, 1, 1), (1, 1, 1))
    assert 8192 <= launch.shared <= 9216


def test_without_a_compiler_shared_memory_is_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert command.compile_all([GOOD]) == 0
    assert re.search(r"patient +\d+ +0 B +\? ", capsys.readouterr().out)


def test_the_request_comes_from_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[command.Request] = []

    def sources(request: command.Request) -> Sequence[Source]:
        asked.append(request)
        return [GOOD]

    def compile_all(wanted: Sequence[Source]) -> int:
        assert list(wanted) == [GOOD]
        return 1

    monkeypatch.setattr(command, "sources", sources)
    monkeypatch.setattr(command, "compile_all", compile_all)
    options = "compile masks:causal --arch sm_100a --dtype float16,bfloat16 --head-dim 64 --heads 6"
    assert main([*options.split(), "--kv-heads", "2", "--q-len", "100", "--backward"]) == 1
    assert [r.dtype for r in asked] == [torch.float16, torch.bfloat16]
    (rest,) = {dataclasses.replace(r, dtype=torch.float16, variant=None) for r in asked}
    expected = command.Request(None, torch.float16, "sm_100a", 1, 6, 2, 100, 100, 64, 64, True)
    assert rest == expected


def test_a_mask_is_compiled_as_a_call_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("compile masks:causal --head-dim 64 --q-len 100000".split()) == 0
    out = capsys.readouterr().out
    assert re.search(r"forward.* 0 B +\d", out)
    (source,) = kernel._kernels
    assert source.arch == "sm_90a"
    assert kernel.kernel(source).artifact.problems == ()


def test_a_mask_with_lengths_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("compile masks:natten((8,8),3) --head-dim 64".split()) == 0
    assert re.search(r"forward.* 0 B +\d", capsys.readouterr().out)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_a_kernel_for_blackwell(arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"compile masks:causal --arch {arch} --head-dim 64".split()) == 0
    assert re.search(r"forward.* 0 B +\d", capsys.readouterr().out)
    (source,) = kernel._kernels
    assert source.arch == arch
    assert f".target {arch}" in kernel.kernel(source).ptx
    assert "tcgen05.mma" in kernel.kernel(source).ptx


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--arch sm_12", "--arch sm_12: sm_12 is not an architecture with a kernel; there are"),
        ("--arch sm_120a", "--arch sm_120a: sm_120a has neither tensor memory nor tcgen05"),
        (
            "--arch sm_100a --head-dim 584",
            "the Blackwell kernel takes head dims up to 576 with values up to 512, got 584",
        ),
        (
            "--dtype float64",
            "there is no kernel to compile: the Hopper kernel computes bfloat16 and float16, the "
            "query is float64",
        ),
    ],
)
def test_what_cannot_be_compiled_is_said(
    options: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", "masks:causal", *options.split()]) == 2
    assert text in capsys.readouterr().err
