"""Check which template and tiles a call gets, and the error where there is none."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from attnkit import explain, flex_attention, mods
from attnkit.codegen.score_form import score_form
from attnkit.errors import OptionError, UnsupportedError
from attnkit.schedule import plan
from attnkit.schedule.kernel_table import (
    HEAD_DIMS,
    Kernel,
    fitting_kernel,
    kernels,
    mask_tiles,
    padded_head_dim,
    padded_head_dims,
)
from attnkit.schedule.plan import Call, choose, no_kernel_error, refusals
from attnkit.schedule.targets import (
    TARGETS,
    Target,
    missing_arch,
    missing_capability,
    of_template,
)
from attnkit.sparsity.block_runs import BLOCK

HOPPER = Call("bfloat16", 128, 128, (9, 0))
CAUSAL = lambda b, h, q, kv: q >= kv


@pytest.fixture
def dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch the plan to assume that the DSL is installed."""
    monkeypatch.setattr(plan, "has_dsl", lambda: True)


@pytest.mark.usefixtures("dsl")
def test_a_hopper_call_is_served_by_default() -> None:
    for backend in ("auto", "cute"):
        found = choose(backend, device="cuda", call=HOPPER)
        assert found.template == "sm90"
        assert found.block == kernels(128, 128)[0].block
    assert choose("cute", device="cuda", call=replace(HOPPER, dtype="float16")).template == "sm90"


@pytest.mark.usefixtures("dsl")
@pytest.mark.parametrize("target", TARGETS)
def test_each_architecture_has_its_template(target: Target) -> None:
    call = replace(HOPPER, capability=target.capability)
    found = choose("cute", device="cuda", call=call)
    assert found.template == target.name
    assert of_template(found.template) is target
    assert f"CuTe-DSL kernel for {target.arch}" in found.reason
    emulated = choose(f"emulate:{target.arch}", device="cpu", call=replace(call, capability=None))
    assert emulated.template == f"emulate:{target.name}"
    assert of_template(emulated.template) is target
    assert emulated.block == found.block
    assert ("never on a GPU" in str(found)) != target.proven


BLACKWELL = replace(HOPPER, capability=(10, 0))
RULES = [
    (replace(BLACKWELL, dtype="float32"), "the Blackwell kernel computes bfloat16 and float16"),
    (
        replace(BLACKWELL, head_dim=584),
        "Blackwell kernel takes head dims up to 576 with values up to 512",
    ),
    (
        replace(BLACKWELL, listed_block=(64, 64)),
        r"which have \(512, 128\) or \(256, 128\) or \(128, 128\) or \(128, 64\)",
    ),
    (replace(HOPPER, capability=None), "query is not on a CUDA device"),
    (
        replace(HOPPER, capability=(8, 0)),
        r"compute capability 8\.0; there are kernels for 9\.0 \(Hopper\)",
    ),
    (replace(HOPPER, capability=(12, 0)), "compute capability 12.0, which has neither tensor mem"),
    (
        replace(HOPPER, dtype="float32"),
        "computes bfloat16 and float16, the query is float32",
    ),
    (replace(HOPPER, head_dim=584), "head dims up to 576 with values up to 512, got 584 and 128"),
    (replace(HOPPER, value_dim=520), "head dims up to 576 with values up to 512, got 128 and 520"),
    (replace(HOPPER, head_dim=100), "multiples of 8, got 100 and 128"),
    (replace(HOPPER, value_dim=4), "multiples of 8, got 128 and 4"),
    (
        replace(HOPPER, listed_block=(64, 64)),
        r"tiles of \(64, 64\) do not fit the Hopper kernels for head dims 128 and 128, which have "
        + re.escape(" or ".join(str(kernel.block) for kernel in kernels(128, 128))),
    ),
]


@pytest.mark.usefixtures("dsl")
@pytest.mark.parametrize(("call", "message"), RULES)
def test_each_rule_says_what_it_needs(call: Call, message: str) -> None:
    (reason,) = refusals(call, BLOCK)
    with pytest.raises(UnsupportedError, match=message) as caught:
        choose("cute", device="cuda", call=call)
    assert "backend='cute'" in str(caught.value)
    assert 'backend="auto"' in str(caught.value)
    fallen = choose("auto", device="cuda", call=call)
    assert fallen.template == "cpu"
    assert reason in fallen.reason


def test_without_the_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "has_dsl", lambda: False)
    for backend, device in (("cute", "cuda"), ("emulate", "cpu")):
        with pytest.raises(UnsupportedError, match="nvidia-cutlass-dsl is not installed"):
            choose(backend, device=device, call=HOPPER)
    assert "not installed" in choose("auto", device="cuda", call=HOPPER).reason


@pytest.mark.usefixtures("dsl")
def test_all_reasons_are_given_at_once() -> None:
    call = Call("float64", 600, 20, None)
    assert len(list(refusals(call, BLOCK))) == 4
    with pytest.raises(UnsupportedError, match=r"not on a CUDA device.*float64.*576.*of 8"):
        choose("cute", device="cpu", call=call)


@pytest.mark.usefixtures("dsl")
def test_the_emulator_wants_tensors_of_the_cpu_and_no_gpu() -> None:
    call = replace(HOPPER, capability=None)
    found = choose("emulate", device="cpu", call=call)
    assert found.template == "emulate:sm90"
    assert found.block == choose("cute", device="cuda", call=HOPPER).block
    with pytest.raises(UnsupportedError, match="runs on CPU tensors, query is on cuda"):
        choose("emulate", device="cuda", call=HOPPER)
    with pytest.raises(UnsupportedError, match="the query is float32"):
        choose("emulate", device="cpu", call=replace(call, dtype="float32"))


def test_the_backends_that_need_no_kernel() -> None:
    assert choose("eager", device="cuda", call=HOPPER).template == "eager"
    assert choose("cpu", device="cuda", call=HOPPER).template == "cpu"
    for unknown in ("gpu", "cute:sm_90a", "cpu:"):
        with pytest.raises(OptionError, match=f"backend='{unknown}' is not known; expected one of"):
            choose(unknown, device="cpu")


@pytest.mark.usefixtures("dsl")
def test_an_architecture_for_the_emulator() -> None:
    call = replace(HOPPER, capability=None)
    named = choose("emulate:sm_90a", device="cpu", call=call)
    assert named == choose("emulate", device="cpu", call=call)
    with pytest.raises(UnsupportedError, match="sm_80 is not an architecture with a kernel; there"):
        choose("emulate:sm_80", device="cpu", call=call)
    with pytest.raises(UnsupportedError, match="sm_120a has neither tensor memory nor tcgen05"):
        choose("emulate:sm_120a", device="cpu", call=call)


# ------------------------------------------------------------------------------------------- tiles

DIMS = list(itertools.product((8, 64, 72, 96, 128, 136, 192, 200, 256), repeat=2))
WIDE = [(576, 512), (512, 512), (384, 384), (264, 264), (576, 8), (264, 128), (64, 512), (256, 392)]


@pytest.mark.parametrize(("head_dim", "value_dim"), DIMS + WIDE)
def test_every_kernel_fits_shared_memory(head_dim: int, value_dim: int) -> None:
    pytest.importorskip("cutlass", reason="the DSL exists for Linux only")
    from attnkit.splice import sm90
    from attnkit.templates.sm90 import config

    assert kernels(head_dim, value_dim)
    for kernel in kernels(head_dim, value_dim):
        dims = head_dim, value_dim
        fields = sm90.config_of(score_form(None), kernel, "bfloat16", dims, False, False)
        settings = sm90.settings_of(fields)
        assert settings.smem_bytes <= config.SMEM_BYTES
        assert (settings.block_q, settings.block_kv) == kernel.block
        assert settings.head_dim >= head_dim
        assert settings.head_dim_v * kernel.value_parts >= value_dim


@pytest.mark.parametrize(("head_dim", "value_dim"), DIMS + WIDE)
def test_every_blackwell_kernel_fits_its_memories(head_dim: int, value_dim: int) -> None:
    pytest.importorskip("cutlass", reason="the DSL exists for Linux only")
    from attnkit.splice import sm100
    from attnkit.templates.sm100 import config

    for kernel in kernels(head_dim, value_dim, template="sm100"):
        dims, form = (head_dim, value_dim), score_form(None)
        fields = sm100.config_of(form, kernel, "bfloat16", dims, False, False, "sm_100a")
        settings = config.ForwardConfig(**fields)  # or it says what does not fit
        assert (settings.block_q, settings.block_kv) == kernel.block
        assert settings.head_dim >= head_dim
        assert settings.head_dim_v * settings.value_parts >= value_dim
        layout = sm100.layout_of(fields)
        assert layout.shared_bytes <= config.SMEM_BYTES
        taken = [c for _, first, count in layout.columns for c in range(first, first + count)]
        assert len(taken) == len(set(taken))
        assert max(taken) < config.TMEM_COLUMNS
        warps = [w for role in layout.roles for w in role.warps]
        assert len(warps) == len(set(warps)) <= settings.threads // 32


def test_tiles_of_a_mask_can_be_joined_to_those_of_every_kernel() -> None:
    single, wide, pair = Kernel((128, 192)), Kernel((256, 96)), Kernel((512, 128), ctas=2)
    assert mask_tiles([single, pair]) == (128, 192)
    assert mask_tiles([wide, single]) == (256, 96)
    assert mask_tiles([pair, single, wide]) == (128, 64)
    tall, low = Kernel((192, 128)), Kernel((128, 128))
    assert mask_tiles([tall, low]) == (64, 128)
    assert mask_tiles([Kernel((256, 128)), low]) == (256, 128)
    assert mask_tiles([low, tall]) == (128, 128)


def test_the_kernel_that_fits_the_tiles_of_a_mask() -> None:
    """The kernel with these tiles fits best, unless lists of blocks leave the mask unread."""
    some = [Kernel((64, 64)), Kernel((128, 96)), Kernel((128, 128)), Kernel((32, 32))]
    assert fitting_kernel(some, (128, 128), False) is some[2]
    assert fitting_kernel(some, (128, 128), True) is some[0]
    assert fitting_kernel(some, (128, 192), False) is some[0]
    assert fitting_kernel(some, (256, 96), False) is some[1]
    assert fitting_kernel(some, (64, 96), True) is some[3]
    assert fitting_kernel(some, (96, 64), False) is some[3]


@pytest.mark.parametrize(("head_dim", "expected"), [(8, 64), (64, 64), (72, 96), (200, 256)])
def test_width(head_dim: int, expected: int) -> None:
    assert padded_head_dim(head_dim) == expected
    assert expected in HEAD_DIMS


def test_widths_of_a_query_and_a_value() -> None:
    """Up to 256 each is padded by itself; beyond, a Hopper kernel has wider steps."""
    for head_dim, width in ((8, 64), (72, 96), (192, 192)):
        assert padded_head_dims((head_dim, 256)) == (width, 256)
    assert padded_head_dims((40, 264), value_parts=2) == (128, 192)


@pytest.mark.usefixtures("dsl")
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_tiles_that_the_caller_fixed(dim: int) -> None:
    call = Call("bfloat16", dim, dim, (9, 0), fixed=True)
    for kernel in kernels(dim, dim):
        assert choose("cute", device="cuda", block=kernel.block, call=call).block == kernel.block
    with pytest.raises(UnsupportedError, match=r"tiles of \(32, 32\) do not fit"):
        choose("cute", device="cuda", block=(32, 32), call=call)
    fallen = choose("auto", device="cuda", block=(32, 32), call=call)
    assert (fallen.template, fallen.block) == ("cpu", (32, 32))


@pytest.mark.usefixtures("dsl")
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("listed", [(128, 128), (256, 128), (384, 256)])
def test_block_lists_get_a_kernel_whose_tiles_divide_theirs(
    dim: int, listed: tuple[int, int]
) -> None:
    call = Call("bfloat16", dim, dim, (9, 0), listed_block=listed)
    found = choose("cute", device="cuda", call=call)
    assert all(own % new == 0 for own, new in zip(listed, found.block, strict=True))
    first = kernels(dim, dim)[0]
    if all(own % new == 0 for own, new in zip(listed, first.block, strict=True)):
        assert found.block == first.block


# --------------------------------------------------------------------- through the public operator


def test_the_emulated_kernel_is_chosen_and_shown() -> None:
    pytest.importorskip("cutlass", reason="the DSL exists for Linux only")
    text = str(explain(mods.softcap(5.0), q_len=64, backend="emulate"))
    assert "template emulate:sm90: asked for; CuTe-DSL kernel for sm_90a" in text
    block = kernels(64, 64, modded=True)[0].block
    assert f"tiles    {block[0]} x {block[1]}" in text


def test_options_and_lists_reach_the_plan() -> None:
    pytest.importorskip("cutlass", reason="the DSL exists for Linux only")
    q = torch.zeros(1, 1, 130, 64, dtype=torch.bfloat16)
    options = {"BLOCK_M": 32, "BLOCK_N": 32}
    with pytest.raises(UnsupportedError, match=r"tiles of \(32, 32\) do not fit"):
        flex_attention(q, q, q, None, CAUSAL, kernel_options=options, backend="emulate")
    fine = create_block_mask(CAUSAL, None, None, 130, 130, device="cpu", BLOCK_SIZE=64)
    with pytest.raises(UnsupportedError, match=r"tiles of \(64, 64\) do not fit"):
        flex_attention(q, q, q, None, fine, backend="emulate")
    with pytest.raises(UnsupportedError, match="the query is float32"):
        flex_attention(q.float(), q.float(), q.float(), backend="emulate")
    ids, table = torch.arange(130) // 50, torch.zeros(60)

    def unproven(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + table[torch.where(ids[q] == ids[kv], q - kv, 0)]

    with pytest.raises(UnsupportedError, match="a kernel does not check indices"):
        flex_attention(q, q, q, unproven, backend="emulate")


def test_texts_of_what_is_missing() -> None:
    every = ", ".join(f"{t.capability[0]}.{t.capability[1]} ({t.card})" for t in TARGETS)
    start = "the GPU has compute capability 8.6"
    assert missing_capability((8, 6)) == f"{start}; there are kernels for {every}"
    consumer = missing_capability((12, 0))
    assert consumer.startswith("the GPU has compute capability 12.0, which ")
    assert consumer.endswith(f"; there are kernels for {every}")
    archs = ", ".join(t.arch for t in TARGETS)
    assert missing_arch("sm_86") == (
        f"sm_86 is not an architecture with a kernel; there are kernels for {archs}"
    )
    assert missing_arch("sm_12") == (
        f"sm_12 is not an architecture with a kernel; there are kernels for {archs}"
    )
    for arch in ("sm_120", "sm_120a", "sm_121f"):
        own = missing_arch(arch)
        assert own.startswith(f"{arch} ")
        assert "is not an architecture" not in own
        assert own.endswith(f"; there are kernels for {archs}")
    for backend, what in (
        ("cute", "a kernel compiled for a GPU"),
        ("emulate", "a GPU kernel in the emulator"),
    ):
        error = no_kernel_error(backend, "no reason")
        assert str(error).startswith(
            f"backend='{backend}' asks for {what}, and there is none for this call: no reason. "
        )
