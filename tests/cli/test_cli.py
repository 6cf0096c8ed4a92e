"""Check the command line through `main`: its output, the stream it goes to, and the exit status."""

from __future__ import annotations

import argparse
import io
import re
import runpy
import shutil
import sys
import tempfile
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import attnkit
import attnkit.testing.load
from attnkit import cli, masks
from attnkit.cli import doctor, main
from attnkit.inspection import picture
from attnkit.inspection.summary import summarize
from attnkit.jit.disk_cache import KernelCache
from attnkit.schedule.plan import BACKENDS, has_dsl
from attnkit.schedule.targets import TARGETS, of_capability
from attnkit.splice.cpu import CpuHooks
from attnkit.util import environment

FILE = """
import torch
from attnkit import Variant, create_block_mask

slopes = torch.rand(4, requires_grad=True)

def score_mod(score, b, h, q, kv):
    return score - slopes[h] * (q - kv).abs()

def mask_mod(b, h, q, kv):
    return q >= kv

def far(score, b, h, q, kv):
    return score + slopes[q + 100]

def branch(b, h, q, kv):
    return q >= kv if q > 3 else kv > 3

def by_head(b, h, q, kv):
    return q >= kv + 8 * h

variant = Variant(score_mod, mask_mod)
blocks = create_block_mask(mask_mod, None, None, 32, 48, BLOCK_SIZE=16)
theirs = blocks.to_flex()
number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my.py"
    path.write_text(FILE)
    return str(path)


@pytest.mark.parametrize(
    "target",
    [
        "{file}:variant",
        "{file}:mask_mod",
        "masks:causal() & sliding_window(9)",
        "mods:softcap(2.0)",
        "masks:natten((4, 4), 3) & causal()",
    ],
)
def test_check_passes(target: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", target.replace("{file}", file), "--examples", "3"]) == 0
    out, err = capsys.readouterr()
    assert "passed: 3 cases" in out
    assert "dkey through lse" in out
    assert err == ""


def test_check_takes_a_mask(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = f"{file}:score_mod"
    assert main(["check", target, "--mask", "masks:causal() & prefix(3)", "--examples", "2"]) == 0
    assert "mask(b, h, q, kv) = (kv <= q) & (kv < 3)" in capsys.readouterr().out
    assert main(["check", f"{file}:variant", "--mask", "masks:causal"]) == 2
    assert "has a mask already" in capsys.readouterr().err


def test_check_passes_its_options_on(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--q-len 5 --kv-len 6:7 --heads 2 --batch 2 --dtype bfloat16,float16 --seed 3"
    given: dict[str, Any] = {}
    real = attnkit.testing.check_variant

    def record(variant: Any, **kwargs: Any) -> Any:
        given.update(kwargs)
        return real(variant, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attnkit.testing, "check_variant", record)
        assert main(["check", f"{file}:variant", "--examples", "2", *options.split()]) == 0
    assert (given["q_len"], given["kv_len"], given["heads"], given["batch"]) == (5, (6, 7), 2, 2)
    assert [str(d) for d in given["dtype"]] == ["torch.bfloat16", "torch.float16"]
    assert (given["examples"], given["seed"]) == (2, 3)


def test_check_fails_with_status_1_and_code_that_fails_too(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = CpuHooks.dscore
    monkeypatch.setattr(CpuHooks, "dscore", lambda *args: 1.01 * real(*args))
    assert main(["check", f"{file}:score_mod", "--examples", "20"]) == 1
    out, _ = capsys.readouterr()
    assert "FAILED" in out
    code = out.partition("run this to see it again:\n")[2]
    assert f"variant = load('{file}:score_mod')" in code
    with pytest.raises(attnkit.testing.CheckError):
        exec(code, {"__name__": "again"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("check nowhere.py:x", "attnkit: there is no file 'nowhere.py'"),
        (
            "check {file}:nothing",
            "my.py has no 'nothing'; it has Variant, blocks, branch, by_head, create_block_mask",
        ),
        ("check {file}:number", "my.py:number is of type int: 3; expected a Variant"),
        ("check {file}:branch --examples 2", "the truth of a traced value is not known"),
        ("check {file}:far --examples 2", "no sizes could be drawn that the variant allows"),
        ("check masks:casual", "attnkit.masks has no 'casual'; did you mean 'causal'?"),
        ("check masks:sliding_window(-1)", "attnkit: left must be at least 0"),
        ("check masks:causal --q-len 0", "argument --q-len: '0' is not a positive number"),
        ("check masks:causal --q-len 9:3", "argument --q-len: '9:3' is not a range low:high"),
        ("check masks:causal --examples some", "argument --examples: 'some' is not a positive num"),
        ("check masks:causal --dtype float8", "argument --dtype: 'float8' is not a dtype"),
        ("check masks:causal --device gpu", "argument --device: cannot use 'gpu'"),
        ("check", "the following arguments are required: target"),
        ("explain {file}:far --q-len 9", "captured tensor 'slopes' has 4 entries"),
        ("explain masks:causal --q-len 9 --dtype float16,bfloat16", "is more than one dtype"),
        ("explain masks:causal --q-len 9 --dtype int8", "argument --dtype: 'int8' is not a dtype"),
        ("explain causal --q-len 9", "'causal' is not a target; the name is missing"),
        ("show mods:softcap(2.0)", "'mods:softcap(2.0)' has no mask to show; expected a mask"),
        ("show {file}:blocks --q-len 8", "--q-len was given, and"),
        ("show {file}:blocks --heads 8", "--heads was given, and"),
        ("show {file}:theirs", "is PyTorch's BlockMask, whose block lists `show` cannot draw"),
        ("show masks:causal --block 3,4,5", "argument --block: '3,4,5' is not a size N or a pair"),
        ("show masks:causal --at 3", "argument --at: '3' is not a pair BATCH,HEAD"),
        ("show masks:causal --at 0,1", "at must name a head from 0 to 0, got 1"),
        ("show masks:causal --output no/where.png", "No such file or directory"),
        ("show masks:causal --output mask.jpg", "path must end in .png or .svg, got 'mask.jpg'"),
        ("show masks:natten((4,4),3) --q-len 8", "was built for query length 16, got 8"),
        ("swim masks:causal", "invalid choice: 'swim'"),
        ("", "the following arguments are required: command"),
    ],
)
def test_mistakes_are_told_without_a_traceback(
    arguments: str, message: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.replace("{file}", file).split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_explain(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--q-len 256 --kv-len 512 --heads 4 --batch 2"
    assert main(["explain", f"{file}:variant", *sizes.split()]) == 0
    out, _ = capsys.readouterr()
    variant = attnkit.testing.load(f"{file}:variant")
    expected = attnkit.explain(variant, q_len=256, kv_len=512, heads=4, batch=2)
    assert out == f"{expected}\n"
    assert "mask(b, h, q, kv) = kv <= q" in out
    assert "B=2 H=4 Sq=256 Skv=512" in out


def test_explain_and_check_take_what_makes_the_weights(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    explain = ["explain", f"{file}:variant", "--q-len", "64", "--heads", "4"]
    assert main([*explain, "--sink", "--dropout", "0.25"]) == 0
    out, _ = capsys.readouterr()
    assert "exp(sink[h])" in out
    assert "probability 64/256" in out
    assert main([*explain, "--sink", "--normalization", "sigmoid"]) == 2
    assert "drop one" in capsys.readouterr().err
    check = ["check", f"{file}:variant", "--examples", "2", "--normalization"]
    assert main([*check, "sigmoid"]) == 0
    assert "passed: 2 cases" in capsys.readouterr().out
    assert main([*check, "max"]) == 2
    assert "normalization must be one of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "shape"),
    [
        ("masks:causal", "Sq=1024 Skv=1024"),
        ("masks:natten((8,8),3)", "Sq=64 Skv=64"),
        ("mods:softcap(20.0)", "Sq=1024 Skv=1024"),
    ],
)
def test_explain_takes_the_masks_own_lengths(
    target: str, shape: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", target]) == 0
    assert shape in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("explain masks:causal --q-len 256 --timeline no/where.svg".split()) == 2
    assert "got 'no/where.svg': No such file or directory" in capsys.readouterr().err


def test_every_command_is_a_module_that_registers_itself() -> None:
    names = [command.__name__ for command in cli.COMMANDS]
    folder = Path(cli.__file__).parent
    shared = {"__init__", "arguments"}
    assert {
        f"attnkit.cli.{path.stem}" for path in folder.glob("*.py") if path.stem not in shared
    } == set(names)
    for command in cli.COMMANDS:
        parser = argparse.ArgumentParser()
        command.register(parser.add_subparsers())
        (known,) = parser._subparsers._group_actions[0].choices.items()  # type: ignore[union-attr,attr-defined]
        assert known[0] == command.__name__.rpartition(".")[2]
        assert known[1].get_default("run") is command.run


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "masks:causal()", "--q-len", "512", "--kv-len", "768"]) == 0
    out, _ = capsys.readouterr()
    blocks = attnkit.create_block_mask(masks.causal(), None, None, 512, 768)
    assert out == f"{picture.show(blocks)}\n{summarize(blocks)}\n"
    assert "density: 41.7% of tiles computed, 33.4% of 393216 positions kept" in out


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        ("masks:causal", "1024 queries x 1024 keys in tiles of 128 x 128"),
        ("masks:causal --kv-len 300 --block 64", "300 queries x 300 keys in tiles of 64 x 64"),
        ("masks:natten((8,8),3) --block 16,32", "64 queries x 64 keys in tiles of 16 x 32"),
        ("masks:natten((8,8),3).shift(q=9) --q-len 5", "5 queries x 64 keys"),
        ('masks:causal("bottom-right",q_len=9,kv_len=70)', "9 queries x 70 keys"),
        ("{file}:blocks", "32 queries x 48 keys in tiles of 16 x 16"),
        ("{file}:variant --q-len 40 --heads 4", "40 queries x 40 keys"),
        ("{file}:by_head --q-len 40 --heads 2 --at 0,1", "by_head, h=1\n40 queries"),
    ],
)
def test_show_takes_lengths_from_the_mask_or_the_options(
    arguments: str, shape: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", *arguments.replace("{file}", file).split()]) == 0
    assert shape in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_show_draws_into_a_file(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"mask.{kind}"
    assert main(["show", "masks:causal", "--q-len", "256", "--output", str(path)]) == 0
    expected = picture.save(tmp_path / f"again.{kind}", masks.causal(), 256)
    assert path.read_bytes() == expected.read_bytes()
    out, _ = capsys.readouterr()
    assert out.startswith(f"wrote {path}\ndensity: ")


def test_show_is_plain_where_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", plain)
    assert main(["show", "masks:causal", "--q-len", "256"]) == 0
    plain.flush()
    assert b"##++" in plain.buffer.getvalue()  # type: ignore[attr-defined]


def test_doctor_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line[4:29].strip() for line in lines]
    assert names[:6] == [
        "attnkit",
        "torch",
        "CUDA device",
        "CuTe DSL",
        "C compiler",
        "cache folder",
    ]
    kernels = [f"kernels {target.arch}" for target in TARGETS]
    assert [name for name in names if name.startswith("kernels")] == kernels
    assert "never run on silicon" in lines[names.index("kernels sm_100a")]
    backends = (*BACKENDS, "emulate:sm_100a", "emulate:sm_103a")
    assert names[-len(backends) :] == [f"backend {name}" for name in backends]
    assert all(line[:4] in ("ok  ", "--  ") for line in lines)
    runs = {name: line[:2] == "ok" for name, line in zip(names, lines, strict=True)}
    assert runs["torch"]
    assert runs["backend cpu"]
    cuda = torch.cuda.is_available()
    known = cuda and of_capability(torch.cuda.get_device_capability()) is not None
    expected = {"auto": True, "eager": True, "cpu": True}
    expected |= {"cute": known and has_dsl(), "emulate": has_dsl()}
    assert {name: runs[f"backend {name}"] for name in BACKENDS} == expected
    if not cuda:
        assert "query is not on a CUDA device" in lines[names.index("backend cute")]


def test_doctor_says_what_is_missing_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    folder = tmp_path / "file" / "cache"
    folder.parent.write_text("not a folder")
    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(folder))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = {finding.name: finding for finding in doctor.findings()}
    for name, todo in {
        "CUDA device": "nvidia-smi",
        "CuTe DSL": "pip install nvidia-cutlass-dsl",
        "C compiler": "install gcc or clang, or name one in CC",
        "cache folder": "set ATTNKIT_CACHE_DIR",
        "matplotlib": "pip install 'attnkit[plot]'",
        "hypothesis": "pip install 'attnkit[check]'",
    }.items():
        assert not found[name].present
        assert todo in found[name].todo
    assert str(folder) in found["cache folder"].state


def test_doctor_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    card = types.SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=139 << 30
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = {finding.name: finding for finding in doctor.findings()}["CUDA device"]
    assert (found.present, found.state) == (
        True,
        "NVIDIA H200, sm_90, 132 SMs, 139 GiB, and 1 more",
    )


def test_doctor_prints_the_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNKIT_LOG", "info")
    monkeypatch.delenv("ATTNKIT_SHARED_CACHE_DIR", raising=False)
    found = {finding.name: finding for finding in doctor.findings()}
    assert {variable.name for variable in environment.VARIABLES} <= set(found)
    assert found["ATTNKIT_LOG"].state == "'info'; info or debug: write the log to stderr"
    assert found["ATTNKIT_SHARED_CACHE_DIR"].state.startswith("not set (default: none); another")


def test_doctor_counts_cached_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path))
    KernelCache().put("key", b"x" * (1 << 20))
    found = {finding.name: finding for finding in doctor.findings()}["cache folder"]
    assert found.state == f"{tmp_path}, 1 kernels, 1.0 MiB"


def test_doctor_says_that_a_folder_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o777)
    found = {finding.name: finding for finding in doctor.findings()}["cache folder"]
    assert not found.present
    assert found.state == f"{tmp_path} is not used, everybody may write to it"


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a temporary folder; attnkit's cache and temporary files are inside it."""
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_doctor_says_who_may_write_the_cache(
    private: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--security"]) == 0
    assert "does not exist yet; it will be yours alone" in capsys.readouterr().out
    cache = KernelCache()
    cache.put("key", b"x")
    assert main(["doctor", "--security"]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"^ok  cache folder +{cache.folder}: root.* may write$", out, re.M)
    assert "1 kernels, of which 0 are ignored" in out
    assert "nobody else can replace" in out


@pytest.mark.parametrize(
    ("place", "mode", "said"),
    [
        ("cache", 0o777, r"--  cache folder .*everybody may write: everybody may .*chmod go-w"),
        ("cache", 0o770, r"--  cache folder .*the group \S+ may write: the group"),
        ("entry", 0o666, r"--    its kernels .*of which 1 are ignored: remove \w+.kernel"),
        (".", 0o777, r"--  above the cache folder .*could replace .*cache: move the cache"),
        (".", 0o777, r"--  temporary files .*could replace a kernel"),
        ("shared", 0o775, r"--  shared cache .*the group \S+ may write"),
        ("nowhere", None, r"--  shared cache .*nowhere does not exist"),
    ],
)
def test_doctor_finds_what_others_can_write(
    private: Path,
    place: str,
    mode: int | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cache = KernelCache()
    cache.put("key", b"x")
    path = cache.path("key") if place == "entry" else private / place
    if place in ("shared", "nowhere"):
        monkeypatch.setenv("ATTNKIT_SHARED_CACHE_DIR", str(path))
    if mode is not None:
        if place == "shared":
            path.mkdir()
        path.chmod(mode)
    assert main(["doctor", "--security"]) == 1
    assert re.search(said, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("above", r"--  above the cache folder +\S+/above cannot be looked at: .*: move the cache"),
        ("nothing", r"--  above the cache folder +\S+/above is a link to nothing: move the cache"),
        ("open/own", r"--  above the cache folder +\S+/open: everybody may write to it"),
    ],
)
def test_doctor_looks_behind_links_above_the_cache(
    private: Path,
    target: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A folder above the cache that is a loop of links cannot be looked at, by root either."""
    (private / "open" / "own").mkdir(parents=True)
    (private / "open").chmod(0o777)
    (private / "above").symlink_to(private / target)
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(private / "above" / "cache"))
    assert main(["doctor", "--security"]) == 1
    assert re.search(said, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("target", "sizes"),
    [
        ("masks:natten((8,8),3)", "Sq=64 Skv=64"),
        ('masks:causal("bottom-right",q_len=9,kv_len=70)', "Sq=9 Skv=70"),
        ("{file}:blocks", "Sq=32 Skv=48"),
        ("masks:natten((8,8),3).shift(q=9) --q-len 5", "Sq=5 Skv=64"),
    ],
)
def test_explain_takes_lengths_from_the_mask(
    target: str, sizes: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *target.replace("{file}", file).split()]) == 0
    assert sizes in capsys.readouterr().out


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "check" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"attnkit {attnkit.__version__}\n"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.delenv("ATTNKIT_PROGRESS", raising=False)
    assert main(["check", "masks:causal", "--examples", "2"]) == 0
    shown = [line for line in terminal.getvalue().split("\r\033[K") if "calls" in line]
    assert shown == ["1 of 2 calls", "2 of 2 calls"]
    assert terminal.getvalue().endswith("\r\033[K")


def test_python_m_attnkit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["attnkit", "explain", "masks:causal", "--q-len", "64"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("attnkit", run_name="__main__")
    assert stop.value.code == 0
